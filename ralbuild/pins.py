"""The pinned toolchain, CUDA facts and base images: data in ``data/pins.toml``, read once."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class ToolchainPins:
    """The only compiler that may write what ships.

    Attributes:
        triton_least, triton_below: accepted Triton versions: the first and up, below the second.
        triton_backends: modules that may be registered as Triton backends.
        ptxas_package, ptxas_file: the distribution that holds ptxas, and the file in it.
        ptxas_version: also the distribution's version.
        ptxas_sha256: digest of the ptxas binary, in hex.
    """

    triton_least: str
    triton_below: str
    triton_backends: tuple[str, ...]
    ptxas_package: str
    ptxas_file: str
    ptxas_version: str
    ptxas_sha256: str


@dataclass(frozen=True, slots=True)
class CubinPins:
    """What a compiled kernel must say of itself.

    Attributes:
        elf_abi: the ELF header's ABI version.
        toolkit: the ELF header's ``e_version``: 122 for CUDA 12.2.
        ptx_max: newest PTX ISA, as (major, minor).
        archs: architectures that can be asked for, sorted.
    """

    elf_abi: int
    toolkit: int
    ptx_max: tuple[int, int]
    archs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CudaPins:
    """CUDA version, and the driver floors: ours, and the hard one of that CUDA version."""

    version: str
    driver_floor: str
    driver_hard_floor: str


@dataclass(frozen=True, slots=True)
class ImagePin:
    """A public base image: the tag is for people, the digest decides."""

    tag: str
    digest: str


@dataclass(frozen=True, slots=True)
class ActionPin:
    """A GitHub action: ``ref`` names a commit, ``version`` is for people."""

    ref: str
    version: str


@dataclass(frozen=True, slots=True)
class Pins:
    """Everything in ``data/pins.toml``."""

    toolchain: ToolchainPins
    cubin: CubinPins
    cuda: CudaPins
    images: dict[str, ImagePin]
    actions: dict[str, ActionPin]


@functools.cache
def load_pins() -> Pins:
    """Read the pins that ship with the package."""
    data = tomllib.loads(resources.files("ralbuild").joinpath("data/pins.toml").read_text("utf-8"))
    tools, cubin, cuda = data["toolchain"], data["cubin"], data["cuda"]
    major, minor = cubin["ptx_max"].split(".")
    return Pins(
        toolchain=ToolchainPins(
            triton_least=tools["triton"]["least"],
            triton_below=tools["triton"]["below"],
            triton_backends=tuple(tools["triton_backends"]),
            ptxas_package=tools["ptxas_package"],
            ptxas_file=tools["ptxas_file"],
            ptxas_version=tools["ptxas_version"],
            ptxas_sha256=tools["ptxas_sha256"],
        ),
        cubin=CubinPins(
            elf_abi=cubin["elf_abi"],
            toolkit=cubin["toolkit"],
            ptx_max=(int(major), int(minor)),
            archs=tuple(cubin["archs"]),
        ),
        cuda=CudaPins(cuda["version"], cuda["driver_floor"], cuda["driver_hard_floor"]),
        images={name: ImagePin(item["tag"], item["digest"]) for name, item in data["images"].items()},
        actions={name: ActionPin(item["ref"], item["version"]) for name, item in data["actions"].items()},
    )
