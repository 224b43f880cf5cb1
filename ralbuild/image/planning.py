"""From a compiled bundle to an `ImagePlan`: which file goes where, in which layer, with which labels.

Layers are ordered by rate of change: base, weights, tokenizer and configs, launcher, kernels, rules. A
changed rule touches the last one only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ralbuild import __version__
from ralbuild.contract.bundle import Bundle
from ralbuild.contract.places import (
    APP_DIR,
    BUNDLE_FILE,
    CONFIG_FILE,
    ENTRYPOINT,
    MODEL_DIR,
    OBJECTS_DIR,
    PORT,
    USER_ID,
)
from ralbuild.contract.tarball import bundles
from ralbuild.errors import ImageError
from ralbuild.image.oci import LICENSE_LABEL
from ralbuild.image.plan import (
    BaseImage,
    DirEntry,
    FileEntry,
    HostFile,
    ImageConfig,
    ImagePlan,
    LayerPlan,
    Pieces,
    bundled_layer,
)
from ralbuild.pins import load_pins
from ralbuild.render import entrypoint
from ralbuild.weights.decoder import decoder_spec
from ralbuild.weights.reading import WeightShard
from ralbuild.weights.scan import ScannedModel

BASE_LABELS = "io.ralbuild.base."
BASE_CONTRACT = f"{BASE_LABELS}contract"
OUR_LABELS = "io.ralbuild."
"""Prefix of every label that an image adds to its base's; those of a base start with `BASE_LABELS`."""
_BASE_FACTS = ("lock", "python", "torch", "transformers")
_PYTHON = "3.11."
_NO_COMPILER = (("CUDA_DISABLE_PTX_JIT", "1"), ("CUDA_CACHE_DISABLE", "1"))
"""The driver compiles nothing; the launcher sets the same before it opens the driver."""
MODEL_LAYER = "tokenizer and configuration"
"""Name of the layer with the model's small files."""


@dataclass(frozen=True, slots=True)
class ImageParts:
    """Everything of an image that is not the base.

    Attributes:
        model: the scanned folder.
        bundle, bundle_json, bundle_sha256: as compiled.
        objects: content by SHA-256, the objects that the bundle names.
        config_source: ``ral-config.yaml`` as written.
        created: the image's date, seconds since 1970.
        mtime: of every entry, the same that the weights were scanned with.
        license: of the model, as an SPDX id where there is one; may be empty.
        simulated: how the kernels were run before; empty when they were not.
        interpreter: the layer that runs user kernels on the CPU; None for an image without.
    """

    model: ScannedModel
    bundle: Bundle
    bundle_json: bytes
    bundle_sha256: str
    objects: Mapping[str, bytes]
    config_source: bytes
    created: int
    mtime: int
    license: str = ""
    simulated: str = ""
    interpreter: LayerPlan | None = None


def plan_image(
    base: BaseImage | None, parts: ImageParts, *, volume: bool = False, weights_base: BaseImage | None = None
) -> ImagePlan:
    """Return the plan of an image on ``base``.

    Args:
        base: what it is built on; None where that is not made yet: every layer of ours is the same.
        parts: what goes into it.
        volume: put the model's files into an image of their own, which is mounted at `MODEL_DIR`.
        weights_base: what that image is built on, for those who start it; None builds it on nothing.

    Raises:
        ImageError: when the base was not made for this target.
    """
    if base is not None:
        check_base(base, parts.bundle.target)
    model = (*_weight_layers(parts.model.shards), _model_layer(parts))
    interpreter = (parts.interpreter,) if parts.interpreter is not None else ()
    ours = (_launcher_layer(), *_bundle_layers(parts))
    layers = (*interpreter, _mount_point(), *ours) if volume else (*interpreter, *model, *ours)
    config = run_config(parts.bundle_sha256, image_labels(parts))
    annotations = {"org.opencontainers.image.title": parts.bundle.model}
    weights = _weights_plan(weights_base, model, parts) if volume else None
    return ImagePlan(base, layers, config, parts.created, parts.mtime, annotations, weights=weights)


def _weights_plan(base: BaseImage | None, layers: tuple[LayerPlan, ...], parts: ImageParts) -> ImagePlan:
    """Return the image of the model's files alone; no date, rule, name or version of ours is in it."""
    config = ImageConfig(labels=_model_labels(parts), stop_signal="")
    return ImagePlan(base, layers, config, mtime=parts.mtime)


def _mount_point() -> LayerPlan:
    folder = MODEL_DIR.strip("/")
    return LayerPlan("mount point of the weights", "small", (DirEntry(folder),), (folder,))


def run_config(bundle_sha256: str, labels: Mapping[str, str]) -> ImageConfig:
    """Return how a container of an image with this bundle runs, whatever its base."""
    return ImageConfig(
        env=(
            ("RAL_BUNDLE_SHA256", bundle_sha256),
            # Idle compute threads sleep: spinning ones starve the other colour during a switch.
            ("OMP_WAIT_POLICY", "PASSIVE"),
            *(_NO_COMPILER if labels.get("io.ralbuild.target") == "cuda" else ()),
        ),
        entrypoint=(ENTRYPOINT,),
        user=f"{USER_ID}:{USER_ID}",
        ports=(PORT,),
        labels=labels,
    )


def _weight_layers(shards: Sequence[WeightShard]) -> Iterator[LayerPlan]:
    for part in bundles(len(shards)):
        files = [(shard.name, _bytes_of(shard)) for shard in shards[part.start : part.stop]]
        yield bundled_layer(files, shards[part.start].digests)


def _bytes_of(shard: WeightShard) -> HostFile | Pieces:
    """Return where a weight file's bytes lie: in one file, or in ranges of several."""
    purpose = shard.digests.purpose
    if not shard.pieces:
        return HostFile(shard.path, shard.size, purpose=purpose, witness=shard.digests.witness)
    return tuple(
        piece
        if isinstance(piece, bytes)
        else HostFile(piece.path, piece.size, purpose=purpose, start=piece.start, file_size=piece.file_size)
        for piece in shard.pieces
    )


def image_labels(parts: ImageParts) -> dict[str, str]:
    """Return what can be read of an image before it is pulled."""
    bundle = parts.bundle
    labels = {
        "io.ralbuild.version": __version__,
        "io.ralbuild.target": bundle.target,
        "io.ralbuild.model": bundle.model,
        "io.ralbuild.weights.memory": str(_resident_bytes(parts)),
        "io.ralbuild.dtype": bundle.engine.dtype,
        "io.ralbuild.max_batch_size": str(bundle.engine.max_batch_size),
        "io.ralbuild.max_seq_len": str(bundle.engine.max_seq_len),
        "io.ralbuild.bundle": f"sha256:{parts.bundle_sha256}",
        "io.ralbuild.config": f"sha256:{bundle.config_sha256}",
        "io.ralbuild.rules": str(len(bundle.rules)),
        **_model_labels(parts),
    }
    archs = sorted({item.arch for kernel in bundle.kernels for item in kernel.objects})
    if archs:
        pins = load_pins()
        labels |= {
            "io.ralbuild.cuda.archs": ",".join(archs),
            "io.ralbuild.cuda.version": pins.cuda.version,
            "io.ralbuild.cuda.driver": pins.cuda.driver_floor,
            "io.ralbuild.cuda.ptx": ".".join(map(str, pins.cubin.ptx_max)),
        }
    if bundle.target == "cuda":
        labels["io.ralbuild.cuda.memory"] = str(_device_bytes(parts))
    if parts.interpreter is not None:
        labels["io.ralbuild.cpu_user_kernels"] = f"interpreted by {parts.interpreter.name}"
    if parts.simulated:
        labels["io.ralbuild.simulated"] = parts.simulated
    return labels


def _model_labels(parts: ImageParts) -> dict[str, str]:
    manifest = parts.model.manifest
    labels = {
        "io.ralbuild.model.architecture": manifest.architecture,
        "io.ralbuild.model.parameters": str(manifest.parameters),
        "io.ralbuild.model.manifest": f"sha256:{parts.bundle.manifest.sha256}",
        "io.ralbuild.weights.bytes": str(parts.model.weight_bytes),
    }
    return labels | ({LICENSE_LABEL: parts.license} if parts.license else {})


def _resident_bytes(parts: ImageParts) -> int:
    """Return the memory that the weights take once loaded; keys and values come on top.

    On a CPU our decoder keeps two bytes an element where the file has two, also when it computes in float32.
    """
    model, bundle = parts.model, parts.bundle
    needed = model.manifest.parameters * (4 if bundle.engine.dtype == "float32" else 2)
    if bundle.target == "cpu" and not isinstance(decoder_spec(model), str):
        needed = min(needed, model.weight_bytes)
    return needed


def _device_bytes(parts: ImageParts) -> int:
    """Return what a server takes of a GPU: weights, and keys and values of all slots, taken at its start."""
    engine, spec = parts.bundle.engine, decoder_spec(parts.model)
    assert not isinstance(spec, str)  # `refuse_unservable`
    weights = _resident_bytes(parts)
    item = 4 if engine.dtype == "float32" else 2
    return weights + spec.cache_bytes(engine.max_batch_size, engine.max_seq_len, item)


def check_base(base: BaseImage, target: str, place: str = "") -> None:
    """Raise ImageError when ``base`` is no runtime base, or one for another target.

    ``place`` is how the user named it; the base's own name or digest when it is empty.
    """
    place = place or base.name or base.digest
    hint = f"make one with `ralbuild base --target {target} --out oci:DIR`, or leave --base out"
    labels = (base.config.get("config") or {}).get("Labels") or {}
    found = labels.get(BASE_CONTRACT)
    if found != "1":
        message = f"is no runtime base: needs the label {BASE_CONTRACT}=1, found {found!r}"
        raise ImageError(message, place=place, hint=hint)
    made_for = labels.get(f"{BASE_LABELS}target")
    if made_for != target:
        message = f"is a base for {made_for!r}; the image is for {target!r}"
        raise ImageError(message, place=place, hint=hint)
    facts = (*_BASE_FACTS, "cuda") if target == "cuda" else _BASE_FACTS
    missing = [name for name in facts if not labels.get(f"{BASE_LABELS}{name}")]
    if missing:
        message = f"does not say its {', '.join(missing)}: needs labels {BASE_LABELS}*"
        raise ImageError(message, place=place, hint=hint)
    python = labels[f"{BASE_LABELS}python"]
    if not f"{python}.".startswith(_PYTHON):  # the third number may be left open
        message = f"has Python {python}, the launcher needs {_PYTHON}x"
        raise ImageError(message, place=place, hint=hint)
    cuda, wanted = labels.get(f"{BASE_LABELS}cuda", ""), load_pins().cuda.version
    if target == "cuda" and cuda.split(".")[:2] != wanted.split(".")[:2]:
        message = f"has CUDA {cuda}, kernels are compiled for {wanted}"
        raise ImageError(message, place=place, hint=hint)


def _model_layer(parts: ImageParts) -> LayerPlan:
    folder = MODEL_DIR.strip("/")
    entries = tuple(FileEntry(f"{folder}/{name}", data) for name, data in parts.model.files)
    return LayerPlan(MODEL_LAYER, "small", entries, (folder,))


def _launcher_layer() -> LayerPlan:
    script = FileEntry(ENTRYPOINT.strip("/"), entrypoint().data, 0o755)
    return LayerPlan("launcher", "small", (*launcher_files(), script), (APP_DIR.strip("/"),))


def launcher_files() -> tuple[FileEntry, ...]:
    """Return what of our own package goes into an image: `contract`, `runtime` and the version."""
    package = Path(str(resources.files("ralbuild")))
    sources = [package / "__init__.py"]
    for room in ("contract", "runtime"):
        sources += sorted((package / room).rglob("*.py"))
    folder = f"{APP_DIR.strip('/')}/ralbuild"
    return tuple(FileEntry(f"{folder}/{path.relative_to(package)}", path.read_bytes()) for path in sources)


def _bundle_layers(parts: ImageParts) -> tuple[LayerPlan, LayerPlan]:
    """Return the layer that rules do not change, and the one that they do."""
    bundle = parts.bundle
    fixed = {bundle.manifest.sha256, bundle.vocab.sha256}
    fixed |= {
        ref.sha256 for kernel in bundle.kernels for item in kernel.objects for ref in (item.cubin, item.ptx)
    }
    entries = [
        FileEntry(BUNDLE_FILE.strip("/"), parts.bundle_json),
        FileEntry(CONFIG_FILE.strip("/"), parts.config_source),
        *_object_entries(parts, parts.objects.keys() - fixed),
    ]
    owned = (str(Path(BUNDLE_FILE).parent).strip("/"),)
    return (
        LayerPlan("kernels and vocabulary", "small", tuple(_object_entries(parts, fixed)), owned),
        LayerPlan("rules", "small", tuple(entries), owned),
    )


def _object_entries(parts: ImageParts, digests: Set[str]) -> Iterator[FileEntry]:
    folder = OBJECTS_DIR.strip("/")
    return (FileEntry(f"{folder}/{digest}", parts.objects[digest]) for digest in sorted(digests))
