"""Before anything is imported or served: is every file the one that was built?

What is hashed is what is used: small files are read once, and those bytes are parsed later.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from ralbuild.contract import places
from ralbuild.contract.bundle import Bundle, ObjectRef, object_refs, read_bundle
from ralbuild.contract.codec import FormatError, from_plain, parse_json, sha256_hex
from ralbuild.contract.manifest import ModelFile, ModelManifest, PackedWeights, WeightEntry
from ralbuild.contract.tarball import WEIGHTS_MTIME, WeightLayer
from ralbuild.runtime.errors import BundleCorruptError, HostUnfitError, ModelMismatchError, StartError
from ralbuild.runtime.settings import FULL_BYTES, Settings

_REBUILD = "rules are immutable: build a new image instead of changing files"
_CHUNK = 1 << 22
_BUNDLE_FOLDER = (places.BUNDLE_FILE, places.OBJECTS_DIR, places.CONFIG_FILE)
_ACTIVE = (".py", ".so", ".jinja", ".safetensors", ".bin", ".pt", ".pkl")
"""Endings of files that some loader would read or run if they lay beside the model's own."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Files that are what the bundle says.

    Attributes:
        bundle: the parsed ``bundle.json``.
        digest: SHA-256 of ``bundle.json`` in hex.
        manifest: the model that the bundle was built for.
        objects: bytes of the objects that the target uses, by digest.
        files: bytes of configuration, tokenizer and template files, by name.
        weights: paths of the safetensors files.
    """

    bundle: Bundle
    digest: str
    manifest: ModelManifest
    objects: dict[str, bytes]
    files: dict[str, bytes]
    weights: tuple[Path, ...]


def check_files(settings: Settings) -> Checked:
    """Check bundle, objects, config and model files against their digests.

    Raises:
        BundleCorruptError, ModelMismatchError, HostUnfitError: naming the first file that differs.
    """
    bundle, digest = _check_bundle(settings)
    objects = _check_objects(settings.path(places.OBJECTS_DIR), bundle)
    config = settings.path(places.CONFIG_FILE)
    if sha256_hex(_read(config, BundleCorruptError)) != bundle.config_sha256:
        raise BundleCorruptError("is not the config that was compiled", place=str(config), hint=_REBUILD)
    where = f"objects/{bundle.manifest.sha256}"
    try:
        plain = parse_json(objects[bundle.manifest.sha256], where)
        manifest = from_plain(ModelManifest, plain, where)
    except FormatError as error:
        raise BundleCorruptError(error.message, place=error.where, hint=_REBUILD) from None
    _refuse_added(
        settings.path(places.OBJECTS_DIR),
        {ref.sha256 for ref in object_refs(bundle)},
        BundleCorruptError,
        ("",),
    )
    _refuse_added(config.parent, {Path(place).name for place in _BUNDLE_FOLDER}, BundleCorruptError, ("",))
    folder = settings.path(places.MODEL_DIR)
    if settings.weights_image and not _has_files(folder):
        raise ModelMismatchError(
            "holds no weights: they are in an image of their own",
            place=str(folder),
            hint=f"mount the folder {places.MODEL_DIR} of the image {settings.weights_image} there",
        )
    built = {item.path for item in manifest.files} | {item.path for item in manifest.weight_files}
    _refuse_added(folder, built, ModelMismatchError, _ACTIVE)
    files = {item.path: _check_file(folder, item) for item in manifest.files}
    weights = tuple(_check_weight(folder, item) for item in manifest.weight_files)
    return Checked(bundle, digest, manifest, objects, files, weights)


def _has_files(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def choose_hashed(weights: Sequence[PackedWeights], how: str) -> frozenset[str]:
    """Return the digests of the weight layers whose files are compared with them.

    ``sampled`` draws layers at random while they have `FULL_BYTES` together, and at least one: over
    several starts every file is read.
    """
    if how == "off":
        return frozenset()
    drawn = list(weights)
    if how == "sampled":
        secrets.SystemRandom().shuffle(drawn)
        room = FULL_BYTES - sum(item.size for item in drawn[:1])
        kept = drawn[:1]
        for item in drawn[1:]:
            if item.size <= room:
                kept.append(item)
                room -= item.size
        drawn = kept
    return frozenset(item.sha256 for item in drawn)


def hash_weights(checked: Checked, chosen: Set[str]) -> None:
    """Compare the weight files of the layers in ``chosen`` with those digests; reads every byte of them.

    A layer's digest is over the tar that the builder made: its headers follow from names and sizes alone.

    Raises:
        ModelMismatchError: naming the first file that differs, or the few of its layer.
    """
    paths = iter(checked.weights)
    for layer in checked.manifest.weights:
        own = [next(paths) for _ in layer.files]
        if layer.sha256 in chosen and (found := _hash_layer(layer, own)) != layer.sha256:
            message = f"needs sha256 {layer.sha256} as a layer, found {found}"
            raise ModelMismatchError(message, place=", ".join(map(str, own)), hint=_REBUILD)


def _refuse_added(folder: Path, known: Set[str], kind: type[StartError], suffixes: tuple[str, ...]) -> None:
    """Refuse what no build put there: a rule, a template or code beside those that were checked."""
    for path in sorted(folder.iterdir()):
        if path.name not in known and path.name.endswith(suffixes):
            raise kind("was added after the build", place=str(path), hint=_REBUILD)


def _check_bundle(settings: Settings) -> tuple[Bundle, str]:
    path = settings.path(places.BUNDLE_FILE)
    data = _read(path, BundleCorruptError)
    digest = sha256_hex(data)
    if settings.bundle_sha256 and digest != settings.bundle_sha256:
        message = f"needs sha256:{settings.bundle_sha256}, found sha256:{digest}"
        raise BundleCorruptError(message, place=str(path), hint=_REBUILD)
    try:
        bundle = read_bundle(data)
    except FormatError as error:
        raise BundleCorruptError(error.message, place=error.where, hint=_REBUILD) from None
    if bundle.target not in ("cpu", "cuda"):
        raise HostUnfitError(f"the image is built for {bundle.target!r}; this runtime serves cpu and cuda")
    if bundle.engine.dtype not in ("bfloat16", "float32"):
        found = bundle.engine.dtype
        raise BundleCorruptError(
            f"needs bfloat16 or float32, found {found!r}", place="bundle.json: engine.dtype"
        )
    return bundle, digest


def _check_objects(folder: Path, bundle: Bundle) -> dict[str, bytes]:
    needed = {ref.sha256 for ref in _used(bundle)}
    kept: dict[str, bytes] = {}
    for ref in object_refs(bundle):
        data = _check_object(folder, ref)
        if ref.sha256 in needed:
            kept[ref.sha256] = data
    return kept


def _used(bundle: Bundle) -> Iterator[ObjectRef]:
    """Yield the tables, and of each kernel what runs: source or machine code, and its data."""
    yield from (bundle.manifest, bundle.route_table, bundle.transducer, bundle.bans, bundle.vocab)
    for kernel in bundle.kernels:
        code = [kernel.source] if bundle.target == "cpu" else [item.cubin for item in kernel.objects]
        if any(code):
            yield from (ref for ref in (*code, kernel.data) if ref is not None)


def _check_object(folder: Path, ref: ObjectRef) -> bytes:
    path = folder / ref.sha256
    data = _read(path, BundleCorruptError)
    if len(data) != ref.size:
        message = f"needs {ref.size} bytes, found {len(data)}"
        raise BundleCorruptError(message, place=str(path), hint=_REBUILD)
    if (found := sha256_hex(data)) != ref.sha256:
        raise BundleCorruptError(
            f"has sha256 {found}, not the one of its name", place=str(path), hint=_REBUILD
        )
    return data


def _check_file(folder: Path, item: ModelFile) -> bytes:
    path = _inside(folder, item)
    data = _read(path, ModelMismatchError)
    if (found := sha256_hex(data)) != item.sha256:
        message = f"needs sha256 {item.sha256}, found {found}"
        raise ModelMismatchError(message, place=str(path), hint=_REBUILD)
    return data


def _check_weight(folder: Path, item: WeightEntry) -> Path:
    path = _inside(folder, item)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelMismatchError(f"cannot be read: {error.strerror}", place=str(path)) from None
    if size != item.size:
        raise ModelMismatchError(f"needs {item.size} bytes, found {size}", place=str(path), hint=_REBUILD)
    return path


def _inside(folder: Path, item: ModelFile | WeightEntry) -> Path:
    if Path(item.path).name != item.path:
        raise BundleCorruptError(f"file name {item.path!r} is not a plain name", place="manifest")
    return folder / item.path


def _hash_layer(layer: PackedWeights, paths: Sequence[Path]) -> str:
    digest, frame = hashlib.sha256(), WeightLayer(WEIGHTS_MTIME)
    for item, path in zip(layer.files, paths, strict=True):
        digest.update(frame.start(item.path, item.size))
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    digest.update(frame.end())
    return digest.hexdigest()


def _read(path: Path, kind: type[StartError]) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise kind(f"cannot be read: {error.strerror}", place=str(path)) from None
