"""Which weight files count, and whether index and shards say the same, both ways."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ralbuild.weights.files import SHIPPED_FILES, Folder, read_json, read_small
from ralbuild.weights.findings import Findings
from ralbuild.weights.safetensors import Header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD = re.compile(r"(.*?)-?(\d{1,6})-of-(\d{1,6})\.safetensors\Z")
_SHARD_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]{1,240}\.safetensors")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".onnx", ".h5", ".msgpack")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt")
_PARTIAL = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".download", ".tmp")


@dataclass(frozen=True, slots=True)
class Layout:
    """The weight files in use, sorted, and what the index says of them (empty without one)."""

    names: tuple[str, ...]
    weight_map: dict[str, str]
    index: dict[str, Any]
    index_json: bytes = b""


def find_layout(folder: Folder, findings: Findings) -> Layout:
    """Find the layout in use: one file, or the shards that the index names."""
    files = folder.files
    if INDEX in files and SINGLE in files:
        what = f"both {SINGLE} and {INDEX} are there; loaders disagree on which one counts"
        findings.add("W206", what, file=SINGLE)
    if INDEX in files:
        data = read_small(files[INDEX], INDEX, findings)
        index = read_json(data, INDEX, findings) if data is not None else None
        weight_map = _weight_map(index, findings) if index is not None else {}
        names = tuple(sorted(set(weight_map.values())))
        for name in names:
            if name not in files:
                count = sum(1 for value in weight_map.values() if value == name)
                what = "the index names this shard, but it is missing"
                findings.add("W207", what, file=name, found=f"{count} tensors are in it")
        there = tuple(name for name in names if name in files)
        layout = Layout(there, weight_map, index or {}, data or b"")
    elif SINGLE in files:
        layout = Layout((SINGLE,), {}, {})
    else:
        _report_nothing(files, findings)
        layout = Layout((), {}, {})
    _check_numbers(layout, files, findings)
    return layout


def _report_nothing(files: dict[str, Any], findings: Findings) -> None:
    others = [name for name in files if name.endswith(_WEIGHTS)]
    shards = [name for name in others if _SHARD.match(name)]
    found = f"found {', '.join(others[:6])}" if others else "found no weights"
    hint = f"download {INDEX}" if shards else "" if others else "is this the right folder?"
    what = f"needs {SINGLE} or shards with {INDEX}; {found}"
    findings.add("W205", what, file=SINGLE, found=found, needed=f"{SINGLE} or {INDEX}", hint=hint)


def _weight_map(index: dict[str, Any], findings: Findings) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        findings.add("W209", "needs a weight_map that is not empty", file=INDEX)
        return {}
    good: dict[str, str] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            what = f"{str(name)[:80]!r} is not the name of a shard in this folder"
            findings.add("W208", what, file=INDEX, tensor=tensor, found=str(name)[:80])
        else:
            good[tensor] = name
    return good


def _check_numbers(layout: Layout, files: dict[str, Any], findings: Findings) -> None:
    """Check the ``00001-of-00003`` in the names against each other and against the index."""
    series: dict[tuple[str, str], set[int]] = {}
    for name in layout.names:
        match = _SHARD.match(name)
        if match:
            series.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (prefix, count), numbers in series.items():
        wanted = set(range(1, int(count) + 1)) if int(count) <= 100_000 else set()
        wrong = sorted(numbers ^ wanted)
        if wrong and not findings.has("W207"):
            numbers_text = ", ".join(map(str, wrong[:6]))
            findings.add(
                "W215",
                f"{prefix} counts {count} shards; the index and the names differ in {numbers_text}",
                file=INDEX,
            )
    if len(series) > 1:
        findings.add("W215", f"the index mixes {len(series)} series of shards", file=INDEX)
    for name in files:
        match = _SHARD.match(name)
        if INDEX in files and match and name not in layout.names and (match[1], match[3]) in series:
            findings.add("W214", "a numbered shard that the index does not name", file=name)


def compare_index(layout: Layout, headers: dict[str, Header], findings: Findings) -> None:
    """Compare index and shards both ways: every tensor is in the file that the index names, and no other."""
    where: dict[str, str] = {}
    for name, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in where:
                findings.add("W213", f"also in {where[tensor.name]}", file=name, tensor=tensor.name)
            where[tensor.name] = name
    if not layout.weight_map:
        return
    for tensor_name, name in layout.weight_map.items():
        if name not in headers:
            continue  # missing or broken, and said so
        found = where.get(tensor_name)
        if found is None:
            what = f"the index says {name}, found in no shard"
            findings.add("W212", what, file=INDEX, tensor=tensor_name, needed=name)
        elif found != name:
            what = f"the index says {name}, found in {found}"
            findings.add("W210", what, file=INDEX, tensor=tensor_name, found=found, needed=name)
    for tensor_name, name in where.items():
        if tensor_name not in layout.weight_map:
            findings.add("W211", "in the shard but not in the index", file=name, tensor=tensor_name)
    if set(headers) == set(layout.weight_map.values()):
        _check_total(layout, headers, findings)


def _check_total(layout: Layout, headers: dict[str, Header], findings: Findings) -> None:
    metadata = layout.index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(tensor.end - tensor.begin for header in headers.values() for tensor in header.tensors)
    if total is None:
        findings.add("W216", "lacks metadata.total_size", file=INDEX, needed=size)
    elif total != size:
        what = f"metadata.total_size is {str(total)[:40]}; the tensors have {size} bytes"
        findings.add("W216", what, file=INDEX, found=str(total)[:40], needed=size)


def left_out(folder: Folder, layout: Layout, findings: Findings) -> tuple[str, ...]:
    """Return what does not go into the image, and report what of it looks like a mistake."""
    names = tuple(
        name
        for name in folder.files
        if name not in layout.names and name not in SHIPPED_FILES and name != INDEX
    )
    for name in names:
        if name.endswith(_PARTIAL):
            findings.add("W218", "an unfinished download", file=name)
        elif name.endswith(_WEIGHTS) and name not in _NOT_WEIGHTS and layout.names:
            findings.add("W217", "weights of another layout, left out of the image", file=name)
    others = [*names, *(f"{name}/" for name in folder.folders)]
    if others:
        findings.add("W224", f"left out of the image: {', '.join(others[:30])}")
    return names
