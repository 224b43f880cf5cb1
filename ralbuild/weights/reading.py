"""The one read of every weight file: both digests and every value, in a pool over the files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from ralbuild.digests import DigestCache, FileDigests, scan_file
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
    """One weight file: where it is, its name in the image, and the digests of file and layer."""

    path: Path
    name: str
    size: int
    digests: FileDigests


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
        cache, mtime, rehash: as of `ralbuild.digests.scan_file`.
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
        self._fail_fast = fail_fast
        self._findings = findings
        self._total = sum(item.header.file_size for item in files.values())
        self._done = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, jobs: int) -> tuple[WeightShard, ...]:
        """Read every file; findings are recorded in the order of the names, whichever ends first."""
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            try:
                futures = [pool.submit(self._read, name) for name in self._files]
                while wait(futures, WAKE_SECONDS).not_done:
                    pass
                results = [future.result() for future in futures]
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

    def _read(self, name: str) -> FileDigests | WeightsError | None:
        item = self._files[name]
        hashed = self._tied & {tensor.name for tensor in item.header.tensors}
        try:
            # The name in the image is the one in the folder, not the blob that a link leads to.
            digests = scan_file(
                item.path,
                self._cache,
                self._mtime,
                self._step,
                name=name,
                rehash=self._rehash,
                observer=ValueScan(item.header, hashed),
            )
        except _StoppedError:
            return None
        except WeightsError as error:
            return error
        if self._fail_fast:
            trial = self._findings.empty()
            self._judge(name, digests, trial)
            if trial.failed:
                self._stop.set()
        return digests

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
