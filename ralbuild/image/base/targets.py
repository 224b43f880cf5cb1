"""What the bases of the two targets ask for: package roots, what is left out, what is replaced. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ralbuild.errors import UsageError


@dataclass(frozen=True, slots=True)
class BaseTarget:
    """What one target's base is made of.

    Attributes:
        name: as on the command line and in the labels.
        roots: requirements that pip resolves; it adds what these declare.
        unused: declared dependencies that no import of a server reaches, by normalised name.
        replaced: package to exact version, instead of the one that another package declares.
        system: shared libraries that the machine under the container brings.
        room: bytes that making the base takes for a while: its file tree, and the layers written from it.
        cuda: version of the CUDA runtime in it; empty for none.
        about: one line for the head of the lock.
    """

    name: str
    roots: tuple[str, ...]
    unused: frozenset[str]
    room: int
    about: str
    replaced: Mapping[str, str] = field(default_factory=dict)
    system: frozenset[str] = frozenset()
    cuda: str = ""


_SERVER = ("tokenizers", "safetensors", "jinja2", "starlette", "uvicorn", "prometheus-client", "numpy")
_UNUSED = frozenset(
    {
        # The command lines of transformers and huggingface-hub.
        *("annotated-doc", "annotated-types", "markdown-it-py", "mdurl", "pydantic", "pydantic-core"),
        *("pygments", "rich", "shellingham", "typer", "typing-inspection"),
        # Downloads from a model hub, and remote file systems: the image needs no network.
        *("fsspec", "hf-xet"),
        # Building extensions, and drawing graphs of programs: nothing is compiled in the image.
        *("networkx", "setuptools"),
    }
)

_CPU = BaseTarget(
    name="cpu",
    roots=("torch==2.13.0", "transformers==5.24.*", *_SERVER),
    unused=_UNUSED,  # tests/test_base_tree.py proves that nothing imports them
    room=1_600_000_000,
    about="torch is a CPU build.",
)

_CUDA = BaseTarget(
    name="cuda",
    # The newest torch whose CUDA is not newer than 12.2; its successors are built for 12.4 and later, and
    # a library runs programs built for its own minor version or an earlier one. transformers 5 asks for
    # torch 2.6, so the last release before it. docs/base.md has the table.
    roots=("torch==2.4.1", "transformers==4.57.*", *_SERVER),
    # A compiler at run time: the image launches cubins only.
    unused=_UNUSED | {"triton"},
    # Of CUDA 12.2 Update 2, as NVIDIA's own images of 12.2.2 have them. cuDNN and NCCL have versions of their
    # own and stay as torch declares them.
    replaced={
        "nvidia-cublas-cu12": "12.2.5.6",
        "nvidia-cuda-cupti-cu12": "12.2.142",
        "nvidia-cuda-nvrtc-cu12": "12.2.140",
        "nvidia-cuda-runtime-cu12": "12.2.140",
        "nvidia-cufft-cu12": "11.0.8.103",
        "nvidia-curand-cu12": "10.3.3.141",
        "nvidia-cusolver-cu12": "11.5.2.141",
        "nvidia-cusparse-cu12": "12.1.2.141",
        "nvidia-nvjitlink-cu12": "12.2.140",
        "nvidia-nvtx-cu12": "12.2.140",
    },
    system=frozenset({"libcuda.so.1"}),  # the driver's; the container runtime mounts it
    room=8_500_000_000,
    cuda="12.2.2",
    about="The CUDA libraries are those of 12.2.2; torch declares 12.1's, which they replace.",
)

TARGETS = {target.name: target for target in (_CPU, _CUDA)}


def base_target(name: str) -> BaseTarget:
    """Return the target of that name.

    Raises:
        UsageError: when this version has no base for it.
    """
    found = TARGETS.get(name)
    if found is None:
        message = f"this version has an embedded base for {', '.join(TARGETS)}, not for {name}"
        raise UsageError(message, place="--target", hint="pass --base oci:DIR with a base of your own")
    return found
