"""`verify_folder`: every check of a model folder in one run, each weight byte read at most once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import sha256_hex
from ralbuild.contract.manifest import ModelFile, ModelManifest
from ralbuild.contract.vocab import write_vocab
from ralbuild.digests import DigestCache, FileDigests, scan_file
from ralbuild.errors import WeightsError
from ralbuild.weights import architecture, dialect, hooks, layout, special
from ralbuild.weights.families import Family, families
from ralbuild.weights.files import (
    SHIPPED_FILES,
    Folder,
    open_folder,
    promised_sha256,
    read_json,
    read_small,
)
from ralbuild.weights.findings import Finding, Findings, FoundError
from ralbuild.weights.safetensors import Header, Tensor, majority_dtype, read_header
from ralbuild.weights.template import Template, check_template, find_template
from ralbuild.weights.tokenizer import Vocabulary, read_vocabulary
from ralbuild.weights.values import ValueScan, judge, read_verdict

Progress = Callable[[int, int], None]
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "wte.weight")


@dataclass(frozen=True, slots=True)
class WeightShard:
    """One weight file: where it is, its name in the image, and the digests of file and layer."""

    path: Path
    name: str
    size: int
    digests: FileDigests


@dataclass(frozen=True, slots=True)
class ScannedModel:
    """A checked model folder.

    Attributes:
        manifest: the facts that the image is bound to.
        shards: weight files in layer order.
        files: small files that go into the image, with their bytes.
        vocabulary: token bytes and ids.
        left_out: names in the folder that do not go into the image.
        findings: warnings and notes, worst first.
    """

    manifest: ModelManifest
    shards: tuple[WeightShard, ...]
    files: tuple[tuple[str, bytes], ...]
    vocabulary: Vocabulary
    left_out: tuple[str, ...]
    findings: tuple[Finding, ...] = field(default=())

    @property
    def weight_bytes(self) -> int:
        """Size of all weight files."""
        return sum(shard.size for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run found.

    Attributes:
        findings: all of them, worst first.
        model: the scanned folder; None when an error keeps it from being one.
        skipped: why weights were not read, or an empty text.
    """

    findings: tuple[Finding, ...]
    model: ScannedModel | None
    skipped: str = ""

    @property
    def failed(self) -> bool:
        """True when there is an error."""
        return any(finding.severity == "error" for finding in self.findings)


def scan_model(
    folder: Path,
    cache: DigestCache,
    mtime: int,
    progress: Progress,
    *,
    rehash: bool = False,
    jobs: int = 2,
) -> ScannedModel:
    """Check a model folder and hash its weights; stop before reading them once an error is known.

    Args: as of `verify_folder`.

    Raises:
        FoundError: with every finding, when there is an error.
        WeightsError: when there is no folder at all.
    """
    verdict = verify_folder(folder, cache, mtime, progress, rehash=rehash, jobs=jobs, fail_fast=True)
    if verdict.failed or verdict.model is None:
        raise FoundError(verdict.findings)
    return verdict.model


def verify_folder(
    folder: Path,
    cache: DigestCache,
    mtime: int,
    progress: Progress,
    *,
    rehash: bool = False,
    jobs: int = 2,
    fail_fast: bool = False,
) -> Verdict:
    """Run every check.

    Args:
        folder: a Hugging Face folder, or a ``models--org--name`` root of its cache.
        cache: digests and verdicts that are known; a known file's data is not read.
        mtime: of the layers' entries, in seconds since 1970.
        progress: called with bytes done and bytes in all.
        rehash: read every weight byte, whatever the cache knows.
        jobs: files read at the same time.
        fail_fast: do not read weights once an error is known, and stop at the first bad file.

    Raises:
        WeightsError: when there is no folder at all.
    """
    findings = Findings()
    check = _Check(open_folder(folder, findings), findings)
    check.read_small_files()
    check.read_headers()
    check.check_names_and_shapes()
    vocabulary, template = check.read_tokenizer()
    left_out = layout.left_out(check.folder, check.layout, findings)
    if fail_fast and findings.failed:
        return Verdict(findings.sorted(), None, "weights were not read: the folder has errors already")
    read = _Reading(check, cache, mtime, progress, rehash=rehash, fail_fast=fail_fast)
    shards = read.run(jobs)
    if findings.failed or vocabulary is None:
        return Verdict(findings.sorted(), None)
    manifest = check.manifest(shards, vocabulary, template)
    found = findings.sorted()
    model = ScannedModel(manifest, shards, tuple(check.small.items()), vocabulary, left_out, found)
    return Verdict(found, model)


class _Check:
    """One run: what was read so far, and the checks that need no weight byte."""

    def __init__(self, folder: Folder, findings: Findings) -> None:
        self.folder = folder
        self.findings = findings
        self.configs: dict[str, dict[str, Any]] = {}
        self.small: dict[str, bytes] = {}
        self.headers: dict[str, Header] = {}
        self.tensors: dict[str, Tensor] = {}
        self.layout = layout.Layout((), {}, {})
        self.family: Family | None = None
        self.promise: architecture.Promise | None = None

    def read_small_files(self) -> None:
        """Read what the image ships besides weights."""
        files = self.folder.files
        tokenizer_hint = "" if "tokenizer.json" in files else _slow_tokenizer(files)
        if "config.json" not in files:
            self.findings.add("W203", "the model folder lacks config.json")
        if "tokenizer.json" not in files:
            what = f"the model folder lacks tokenizer.json{tokenizer_hint}"
            self.findings.add("W204", what)
        for name in SHIPPED_FILES:
            if name not in files:
                continue
            data = read_small(files[name], name, self.findings)
            if data is None:
                continue
            self.small[name] = data
            if name.endswith(".json"):
                config = read_json(data, name, self.findings)
                if config is not None:
                    self.configs[name] = config
        configs = {name: config for name, config in self.configs.items() if name != "tokenizer.json"}
        hooks.check_code(self.folder, configs, self.findings)

    def read_headers(self) -> None:
        """Find the weight files, read their headers and compare them with the index."""
        self.layout = layout.find_layout(self.folder, self.findings)
        for name in self.layout.names:
            header = read_header(self.folder.files[name], name, self.findings)
            if header is not None:
                self.headers[name] = header
        layout.compare_index(self.layout, self.headers, self.findings)
        for header in self.headers.values():
            for tensor in header.tensors:
                self.tensors.setdefault(tensor.name, tensor)

    @property
    def whole(self) -> bool:
        """True when no weight file is missing or unreadable."""
        named = set(self.layout.weight_map.values()) or set(self.layout.names)
        return bool(named) and set(self.headers) == named

    def check_names_and_shapes(self) -> None:
        """Compare config and tensors."""
        config = self.configs.get("config.json")
        plain = hooks.check_formats(self.folder, config or {}, self.tensors.values(), self.findings)
        if config is None:
            return
        self.family = dialect.check_names(config, families(), self.findings)
        dialect.check_settings(config, self.family, self.findings)
        if not plain:
            return
        dialect.check_dtypes(config, self.tensors.values(), self.findings)
        if self.family is not None:
            self.promise = architecture.read_promise(self.family, config, self.findings)
        if self.promise is not None:
            architecture.compare(self.promise, self.tensors, whole=self.whole, findings=self.findings)
        elif self.family is None:
            self._check_embedding(config)

    def _check_embedding(self, config: Mapping[str, Any]) -> None:
        rows = config.get("vocab_size")
        for name in EMBEDDINGS:
            tensor = self.tensors.get(name)
            if tensor is not None and tensor.shape[:1] != (rows,):
                found = tensor.shape[0] if tensor.shape else 0
                what = f"has {found} rows, but config.json says vocab_size {rows}"
                self.findings.add("W304", what, tensor=name, found=found, needed=rows)

    def read_tokenizer(self) -> tuple[Vocabulary | None, Template | None]:
        """Read tokenizer and template, and check the special tokens."""
        data = self.configs.get("tokenizer.json")
        vocabulary = None
        if data is not None:
            vocabulary = read_vocabulary(data, self.small["tokenizer.json"], self.findings)
        template = find_template(self.small, self.configs, self.findings)
        if vocabulary is not None:
            special.check_special(self.configs, vocabulary, self.findings)
            if template is not None:
                check_template(template, self.configs, vocabulary, self.findings)
        return vocabulary, template

    def manifest(
        self, shards: tuple[WeightShard, ...], vocabulary: Vocabulary, template: Template | None
    ) -> ModelManifest:
        """Return the facts that the image is bound to."""
        config = self.configs["config.json"]
        positions = config.get("max_position_embeddings", config.get("n_positions"))
        return ModelManifest(
            architecture=config["architectures"][0],
            model_type=config["model_type"],
            dtype=majority_dtype(self.tensors.values()),
            parameters=sum(tensor.elements for tensor in self.tensors.values()),
            tensors=len(self.tensors),
            weights=tuple(ModelFile(shard.name, shard.size, shard.digests.sha256) for shard in shards),
            files=tuple(ModelFile(name, len(data), sha256_hex(data)) for name, data in self.small.items()),
            vocab_size=int(config["vocab_size"]),
            tokenizer_size=len(vocabulary.tokens),
            tokenizer_sha256=hashlib.sha256(
                write_vocab(vocabulary.tokens, strips=vocabulary.strips)
            ).hexdigest(),
            eos_token_ids=special.end_ids(self.configs, vocabulary),
            max_positions=positions if type(positions) is int else 0,
            tokenizer_fingerprint=vocabulary.fingerprint,
            template_sha256=template.sha256 if template is not None else "",
        )


def _slow_tokenizer(files: Mapping[str, Path]) -> str:
    slow = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model") if name in files]
    return f"; {slow[0]} alone is not enough" if slow else ""


class _StoppedError(Exception):
    """A file is not read to its end: another one failed, or the user said so."""


class _Reading:
    """The one read of every weight file: digests and values."""

    def __init__(
        self,
        check: _Check,
        cache: DigestCache,
        mtime: int,
        progress: Progress,
        *,
        rehash: bool,
        fail_fast: bool,
    ) -> None:
        self.check = check
        self.cache = cache
        self.mtime = mtime
        self.progress = progress
        self.rehash = rehash
        self.fail_fast = fail_fast
        self.names = tuple(check.headers)
        self.total = sum(check.folder.files[name].stat().st_size for name in self.names)
        self.done = 0
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.tied = architecture.tied_pair(check.promise, check.tensors)

    def run(self, jobs: int) -> tuple[WeightShard, ...]:
        """Read every file; findings are recorded in the order of the names, whichever ends first."""
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            try:
                results = list(pool.map(self._read, self.names))
            except BaseException:
                self.stop.set()
                raise
        findings = self.check.findings
        tied: dict[str, str] = {}
        shards: list[WeightShard] = []
        for name, result in zip(self.names, results, strict=True):
            if result is None:
                continue
            if isinstance(result, WeightsError):
                findings.add("W225", result.problems[0].message, file=name)
                continue
            path = self.check.folder.files[name]
            shards.append(WeightShard(path, name, path.stat().st_size, result))
            tied |= self._judge(name, result, findings)
        if self.check.promise is not None:
            architecture.check_tied_copy(self.check.promise, tied, findings)
        return tuple(shards)

    def _read(self, name: str) -> FileDigests | WeightsError | None:
        header = self.check.headers[name]
        hashed = self.tied & {tensor.name for tensor in header.tensors}
        observer = ValueScan(header, hashed)
        path = self.check.folder.files[name]
        try:
            # The name in the image is the one in the folder, not the blob that a link leads to.
            digests = scan_file(
                path,
                self.cache,
                self.mtime,
                self._step,
                name=name,
                rehash=self.rehash,
                observer=observer,
            )
        except _StoppedError:
            return None
        except WeightsError as error:
            return error
        if self.fail_fast:
            trial = Findings()
            self._judge(name, digests, trial)
            if trial.failed:
                self.stop.set()
        return digests

    def _step(self, count: int) -> None:
        if self.stop.is_set():
            raise _StoppedError
        with self.lock:
            self.done += count
            self.progress(self.done, self.total)

    def _judge(self, name: str, digests: FileDigests, findings: Findings) -> dict[str, str]:
        """Record what a file's values came to; return the digests of the tensors asked for."""
        promised = promised_sha256(self.check.folder.files[name])
        if promised and promised != digests.sha256:
            what = f"has sha256 {digests.sha256}, its name in the cache says {promised}"
            findings.add("W223", what, file=name, found=digests.sha256, needed=promised)
        verdict = read_verdict(digests.verdict, self.check.headers[name])
        if verdict is None:
            findings.add("W225", "its header changed after it was checked", file=name)
            return {}
        judge(verdict, name, self.check.family, findings)
        return verdict.digests
