"""What changed between two images, and what that costs to push and to pull. Nothing is unpacked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

from ralbuild.contract.bundle import Bundle, Kernel, Rule
from ralbuild.contract.codec import to_plain
from ralbuild.contract.places import CONFIG_FILE
from ralbuild.image.facts import ImageFacts, Package, stored_facts
from ralbuild.image.oci import Descriptor
from ralbuild.image.reader import StoredImage

Kind = Literal["added", "removed", "changed"]


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not the same: what happened to what, where it stands, and details for people."""

    kind: Kind
    name: str
    place: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer of either image.

    Attributes:
        layer: as its manifest describes it.
        state: ``same`` in both images, only in the ``new`` one, or ``gone`` with the old one.
        restacked: it is the same, but something below it is not: an engine unpacks it again.
    """

    layer: Descriptor
    state: Literal["same", "new", "gone"]
    restacked: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that move, image JSON included.

    Attributes:
        push: to a registry that has the old image.
        pull: to a node that has the old image and keeps blobs by digest (containerd, CRI-O, podman).
        pull_docker: to a node with Docker's own image store. It knows layers by all that lies below them,
            so it fetches everything from the first layer that changed.
        unpack: of layers that either kind of node unpacks again, counted as they are stored.
        total: of the whole new image.
    """

    push: int
    pull: int
    pull_docker: int
    unpack: int
    total: int


@dataclass(frozen=True, slots=True)
class ImageDiff:
    """Everything that differs between two images of ralbuild; empty tuples where nothing does."""

    old: str
    new: str
    rules: tuple[Change, ...]
    config: tuple[Change, ...]
    settings: tuple[Change, ...]
    kernels: tuple[Change, ...]
    tables: tuple[Change, ...]
    model: tuple[Change, ...]
    packages: tuple[Change, ...]
    labels: tuple[Change, ...]
    layers: tuple[LayerChange, ...]
    transfer: Transfer = field(default=Transfer(0, 0, 0, 0, 0))

    @property
    def changes(self) -> dict[str, tuple[Change, ...]]:
        """The lists of changes by their names, in the order people want them."""
        names = ("rules", "config", "settings", "kernels", "tables", "model", "packages", "labels")
        return {name: getattr(self, name) for name in names}


def diff_images(old: StoredImage, new: StoredImage) -> ImageDiff:
    """Compare two open images.

    Raises:
        ImageError: when one is no image of ralbuild.
    """
    before, after = stored_facts(old), stored_facts(new)
    parts = tuple(zip_longest(_parts(old), _parts(new)))
    layers = _layers(parts)
    return ImageDiff(
        old=old.digest,
        new=new.digest,
        rules=_rules(before.bundle, after.bundle),
        config=_config_lines(old.read_file(CONFIG_FILE) or b"", new.read_file(CONFIG_FILE) or b""),
        settings=_settings(before, after),
        kernels=_kernels(before.bundle.kernels, after.bundle.kernels),
        tables=_tables(before.bundle, after.bundle),
        model=_model(before, after),
        packages=_packages(before.packages, after.packages),
        labels=_values(before.labels, after.labels),
        layers=layers,
        transfer=_transfer(parts, layers),
    )


def _rules(old: Bundle, new: Bundle) -> tuple[Change, ...]:
    """Compare compiled rules; one that only moved to another line is the same."""
    before, after = ({_rule_key(rule): rule for rule in bundle.rules} for bundle in (old, new))
    out = [_rule_change("removed", rule) for key, rule in before.items() if key not in after]
    out += [_rule_change("added", rule) for key, rule in after.items() if key not in before]
    return tuple(sorted(out, key=lambda item: (_line(item.place), item.kind != "removed", item.name)))


def _rule_key(rule: Rule) -> tuple[str, str, str]:
    return rule.kind, rule.text, rule.source


def _rule_change(kind: Kind, rule: Rule) -> Change:
    place = f"ral-config.yaml:{rule.place}" if rule.place[:1].isdigit() else rule.place
    return Change(kind, f"{rule.kind} {rule.text!r}", place, rule.source)


def _line(place: str) -> tuple[int, ...]:
    return tuple(int(part) for part in place.split(":")[1:] if part.isdigit())


def _config_lines(old: bytes, new: bytes) -> tuple[Change, ...]:
    """Return the lines of the config that differ, as written."""
    before, after = (data.decode("utf-8", errors="replace").splitlines() for data in (old, new))
    out = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, first, last, start, end in matcher.get_opcodes():
        if tag != "equal":
            gone = range(first, last)
            out += [Change("removed", before[i], f"ral-config.yaml:{i + 1}") for i in gone]
            come = range(start, end)
            out += [Change("added", after[i], f"ral-config.yaml:{i + 1}") for i in come]
    return tuple(out)


def _settings(old: ImageFacts, new: ImageFacts) -> tuple[Change, ...]:
    """Compare sizes, routes and what routes impose on sampling."""
    return _values(_setting_values(old.bundle), _setting_values(new.bundle))


def _setting_values(bundle: Bundle) -> dict[str, str]:
    values = {name: str(value) for name, value in to_plain(bundle.engine).items()}
    values |= {"target": bundle.target, "model": bundle.model, "ralbuild": bundle.ralbuild}
    for number, route in enumerate(bundle.routes, 1):
        values[f"route {route.match!r}"] = f"{route.action}, number {number}"
    for profile in bundle.profiles:
        imposed = {key: value for key, value in to_plain(profile.sampling).items() if value is not None}
        values |= {f"{name} of {profile.name}": str(value) for name, value in imposed.items()}
    for limit in bundle.input_limits:
        values[f"longest run for {limit.name}"] = str(limit.max_length)
    return values


def _values(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[Change, ...]:
    out = []
    for name in sorted({*old, *new}):
        if name not in new:
            out.append(Change("removed", name, detail=old[name]))
        elif name not in old:
            out.append(Change("added", name, detail=new[name]))
        elif old[name] != new[name]:
            out.append(Change("changed", name, detail=f"{old[name]} -> {new[name]}"))
    return tuple(out)


def _kernels(old: tuple[Kernel, ...], new: tuple[Kernel, ...]) -> tuple[Change, ...]:
    before, after = ({kernel.name: kernel for kernel in kernels} for kernels in (old, new))
    out = []
    for name in sorted({*before, *after}):
        if name not in after:
            out.append(Change("removed", name))
        elif name not in before:
            out.append(Change("added", name, detail=_archs(after[name])))
        elif before[name] != after[name]:
            out.append(Change("changed", name, detail=_kernel_detail(before[name], after[name])))
    return tuple(out)


def _archs(kernel: Kernel) -> str:
    return ", ".join(item.arch for item in kernel.objects)


def _kernel_detail(old: Kernel, new: Kernel) -> str:
    was, now = ({item.arch: item for item in kernel.objects} for kernel in (old, new))
    parts = ["source changed"] if old.source_sha256 != new.source_sha256 else []
    for verb, archs in (("gone for", was.keys() - now.keys()), ("new for", now.keys() - was.keys())):
        if archs:
            parts.append(f"{verb} {', '.join(sorted(archs))}")
    for arch in sorted(was.keys() & now.keys()):
        if was[arch].cubin != now[arch].cubin:
            sizes = f"{was[arch].registers} -> {now[arch].registers} registers"
            parts.append(f"{arch} other code ({sizes})")
    return "; ".join(parts) or "other parameters"


def _tables(old: Bundle, new: Bundle) -> tuple[Change, ...]:
    pairs = (
        ("transducer", old.transducer, new.transducer),
        ("bans", old.bans, new.bans),
        ("vocabulary", old.vocab, new.vocab),
    )
    return tuple(
        Change("changed", name, detail=f"{was.size} -> {now.size} bytes")
        for name, was, now in pairs
        if was != now
    )


def _model(old: ImageFacts, new: ImageFacts) -> tuple[Change, ...]:
    before, after = (
        {
            file.path: f"{file.size} bytes, layer {layer.sha256[:12]}"
            for layer in model.weights
            for file in layer.files
        }
        | {file.path: f"{file.size} bytes, sha256 {file.sha256[:12]}" for file in model.files}
        for model in (old.model, new.model)
    )
    return _values(before, after)


def _packages(old: Iterable[Package], new: Iterable[Package]) -> tuple[Change, ...]:
    before, after = ({(item.kind, item.name): item for item in packages} for packages in (old, new))
    out = []
    for key in sorted({*before, *after}):
        was, now, name = before.get(key), after.get(key), f"{key[0]} {key[1]}"
        if was is None or now is None:
            item: Any = was or now
            out.append(Change("removed" if now is None else "added", name, detail=item.version))
        elif was != now:
            same = was.version == now.version
            detail = f"{now.version}, another file" if same else f"{was.version} -> {now.version}"
            out.append(Change("changed", name, detail=detail))
    return tuple(out)


_Pairs = tuple[tuple[StoredImage | None, StoredImage | None], ...]
"""Old and new image, then the images that hold their weights, where one does."""


def _parts(image: StoredImage) -> tuple[StoredImage, ...]:
    weights = image.weights()
    return (image, weights) if weights is not None else (image,)


def _layers(pairs: _Pairs) -> tuple[LayerChange, ...]:
    known = {layer.digest for old, _ in pairs for layer in _layers_of(old)}
    stays = {layer.digest for _, new in pairs for layer in _layers_of(new)}
    out = []
    for old, new in pairs:
        first = _first_difference(_layers_of(old), _layers_of(new))
        out += [
            LayerChange(layer, "same", restacked=number >= first)
            if layer.digest in known
            else LayerChange(layer, "new")
            for number, layer in enumerate(_layers_of(new))
        ]
    gone = (layer for old, _ in pairs for layer in _layers_of(old) if layer.digest not in stays)
    return (*out, *(LayerChange(layer, "gone") for layer in gone))


def _layers_of(image: StoredImage | None) -> tuple[Descriptor, ...]:
    return image.layers if image is not None else ()


def _first_difference(old: tuple[Descriptor, ...], new: tuple[Descriptor, ...]) -> int:
    """Return how many layers from the lowest are the same: what an engine finds unpacked already."""
    count = 0
    for was, now in zip(old, new, strict=False):
        if was.diff_id != now.diff_id:
            break
        count += 1
    return count


def _transfer(pairs: _Pairs, layers: tuple[LayerChange, ...]) -> Transfer:
    fresh = {item.layer.digest: item.layer.size for item in layers if item.state == "new"}
    every: dict[str, int] = {}
    above = changed = described = 0
    for old, new in pairs:
        if new is None:
            continue
        first = _first_difference(_layers_of(old), new.layers)
        above += sum(layer.size for layer in new.layers[first:])
        every |= {layer.digest: layer.size for layer in new.layers}
        config, manifest = int(new.manifest["config"].get("size", 0)), len(new.manifest_json)
        described += config + manifest
        changed += manifest if old is None or new.digest != old.digest else 0
        changed += config if old is None or new.config_digest != old.config_digest else 0
    moved = sum(fresh.values()) + changed
    return Transfer(
        push=moved,
        pull=moved,
        pull_docker=above + changed,
        unpack=above,
        total=sum(every.values()) + described,
    )
