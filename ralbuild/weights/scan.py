"""`scan_model`: a folder to a `ScannedModel`, each weight byte read at most once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import sha256_hex
from ralbuild.contract.manifest import ModelFile, ModelManifest
from ralbuild.contract.vocab import write_vocab
from ralbuild.digests import DigestCache, FileDigests, scan_file
from ralbuild.errors import Problem, WeightsError
from ralbuild.weights.files import (
    SHIPPED_FILES,
    open_folder,
    read_json,
    read_small,
    refuse_code,
    regular_files,
)
from ralbuild.weights.safetensors import Header, majority_dtype, read_header
from ralbuild.weights.tokenizer import Vocabulary, read_vocabulary

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
    """

    manifest: ModelManifest
    shards: tuple[WeightShard, ...]
    files: tuple[tuple[str, bytes], ...]
    vocabulary: Vocabulary
    left_out: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Size of all weight files."""
        return sum(shard.size for shard in self.shards)


def scan_model(
    folder: Path,
    cache: DigestCache,
    mtime: int,
    progress: Callable[[int, int], None],
    *,
    rehash: bool = False,
    jobs: int = 2,
) -> ScannedModel:
    """Check a model folder and hash its weights.

    Args:
        folder: a Hugging Face folder, or a ``models--org--name`` root of its cache.
        cache: digests that are known; a known file's data is not read.
        mtime: time of the entries in weight layers, seconds since 1970.
        progress: called with (bytes done, bytes in all).
        rehash: read every byte even when the cache knows it.
        jobs: files read at once.

    Raises:
        WeightsError: with every problem of the first stage that finds one.
    """
    root = open_folder(folder)
    files = regular_files(root)
    configs = {
        name: read_json(files[name], name)
        for name in SHIPPED_FILES
        if name in files and name.endswith(".json")
    }
    _need(files, root)
    refuse_code(files, configs)
    names = _weight_names(files)
    headers = {name: read_header(files[name]) for name in names}
    _check_index(files, headers)
    vocabulary = read_vocabulary(files["tokenizer.json"])
    facts = _Facts(configs, headers, vocabulary)
    facts.check()
    digests = _hash(files, names, cache, mtime, progress, rehash=rehash, jobs=jobs)
    shards = tuple(
        WeightShard(files[name], name, files[name].stat().st_size, digests[name]) for name in names
    )
    small = tuple((name, read_small(files[name], name)) for name in SHIPPED_FILES if name in files)
    manifest = facts.manifest(shards, small)
    left_out = tuple(
        name for name in files if name not in names and name not in SHIPPED_FILES and name != INDEX
    )
    return ScannedModel(manifest, shards, small, vocabulary, left_out)


def _need(files: dict[str, Path], root: Path) -> None:
    problems = [
        Problem(f"the model folder lacks {name}", str(root), hint)
        for name, hint in (
            ("config.json", "give a Hugging Face model folder"),
            (
                "tokenizer.json",
                "convert the tokenizer with transformers: AutoTokenizer(...).save_pretrained()",
            ),
        )
        if name not in files
    ]
    if problems:
        raise WeightsError.of(problems)


def _weight_names(files: dict[str, Path]) -> list[str]:
    """Return the weight files of the layout in use: one file, or the shards that the index names."""
    if INDEX in files and SINGLE in files:
        raise WeightsError(
            f"both {SINGLE} and {INDEX} are there; loaders disagree on which one counts",
            place=INDEX,
            hint="remove the one that is not meant",
        )
    if SINGLE in files:
        return [SINGLE]
    if INDEX in files:
        names = sorted(set(_weight_map(files).values()))
        missing = [name for name in names if name not in files]
        if missing:
            raise WeightsError.of(
                [
                    Problem("the index names this shard, but it is missing", name, "download it")
                    for name in missing
                ]
            )
        return names
    others = [name for name in files if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf"))]
    found = f"found {', '.join(others)}" if others else "found no weights"
    raise WeightsError(
        f"needs {SINGLE} or shards with {INDEX}; {found}",
        place="model folder",
        hint="save the model with safetensors" if others else "is this the right folder?",
    )


def _weight_map(files: dict[str, Path]) -> dict[str, str]:
    weight_map = read_json(files[INDEX], INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError("needs a weight_map that is not empty", place=INDEX)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise WeightsError(
                f"{name!r} is not the name of a shard in this folder", place=f"{INDEX}: {tensor}"
            )
    return weight_map


def _check_index(files: dict[str, Path], headers: dict[str, Header]) -> None:
    """Compare index and shards both ways: every tensor is in the file that the index names, and no other."""
    problems: list[Problem] = []
    where: dict[str, str] = {}
    for name, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in where:
                problems.append(Problem(f"also in {where[tensor.name]}", f"{name}: {tensor.name}"))
            where[tensor.name] = name
    if INDEX in files:
        weight_map = _weight_map(files)
        for tensor_name, name in weight_map.items():
            if where.get(tensor_name) != name:
                found = where.get(tensor_name, "no shard")
                problems.append(
                    Problem(f"the index says {name}, found in {found}", f"{INDEX}: {tensor_name}")
                )
        problems += [
            Problem("in the shard but not in the index", f"{name}: {tensor_name}")
            for tensor_name, name in where.items()
            if tensor_name not in weight_map
        ]
    if problems:
        raise WeightsError.of(problems[:50])


def _hash(
    files: dict[str, Path],
    names: list[str],
    cache: DigestCache,
    mtime: int,
    progress: Callable[[int, int], None],
    *,
    rehash: bool,
    jobs: int,
) -> dict[str, FileDigests]:
    total = sum(files[name].stat().st_size for name in names)
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    def scan(name: str) -> FileDigests:
        # The name in the image is the one in the folder, not the blob that a link leads to.
        return scan_file(files[name], cache, mtime, step, name=name, rehash=rehash)

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(names, pool.map(scan, names), strict=True))


class _Facts:
    """What config, headers and tokenizer say together."""

    def __init__(
        self, configs: dict[str, dict[str, Any]], headers: dict[str, Header], vocabulary: Vocabulary
    ) -> None:
        self.config = configs["config.json"]
        self.generation = configs.get("generation_config.json", {})
        self.tokenizer = configs.get("tokenizer_config.json", {})
        self.tensors = {tensor.name: tensor for header in headers.values() for tensor in header.tensors}
        self.vocabulary = vocabulary
        self.vocab_size = self.config.get("vocab_size")

    def check(self) -> None:
        problems = [*self._check_names(), *self._check_embedding(), *self._check_ids()]
        if problems:
            raise WeightsError.of(problems)

    def _check_names(self) -> list[Problem]:
        problems = []
        if not isinstance(self.config.get("model_type"), str):
            problems.append(Problem("lacks model_type", "config.json"))
        architectures = self.config.get("architectures")
        if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
            problems.append(Problem("lacks architectures", "config.json"))
        if type(self.vocab_size) is not int or self.vocab_size < 1:
            problems.append(
                Problem(f"vocab_size must be a positive number, found {self.vocab_size!r}", "config.json")
            )
        if self.config.get("quantization_config"):
            hint = "use the unquantised weights"
            problems.append(
                Problem("quantised checkpoints are not supported in this version", "config.json", hint)
            )
        return problems

    def _check_embedding(self) -> list[Problem]:
        for name in EMBEDDINGS:
            tensor = self.tensors.get(name)
            if tensor is not None and tensor.shape[:1] != (self.vocab_size,):
                rows = tensor.shape[0] if tensor.shape else 0
                return [Problem(f"has {rows} rows, but config.json says vocab_size {self.vocab_size}", name)]
        return []

    def _check_ids(self) -> list[Problem]:
        size = len(self.vocabulary.tokens)
        if type(self.vocab_size) is int and size > self.vocab_size:
            return [
                Problem(f"knows {size} ids, but the embedding has {self.vocab_size} rows", "tokenizer.json")
            ]
        ids = self.eos_ids()
        if not ids:
            hint = "set eos_token_id in generation_config.json"
            return [Problem("no end-of-text token is named anywhere", "config.json", hint)]
        return [
            Problem(f"eos_token_id {number} is outside the vocabulary of {size}", "config.json")
            for number in ids
            if number >= size
        ]

    def eos_ids(self) -> tuple[int, ...]:
        """Return the union of what the three files call the end of a text."""
        ids: set[int] = set()
        for source in (self.config, self.generation):
            value = source.get("eos_token_id")
            ids.update(item for item in (value if isinstance(value, list) else [value]) if type(item) is int)
        token = self.tokenizer.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content in self.vocabulary.ids:
            ids.add(self.vocabulary.ids[content])
        return tuple(sorted(ids))

    def manifest(
        self, shards: tuple[WeightShard, ...], small: tuple[tuple[str, bytes], ...]
    ) -> ModelManifest:
        positions = self.config.get("max_position_embeddings", self.config.get("n_positions"))
        return ModelManifest(
            architecture=self.config["architectures"][0],
            model_type=self.config["model_type"],
            dtype=majority_dtype(iter(self.tensors.values())),
            parameters=sum(tensor.elements for tensor in self.tensors.values()),
            tensors=len(self.tensors),
            weights=tuple(ModelFile(shard.name, shard.size, shard.digests.sha256) for shard in shards),
            files=tuple(ModelFile(name, len(data), sha256_hex(data)) for name, data in small),
            vocab_size=int(self.vocab_size or 0),
            tokenizer_size=len(self.vocabulary.tokens),
            tokenizer_sha256=hashlib.sha256(write_vocab(self.vocabulary.tokens)).hexdigest(),
            eos_token_ids=self.eos_ids(),
            max_positions=positions if type(positions) is int else 0,
        )
