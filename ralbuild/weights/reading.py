"""The one read of every weight file: digests and every value, in a pool over the files."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from ralbuild.contract.manifest import PackedWeights, WeightEntry
from ralbuild.contract.tarball import bundles
from ralbuild.digests import DigestCache, FileDigests, FileRange, LayerCopies, LayerFile, scan_layer
from ralbuild.errors import WeightsError
from ralbuild.weights.families import Family
from ralbuild.weights.files import promised_sha256
from ralbuild.weights.findings import Findings
from ralbuild.weights.safetensors import Header
from ralbuild.weights.values import ValueScan, judge, read_verdict

Progress = Callable[[int, int], None]
WAKE_SECONDS = 0.5
"""An interrupt that comes just as the main thread falls asleep is seen when it wakes: soon, then."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """One weight file: where it is, its name in the image, and its digests.

    With ``pieces`` it is made of those and not of the bytes at ``path``: see `ralbuild.weights.reshard`.
    """

    path: Path
    name: str
    size: int
    digests: FileDigests
    pieces: tuple[bytes | FileRange, ...] = ()


def packed_weights(shards: Sequence[WeightShard]) -> tuple[PackedWeights, ...]:
    """Return how the weight files share layers, and those layers' digests."""
    groups = [shards[part.start : part.stop] for part in bundles(len(shards))]
    return tuple(
        PackedWeights(
            group[0].digests.layer_sha256, tuple(WeightEntry(item.name, item.size) for item in group)
        )
        for group in groups
    )


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A weight file that is to be read: where it is and its checked header."""

    path: Path
    header: Header


class _StoppedError(Exception):
    """A file is not read to its end: another one failed, or the user said so."""


class Reading:
    """Reads every weight file once.

    Args:
        files: by name, in the order of the findings.
        family: whose exemptions hold; None for an unknown one.
        tied: tensors whose digests are wanted, see `Reading.digests`.
        cache, mtime, rehash, copies: as of `ralbuild.digests.scan_layer`.
        own: compute every file's own digest; that of a blob named after its digest is computed anyhow.
        progress: called with bytes done and bytes in all.
        fail_fast: stop at the first file with an error.
        findings: where to record.

    Attributes:
        digests: SHA-256 of the tensors in ``tied``, once read.
    """

    def __init__(
        self,
        files: Mapping[str, WeightFile],
        family: Family | None,
        tied: frozenset[str],
        cache: DigestCache,
        mtime: int,
        progress: Progress,
        *,
        rehash: bool,
        own: bool,
        copies: LayerCopies | None,
        fail_fast: bool,
        findings: Findings,
    ) -> None:
        self.digests: dict[str, str] = {}
        self._files = files
        self._family = family
        self._tied = tied
        self._cache = cache
        self._mtime = mtime
        self._progress = progress
        self._rehash = rehash
        self._own = own
        self._copies = copies
        self._fail_fast = fail_fast
        self._findings = findings
        self._total = sum(item.header.file_size for item in files.values())
        self._done = 0
        self._active = 0
        self._jobs = 1
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, jobs: int) -> tuple[WeightShard, ...]:
        """Read every file; findings are recorded in the order of the names, whichever ends first."""
        self._jobs = max(1, jobs)
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                names = tuple(self._files)
                layers = [names[part.start : part.stop] for part in bundles(len(names))]
                futures = [pool.submit(self._read, layer) for layer in layers]
                while wait(futures, WAKE_SECONDS).not_done:
                    pass
                results = [item for future in futures for item in future.result()]
            except BaseException:
                self._stop.set()
                raise
        shards: list[WeightShard] = []
        for (name, item), result in zip(self._files.items(), results, strict=True):
            if result is None:
                continue
            if isinstance(result, WeightsError):
                self._findings.add("W225", result.problems[0].message, file=name)
                continue
            shards.append(WeightShard(item.path, name, item.header.file_size, result))
            self.digests |= self._judge(name, result, self._findings)
        return tuple(shards)

    def _read(self, names: tuple[str, ...]) -> list[FileDigests | WeightsError | None]:
        """Read the files of one layer; None for one that was not read to its end."""
        # The name in the image is the one in the folder, not the blob that a link leads to.
        files = [
            LayerFile(path, name, self._observer(name), self._own or bool(promised_sha256(path)))
            for name, path in ((name, self._files[name].path) for name in names)
        ]
        try:
            with self._reader():
                digests = scan_layer(
                    files,
                    self._cache,
                    self._mtime,
                    self._step,
                    rehash=self._rehash,
                    copies=self._copies,
                    is_idle=lambda: self._active < self._jobs,
                )
        except _StoppedError:
            return [None] * len(names)
        except WeightsError as error:
            place = error.problems[0].place
            return [error if str(file.path) == place else None for file in files]
        if self._fail_fast:
            trial = self._findings.empty()
            for name, item in zip(names, digests, strict=True):
                self._judge(name, item, trial)
            if trial.failed:
                self._stop.set()
        return list(digests)

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        with self._lock:
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1

    def _observer(self, name: str) -> ValueScan:
        header = self._files[name].header
        return ValueScan(header, self._tied & {tensor.name for tensor in header.tensors})

    def _step(self, count: int) -> None:
        if self._stop.is_set():
            raise _StoppedError
        with self._lock:
            self._done += count
            self._progress(self._done, self._total)

    def _judge(self, name: str, digests: FileDigests, findings: Findings) -> dict[str, str]:
        """Record what a file's values came to; return the digests of the tensors asked for."""
        item = self._files[name]
        promised = promised_sha256(item.path)
        if promised and promised != digests.sha256:
            what = f"has sha256 {digests.sha256}, its name in the cache says {promised}"
            findings.add("W223", what, file=name, found=digests.sha256, needed=promised)
        verdict = read_verdict(digests.verdict, item.header)
        if verdict is None:
            findings.add("W225", "its header changed after it was checked", file=name)
            return {}
        judge(verdict, name, self._family, findings)
        return verdict.digests
