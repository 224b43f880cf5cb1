"""`verify_folder`: every check of a model folder in one run, each weight byte read at most once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ralbuild.contract.codec import sha256_hex
from ralbuild.contract.manifest import ModelFile, ModelManifest
from ralbuild.contract.vocab import write_vocab
from ralbuild.digests import DigestCache, LayerCopies
from ralbuild.weights import architecture, dialect, hooks, layout, quantised, signature, special
from ralbuild.weights.families import Family, families
from ralbuild.weights.files import SHIPPED_FILES, Folder, open_folder, read_json, read_small
from ralbuild.weights.findings import Finding, Findings
from ralbuild.weights.memo import Memo
from ralbuild.weights.reading import Progress, Reading, WeightFile, WeightShard, packed_weights
from ralbuild.weights.safetensors import Header, Tensor, majority_dtype, read_header
from ralbuild.weights.template import Template, check_template, find_template
from ralbuild.weights.tokenizer import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from ralbuild.signing import PublicKey

MOST_TENSORS = 1_000_000
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "wte.weight")


@dataclass(frozen=True, slots=True)
class Order:
    """How a folder is to be checked.

    Attributes:
        rehash: read every weight byte, whatever the cache knows.
        jobs: files read at the same time.
        fail_fast: do not read weights once an error is known, and stop at the first bad file.
        ignored: ids of rules whose findings do not count.
        key: of the publisher, to check ``model.sig`` with.
        memo: remembers what the same tokenizer and template came to before; None works it out.
        own_digests: compute the SHA-256 of every weight file, besides that of its layer.
        copies: takes the weight layers' bytes in the read that hashes them; None copies nothing.
    """

    rehash: bool = False
    jobs: int = 2
    fail_fast: bool = False
    ignored: frozenset[str] = frozenset()
    key: PublicKey | None = None
    memo: Memo | None = None
    own_digests: bool = False
    copies: LayerCopies | None = None


@dataclass(frozen=True, slots=True)
class ScannedModel:
    """A checked model folder.

    Attributes:
        manifest: the facts that the image is bound to.
        shards: weight files in layer order.
        files: small files that go into the image, with their bytes.
        vocabulary: token bytes and ids.
        left_out: names in the folder that do not go into the image.
        quantised: how the weights are quantised, for people; empty when they are not.
        findings: warnings and notes, worst first.
    """

    manifest: ModelManifest
    shards: tuple[WeightShard, ...]
    files: tuple[tuple[str, bytes], ...]
    vocabulary: Vocabulary
    left_out: tuple[str, ...]
    quantised: str = ""
    findings: tuple[Finding, ...] = field(default=())

    @property
    def weight_bytes(self) -> int:
        """Size of all weight files."""
        return sum(shard.size for shard in self.shards)

    @property
    def weight_digests(self) -> dict[str, str]:
        """SHA-256 of the weight files by name: of those whose own digest was asked for."""
        return {shard.name: shard.digests.sha256 for shard in self.shards if shard.digests.sha256}

    @property
    def root_sha256(self) -> str:
        """The one digest of all files, as OpenSSF model signing has it for a folder that holds just these.

        Empty when a weight file's own digest was not asked for.
        """
        digests = {item.path: item.sha256 for item in self.manifest.files}
        digests |= {shard.name: shard.digests.sha256 for shard in self.shards}
        return (
            signature.root_sha256(digests[name] for name in sorted(digests)) if all(digests.values()) else ""
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run found.

    Attributes:
        findings: those that count, worst first.
        model: the scanned folder; None when an error keeps it from being one.
        ignored: findings that the order said to ignore, worst first.
    """

    findings: tuple[Finding, ...]
    model: ScannedModel | None
    ignored: tuple[Finding, ...] = ()

    @property
    def failed(self) -> bool:
        """True when there is an error that counts."""
        return not self.passed(strict=False)

    def passed(self, *, strict: bool) -> bool:
        """Tell whether nothing speaks against the folder; a warning does when ``strict``."""
        bad = ("error", "warning") if strict else ("error",)
        return not any(finding.severity in bad for finding in self.findings)


def verify_folder(
    folder: Path, cache: DigestCache, mtime: int, progress: Progress, order: Order | None = None
) -> Verdict:
    """Run every check.

    Args:
        folder: a Hugging Face folder, or a ``models--org--name`` root of its cache.
        cache: digests and verdicts that are known; a known file's data is not read.
        mtime: of the layers' entries, in seconds since 1970.
        progress: called with bytes done and bytes in all.
        order: how to; the defaults of `Order` without one.

    Raises:
        WeightsError: when there is no folder at all.
    """
    order = order or Order()
    findings = Findings(order.ignored)
    check = _Check(open_folder(folder, findings), findings)
    check.read_small_files()
    check.read_headers()
    check.check_names_and_shapes()
    vocabulary, template = check.read_tokenizer(order.memo)
    left_out = layout.left_out(check.folder, check.layout, findings)
    signed = signature.check_signature(check.folder, order.key, findings)
    if order.fail_fast and findings.failed:
        return Verdict(findings.sorted(), None, findings.sorted(counted=False))
    own = order.own_digests or signed is not None
    shards = check.read_weights(cache, mtime, progress, order, own=own)
    if signed is not None:
        check.compare_signed(signed, shards)
    found, ignored = findings.sorted(), findings.sorted(counted=False)
    unread = len(shards) < len(check.headers)
    if findings.failed or vocabulary is None or unread or not check.complete:
        return Verdict(found, None, ignored)
    manifest = check.manifest(shards, vocabulary, template)
    small = tuple(check.small.items())
    model = ScannedModel(manifest, shards, small, vocabulary, left_out, check.quantised, found)
    return Verdict(found, model, ignored)


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
        self.quantised = ""

    def read_small_files(self) -> None:
        """Read what the image ships besides weights."""
        files = self.folder.files
        tokenizer_hint = "" if "tokenizer.json" in files else _slow_tokenizer(files)
        if "config.json" not in files:
            self.findings.add("W203", "the model folder lacks it", file="config.json")
        if "tokenizer.json" not in files:
            self.findings.add("W204", f"the model folder lacks it{tokenizer_hint}", file="tokenizer.json")
        if "tokenizer_config.json" not in files:
            self.findings.add("W521", "the model folder lacks it", file="tokenizer_config.json")
        for name in SHIPPED_FILES:
            if name not in files:
                continue
            data = read_small(files[name], name, self.findings)
            if data is None:
                continue
            self.small[name] = data
            if name.endswith(".json") and name != "tokenizer.json":  # see `read_tokenizer`
                config = read_json(data, name, self.findings)
                if config is not None:
                    self.configs[name] = config
        hooks.check_code(self.folder, self.configs, self.findings)

    def read_headers(self) -> None:
        """Find the weight files, read their headers and compare them with the index."""
        self.layout = layout.find_layout(self.folder, self.findings)
        if self.layout.index_json:  # other servers find the shards by it
            self.small = dict(sorted({**self.small, layout.INDEX: self.layout.index_json}.items()))
        for name in self.layout.names:
            header = read_header(self.folder.files[name], name, self.findings)
            if header is None:
                continue
            if sum(len(item.tensors) for item in self.headers.values()) + len(header.tensors) > MOST_TENSORS:
                self.findings.add("W127", "too many tensors in all", needed=f"at most {MOST_TENSORS:,}")
                break
            self.headers[name] = header
        self.findings.holder = self._holder
        layout.compare_index(self.layout, self.headers, self.findings)
        for header in self.headers.values():
            for tensor in header.tensors:
                self.tensors.setdefault(tensor.name, tensor)

    def _holder(self, tensor: str) -> str:
        """Return the file that holds a tensor; for a missing one, the file that says what there should be."""
        for name, header in self.headers.items():
            if any(item.name == tensor for item in header.tensors):
                return name
        return layout.INDEX if self.layout.weight_map else layout.SINGLE if self.headers else ""

    @property
    def whole(self) -> bool:
        """True when no weight file is missing or unreadable."""
        named = set(self.layout.weight_map.values()) or set(self.layout.names)
        return bool(named) and set(self.headers) == named

    @property
    def complete(self) -> bool:
        """True when there is all that a manifest needs, whichever errors are ignored."""
        config = self.configs.get("config.json", {})
        names, rows = config.get("architectures"), config.get("vocab_size")
        if not (isinstance(names, list) and names and isinstance(names[0], str) and type(rows) is int):
            return False
        return isinstance(config.get("model_type"), str) and self.whole and bool(self.tensors)

    def check_names_and_shapes(self) -> None:
        """Compare config and tensors."""
        config = self.configs.get("config.json")
        adapter = hooks.check_adapter(self.folder, self.tensors, self.findings)
        hooks.check_scales(self.tensors, self.findings)
        packed, plan = quantised.find_plan(self.folder, config or {}, self.tensors, self.findings)
        self.quantised = plan.text if plan is not None else "quantised" if packed else ""
        if config is None:
            return
        self.family = dialect.check_names(config, families(), self.findings)
        dialect.check_settings(config, self.family, self.findings)
        if adapter or (packed and plan is None):
            return
        if plan is None:
            dialect.check_dtypes(config, self.family, self.tensors.values(), self.findings)
        if self.family is not None:
            self.promise = architecture.read_promise(self.family, config, self.findings)
        if self.promise is not None and plan is not None:
            self.promise = quantised.expand(plan, self.promise, self.tensors, self.findings)
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

    def read_tokenizer(self, memo: Memo | None) -> tuple[Vocabulary | None, Template | None]:
        """Read tokenizer and template, and check the special tokens."""
        source = self.small.get("tokenizer.json")
        vocabulary = load_vocabulary(source, memo, self.findings) if source is not None else None
        template = find_template(self.small, self.configs, self.findings)
        if vocabulary is not None:
            special.check_special(self.configs, vocabulary, self.findings)
            if template is not None:
                check_template(template, self.configs, vocabulary, memo, self.findings)
        return vocabulary, template

    def read_weights(
        self, cache: DigestCache, mtime: int, progress: Progress, order: Order, *, own: bool
    ) -> tuple[WeightShard, ...]:
        """Read every weight file once (``own``: and hash it alone); compare what a tied head must equal."""
        reading = Reading(
            {name: WeightFile(self.folder.files[name], header) for name, header in self.headers.items()},
            self.family,
            architecture.tied_pair(self.promise, self.tensors),
            cache,
            mtime,
            progress,
            rehash=order.rehash,
            own=own,
            copies=order.copies,
            fail_fast=order.fail_fast,
            findings=self.findings,
        )
        shards = reading.run(order.jobs)
        if self.promise is not None:
            architecture.check_tied_copy(self.promise, reading.digests, self.findings)
        return shards

    def compare_signed(self, signed: signature.Signed, shards: tuple[WeightShard, ...]) -> None:
        """Hold the folder to a good signature, with the digests of what was read already."""
        known = {name: sha256_hex(data) for name, data in self.small.items()}
        known |= {shard.name: shard.digests.sha256 for shard in shards}
        shipped = frozenset((*self.small, *self.layout.names))
        signature.compare_files(signed, self.folder, known, shipped, self.findings)

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
            weights=packed_weights(shards),
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
