"""`--reshard`: the same tensors in weight files of another size, without writing a second model.

A new file is a recipe: a header of its own, then ranges of the files that are there. No tensor byte
changes; which tensor is in which file does, and the index says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import canonical_json, sha256_hex, to_plain
from ralbuild.contract.manifest import ModelFile
from ralbuild.contract.tarball import WeightLayer, bundles
from ralbuild.digests import (
    CHUNK,
    DigestCache,
    FileDigests,
    FileRange,
    LayerFile,
    StatKey,
    is_racy,
    open_regular,
    scan_layer,
)
from ralbuild.errors import UsageError, WeightsError
from ralbuild.weights.findings import Findings
from ralbuild.weights.layout import INDEX, SINGLE
from ralbuild.weights.reading import WeightShard, packed_weights
from ralbuild.weights.safetensors import DTYPE_BITS, Tensor, read_header
from ralbuild.weights.scan import ScannedModel

_ALIGN = 8
"""A header's length is a multiple of this, so that every tensor is aligned for its element type."""
_HEADER_ROOM = 4096


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor and the file whose data section holds its bytes."""

    tensor: Tensor
    path: Path
    start: int
    file_size: int

    @property
    def size(self) -> int:
        return self.tensor.end - self.tensor.begin


@dataclass(frozen=True, slots=True)
class _NewFile:
    name: str
    pieces: tuple[bytes | FileRange, ...]
    tensors: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(len(piece) if isinstance(piece, bytes) else piece.size for piece in self.pieces)


def reshard(
    model: ScannedModel,
    limit: int,
    cache: DigestCache,
    mtime: int,
    progress: Callable[[int], None] | None = None,
) -> ScannedModel:
    """Return the model with weight files of at most ``limit`` bytes each.

    Args:
        model: as scanned.
        limit: of a file, its header included.
        cache: where digests of the new files are looked up and remembered; each new file's own digest is
            computed where all of the model's were.
        mtime: of the layers' entries, in seconds since 1970.
        progress: called with the number of bytes read in each step, from several threads.

    Raises:
        UsageError: when a tensor alone is larger: it cannot be cut.
        WeightsError: when a file changed since the scan.
    """
    placed, metadata = _read_tensors(model.shards)
    files = _new_files(placed, limit, metadata)
    sources = {shard.path: shard for shard in model.shards}
    own = len(model.weight_digests) == len(model.shards)
    states = _states(sources, cache, mtime)
    hash_layer = partial(
        _hash_layer, states=states, cache=cache, mtime=mtime, report=progress or (lambda _: None), own=own
    )
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        layers = pool.map(hash_layer, [files[part.start : part.stop] for part in bundles(len(files))])
        shards = tuple(shard for layer in layers for shard in layer)
    for path, key in states.items():
        if StatKey.of(path.stat()) != key:
            raise WeightsError("changed while it was read", place=str(path), hint="build from files at rest")
    small = {name: data for name, data in model.files if name != INDEX}
    if len(files) > 1:
        small[INDEX] = _index(files, sum(item.size for item in placed))
    small = dict(sorted(small.items()))
    listed = tuple(ModelFile(name, len(data), sha256_hex(data)) for name, data in small.items())
    manifest = replace(model.manifest, weights=packed_weights(shards), files=listed)
    return replace(model, manifest=manifest, shards=shards, files=tuple(small.items()))


def _read_tensors(shards: Sequence[WeightShard]) -> tuple[list[_Placed], dict[str, str]]:
    """Return every tensor in the order of the files, and the metadata that all files agree on."""
    placed: list[_Placed] = []
    metadata: dict[str, str] | None = None
    for shard in shards:
        header = read_header(shard.path, shard.name, Findings())
        if header is None:
            raise WeightsError("changed after it was checked", place=str(shard.path))
        placed += [
            _Placed(tensor, shard.path, header.data_start + tensor.begin, shard.size)
            for tensor in header.tensors
        ]
        own = _metadata(shard.path, header.data_start)
        metadata = own if metadata is None else dict(metadata.items() & own.items())
    return placed, metadata or {}


def _metadata(path: Path, data_start: int) -> dict[str, str]:
    with open_regular(path) as file:
        value: dict[str, Any] = json.loads(file.read(data_start)[8:])
    return dict(value.get("__metadata__") or {})


def _new_files(placed: Sequence[_Placed], limit: int, metadata: Mapping[str, str]) -> list[_NewFile]:
    groups: list[list[_Placed]] = [[]]
    fixed = _HEADER_ROOM + len(canonical_json(dict(metadata)))
    room = limit - fixed
    left = room
    for item in placed:
        cost = item.size + _header_bytes(item)
        if cost > room:
            raise UsageError(
                f"the tensor {item.tensor.name} alone has {item.size} bytes and cannot be cut",
                place="--reshard",
                hint=f"at least {cost + fixed}",
            )
        if cost > left:
            groups.append([])
            left = room
        groups[-1].append(item)
        left -= cost
    count = len(groups)
    names = (
        [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)] if count > 1 else [SINGLE]
    )
    return [_new_file(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _header_bytes(item: _Placed) -> int:
    """Return at least what the tensor takes in a header."""
    return len(canonical_json(item.tensor.name)) + 24 * len(item.tensor.shape) + 120


def _new_file(name: str, group: Sequence[_Placed], metadata: Mapping[str, str]) -> _NewFile:
    # Wide elements first, as the reference library writes them: whatever the sizes, all are aligned.
    ordered = sorted(group, key=lambda item: -DTYPE_BITS[item.tensor.dtype])
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    ranges: list[FileRange] = []
    at = 0
    for item in ordered:
        tensor = item.tensor
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + item.size],
        }
        at += item.size
        last = ranges[-1] if ranges else None
        if last is not None and last.path == item.path and last.start + last.size == item.start:
            ranges[-1] = replace(last, size=last.size + item.size)
        elif item.size:
            ranges.append(FileRange(item.path, item.start, item.size, item.file_size))
    text = canonical_json(header)
    text += b" " * (-len(text) % _ALIGN)
    tensors = tuple(item.tensor.name for item in ordered)
    return _NewFile(name, (len(text).to_bytes(8, "little") + text, *ranges), tensors)


def _index(files: Sequence[_NewFile], total: int) -> bytes:
    weight_map = {name: file.name for file in files for name in file.tensors}
    return canonical_json({"metadata": {"total_size": total}, "weight_map": weight_map})


def _states(sources: Mapping[Path, WeightShard], cache: DigestCache, mtime: int) -> dict[Path, StatKey]:
    """Return the states of the files, which must hold what the scan read."""
    shards = list(sources.values())
    keys = {path: StatKey.of(path.stat()) for path in sources}
    for part in bundles(len(shards)):
        group = shards[part.start : part.stop]
        again = scan_layer([LayerFile(item.path, item.name) for item in group], cache, mtime)
        for shard, digests in zip(group, again, strict=True):
            if digests.layer_sha256 != shard.digests.layer_sha256:
                raise WeightsError(
                    "changed after it was checked", place=str(shard.path), hint="build from files at rest"
                )
    return keys


def _hash_layer(
    files: Sequence[_NewFile],
    states: Mapping[Path, StatKey],
    cache: DigestCache,
    mtime: int,
    report: Callable[[int], None],
    *,
    own: bool,
) -> list[WeightShard]:
    """Return the new files of one layer with their digests, remembered or from one read."""
    ranges = [piece for file in files for piece in file.pieces if isinstance(piece, FileRange)]
    used = {piece.path: states[piece.path] for piece in ranges} or dict(states)
    first = next(iter(used))
    plan = [[file.name, [_identity(piece) for piece in file.pieces]] for file in files]
    keys = [[os.fsencode(path).hex(), to_plain(key)] for path, key in used.items()]
    purpose = f"reshard:{sha256_hex(canonical_json([plan, keys]))}:{mtime}"
    known = cache.get(first, purpose, used[first])
    started = time.time_ns()
    if known is None or (own and "0" not in known):
        known = _hash_pieces(files, mtime, report, own=own)
        if not any(is_racy(key, started) for key in used.values()):
            cache.put(first, purpose, used[first], known)
    else:
        report(sum(file.size for file in files))
    layer, size = known["layer_sha256"], int(known["layer_size"])
    shards = []
    for at, file in enumerate(files):
        digests = FileDigests(known[str(at)] if own else "", layer, size, purpose=purpose)
        shards.append(WeightShard(first, file.name, file.size, digests, file.pieces))
    return shards


def _hash_pieces(
    files: Sequence[_NewFile], mtime: int, report: Callable[[int], None], *, own: bool
) -> dict[str, str]:
    layer, frame = hashlib.sha256(), WeightLayer(mtime)
    found: dict[str, str] = {}
    for at, file in enumerate(files):
        layer.update(frame.start(file.name, file.size))
        whole = hashlib.sha256() if own else None
        for chunk in _chunks(file.pieces):
            if whole is not None:
                whole.update(chunk)
            layer.update(chunk)
            report(len(chunk))
        if whole is not None:
            found[str(at)] = whole.hexdigest()
    layer.update(frame.end())
    return found | {"layer_sha256": layer.hexdigest(), "layer_size": str(frame.size)}


def _chunks(pieces: Sequence[bytes | FileRange]) -> Iterator[bytes]:
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
            continue
        try:
            with open_regular(piece.path) as file:
                file.seek(piece.start)
                left = piece.size
                while left and (chunk := file.read(min(CHUNK, left))):
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise WeightsError(f"cannot be read: {error.strerror}", place=str(piece.path)) from None
        if left:
            raise WeightsError("is shorter than it was", place=str(piece.path))


def _identity(piece: bytes | FileRange) -> list[str | int]:
    if isinstance(piece, bytes):
        return [sha256_hex(piece)]
    return [os.fsencode(piece.path).hex(), piece.start, piece.size]
