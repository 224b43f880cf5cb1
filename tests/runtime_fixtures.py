"""A tiny model, a bundle made by hand through the contract's writers, and the runtime as a real process.

Nothing here uses the builder's rooms, so a mistake in `fold` cannot hide one in `runtime`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from typing import Any

from ralbuild.contract import places
from ralbuild.contract.bans import write_bans
from ralbuild.contract.bundle import (
    SCHEMA,
    Bundle,
    Engine,
    InputLimit,
    ObjectRef,
    PatchStep,
    Profile,
    Route,
    Rule,
    Sampling,
    SelfTest,
    write_bundle,
)
from ralbuild.contract.codec import canonical_json, sha256_hex, to_plain
from ralbuild.contract.manifest import ModelFile, ModelManifest, PackedWeights, WeightEntry
from ralbuild.contract.tarball import WeightLayer
from ralbuild.contract.transducer import COPY, DROP, EMIT, EVENT, STATE_BITS, Front, write_transducer
from ralbuild.contract.vocab import write_vocab
from ralbuild.fold.routes import RoutePatterns
from ralbuild.runtime.orders import Order, Piece
from ralbuild.runtime.service import Service
from ralbuild.runtime.wire import Frames, pack
from ralbuild.runtime.worker import Desk

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "The risk of a market is not the return of a market. Compliance and audit reduce risk.",
    "Tell me about the capital of France, and how profit is made in the year 2024!",
    "Zażółć gęślą jaźń; 你好 世界",
)


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE of a few hundred tokens and write it as a model folder has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "unk_token": SPECIAL[0],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def make_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Write a tiny random model of ``family`` with its tokenizer; its logits are far apart on purpose."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    make_tokenizer(folder)
    sizes: dict[str, Any] = {
        "vocab_size": 448,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 2,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    if family == "gpt2":
        sizes = {"vocab_size": 448, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
        sizes |= {"eos_token_id": 2, "bos_token_id": 1, "initializer_range": 0.3}
    if family == "gemma":
        sizes["head_dim"] = 16
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | changes)))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start at 0 and 1 and would hide mistakes
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def store_as(folder: Path, dtype: Any) -> None:
    """Rewrite a model's weights as elements of ``dtype``, as published models have them."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({name: item.to(dtype) for name, item in load_file(path).items()}, path, {"format": "pt"})


def token_bytes(folder: Path) -> list[bytes]:
    """Return the bytes of every token of a byte-level tokenizer; special tokens have none."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    plain = json.loads((folder / "tokenizer.json").read_text())
    back = {char: byte for byte, char in bytes_to_unicode().items()}
    added = {item["content"] for item in plain["added_tokens"]}
    out = [b""] * (max(plain["model"]["vocab"].values()) + 1)
    for token, number in plain["model"]["vocab"].items():
        out[number] = b"" if token in added else bytes(back[char] for char in token)
    return out


@dataclass(frozen=True)
class Rules:
    """What one profile does to text: literals (exact case, anywhere) and what becomes of them."""

    bold: str = ""
    redact: str = ""
    with_: str = "[gone]"
    append: str = ""
    stop: str = ""
    ban: str = ""
    sampling: Sampling = field(default_factory=Sampling)


class _Machine:
    """Collects states of a transducer for at most one literal per profile."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.final: list[int] = []
        self.programs: list[list[tuple[int, int]]] = [[(COPY, 1)]]
        self.strings: list[bytes] = []
        self.starts: list[int] = []

    def emit(self, text: str) -> tuple[int, int]:
        if text.encode() not in self.strings:
            self.strings.append(text.encode())
        return EMIT, self.strings.index(text.encode())

    def program(self, ops: list[tuple[int, int]]) -> int:
        if ops not in self.programs:
            self.programs.append(ops)
        return self.programs.index(ops)

    def add(self, literal: bytes, matched: list[tuple[int, int]]) -> None:
        base = len(self.rows)
        self.starts.append(base)
        for held in range(max(len(literal), 1)):
            row = []
            for byte in range(256):
                seen = literal[:held] + bytes([byte])
                if literal and seen == literal:
                    row.append(self.program(matched) << STATE_BITS | base)
                    continue
                keep = next(
                    (k for k in range(min(len(seen), len(literal)), 0, -1) if seen.endswith(literal[:k])), 0
                )
                ops = [(COPY, len(seen) - keep)] if keep < len(seen) else []
                row.append(self.program(ops) << STATE_BITS | base + keep)
            self.rows.append(row)
            self.final.append(self.program([(COPY, held)] if held else []))


def make_transducer(profiles: Sequence[Rules], rules: list[Rule]) -> bytes:
    """Return the table that does what ``profiles`` say; what they count is added to ``rules``."""
    machine = _Machine()
    for profile in profiles:
        literal = (profile.redact or profile.bold).encode()
        if profile.redact:
            rules.append(Rule("redact", profile.redact, "test", "1:1"))
            matched = [machine.emit(profile.with_), (DROP, len(literal)), (EVENT, len(rules) - 1)]
        else:
            rules.append(Rule("bold", profile.bold, "html_enhancer", "2:1"))
            matched = [
                machine.emit("<b>"),
                (COPY, len(literal)),
                machine.emit("</b>"),
                (EVENT, len(rules) - 1),
            ]
        machine.add(literal, matched)
    none = (1 << 32) - 1
    ends = [
        machine.program([machine.emit(profile.append)]) if profile.append else none for profile in profiles
    ]
    stops = [(number, profile.stop.encode()) for number, profile in enumerate(profiles) if profile.stop]
    # A stop string is one byte here: the markers' automaton has one state for each.
    actions = [(1, -1), *((0, index) for index in range(len(stops)))]
    marks = {number: index for index, (number, _) in enumerate(stops)}
    mark_next = [
        index | (index + 1 if bytes([byte]) == stop else 0) << 16
        for index, (_, stop) in enumerate(stops)
        for byte in range(256)
    ]
    for _, stop in stops:
        rules.append(Rule("stop", stop.decode(), "test", "3:1"))
    return write_transducer(
        cls=[*range(256), *range(256)],
        trans=[entry for row in machine.rows for entry in row],
        final=[(program, program) for program in machine.final],
        programs=machine.programs,
        strings=machine.strings,
        starts=range(len(profiles)),
        front=Front(
            modes=[
                (marks.get(number, none), none, start, ends[number], 0)
                for number, start in enumerate(machine.starts)
            ],
            mark_class=range(256) if stops else (0,) * 256,
            mark_next=mark_next or [0],
            mark_actions=actions,
            markers=[(len(rules) - len(stops) + index, 2, number) for index, (number, _) in enumerate(stops)],
        ),
        words=(bytes(4352), bytes(32)),
        max_held=64,
        rules=len(rules),
    )


def _bans(profiles: Sequence[Rules]) -> bytes:
    rows = [[0] * 256]
    starts = []
    for profile in profiles:
        phrase, base = profile.ban.encode(), len(rows)
        starts.append(base)
        for held in range(max(len(phrase), 1)):
            row = []
            for byte in range(256):
                seen = phrase[:held] + bytes([byte])
                keep = next(
                    (k for k in range(min(len(seen), len(phrase)), 0, -1) if seen.endswith(phrase[:k])), 0
                )
                row.append(0 if phrase and keep == len(phrase) else base + keep)
            rows.append(row)
    return write_bans(cls=list(range(256)), rows=rows, starts=starts)


@dataclass
class Image:
    """The part of an image's file tree that the runtime reads, under ``root``."""

    root: Path
    bundle: Bundle
    digest: str

    def path(self, place: str) -> Path:
        return Path(f"{self.root}{place}")

    def rewrite(self, **changes: Any) -> None:
        """Replace fields of the bundle, as another build would."""
        self.bundle = replace(self.bundle, **changes)
        data = write_bundle(self.bundle)
        self.path(places.BUNDLE_FILE).write_bytes(data)
        self.digest = sha256_hex(data)


def make_image(
    root: Path,
    model: Path,
    profiles: Sequence[Rules] = (Rules(),),
    *,
    routes: Sequence[Route] = (),
    input_rules: Rules | None = None,
    limits: Sequence[InputLimit] = (),
    engine: Engine | None = None,
    self_tests: Sequence[SelfTest] = (),
) -> Image:
    """Lay out bundle, objects, config and model under ``root``; the model is copied."""
    every = [*profiles, input_rules or Rules()]
    rules: list[Rule] = []
    tokens = token_bytes(model)
    transducer = make_transducer(every, rules)
    manifest = _manifest(model, len(tokens))
    blobs = [
        transducer,
        _bans(every),
        write_vocab(tokens),
        canonical_json(to_plain(manifest)),
        RoutePatterns([route.match for route in routes]).table(),
    ]
    refs = [ObjectRef(sha256_hex(data), len(data)) for data in blobs]
    config = b"version: '0.3'\n"
    names = ["default", *(f"action{number}" for number in range(1, len(profiles))), "input"]
    bundle = Bundle(
        schema=SCHEMA,
        ralbuild="0",
        target="cpu",
        model="tiny",
        manifest=refs[3],
        engine=engine or Engine(8, 512, "float32"),
        routes=tuple(routes),
        route_table=refs[4],
        profiles=tuple(
            Profile(name, (number,) if item.bold or item.redact else (), item.sampling)
            for number, (name, item) in enumerate(zip(names, every, strict=True))
        ),
        input_profile=len(every) - 1,
        input_limits=tuple(limits),
        rules=tuple(rules),
        config_sha256=sha256_hex(config),
        transducer=refs[0],
        bans=refs[1],
        vocab=refs[2],
        kernels=(),
        patch=tuple(PatchStep(name, "slots") for name in ("penalize", "sample", "transduce", "feedback")),
        self_tests=tuple(self_tests),
    )
    image = Image(root, bundle, "")
    image.path(places.OBJECTS_DIR).mkdir(parents=True)
    for ref, data in zip(refs, blobs, strict=True):
        (image.path(places.OBJECTS_DIR) / ref.sha256).write_bytes(data)
    image.path(places.CONFIG_FILE).write_bytes(config)
    shutil.copytree(model, image.path(places.MODEL_DIR))
    image.rewrite()
    return image


def _manifest(model: Path, tokenizer_size: int) -> ModelManifest:
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    weights = sorted(model.glob("*.safetensors"))
    count = parameters = 0
    for path in weights:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                count += 1
                parameters += file.get_tensor(name).numel()
    names = (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    )
    eos = config["eos_token_id"]
    return ModelManifest(
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        dtype="F32",
        parameters=parameters,
        tensors=count,
        weights=tuple(_packed(path) for path in weights),
        files=tuple(_model_file(model / name) for name in sorted(names) if (model / name).exists()),
        vocab_size=config["vocab_size"],
        tokenizer_size=tokenizer_size,
        tokenizer_sha256="",
        eos_token_ids=tuple(sorted(eos)) if isinstance(eos, list) else (eos,),
        max_positions=int(config.get("max_position_embeddings") or config.get("n_positions") or 0),
    )


def _packed(path: Path) -> PackedWeights:
    """Return a weight file by the digest of its layer's tar."""
    data, frame = path.read_bytes(), WeightLayer(0)
    tar = frame.start(path.name, len(data)) + data + frame.end()
    return PackedWeights(sha256_hex(tar), (WeightEntry(path.name, len(data)),))


def _model_file(path: Path) -> ModelFile:
    data = path.read_bytes()
    return ModelFile(path.name, len(data), sha256_hex(data))


class Runtime:
    """``python -m ralbuild.runtime`` on a free port of the loopback interface."""

    def __init__(
        self, image: Image, env: Mapping[str, str] | None = None, *, prefix: Sequence[str] = ()
    ) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RAL_")}
        settings = {"RAL_ROOT": str(image.root), "RAL_HOST": "127.0.0.1", "RAL_PORT": "0"}
        self._log = image.root / "runtime.log"
        self._errors = self._log.open("w")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "ralbuild.runtime"],
            env=clean | settings | {"RAL_BUNDLE_SHA256": image.digest} | dict(env or {}),
            stderr=self._errors,
        )
        self.url = ""

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_listening(self) -> None:
        """Wait until the port is known; it answers from then on."""
        while not re.search(r"listening.*port.*\n", self.log):
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        # Plain or JSON.
        found = re.search(r"listening.*port\W+(\d+)", self.log)
        assert found is not None
        self.url = f"http://127.0.0.1:{found[1]}"

    def wait_ready(self) -> None:
        self.wait_listening()
        while self.get("/ready")[0] != 200:
            assert self.process.poll() is None, self.log
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, bytes]:
        return self._open(urllib.request.Request(self.url + path))[:2]

    def post(
        self, path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Return status, parsed body and headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"} | dict(headers or {})
        )
        status, answer, found = self._open(request)
        return status, json.loads(answer), found

    def _open(self, request: urllib.request.Request) -> tuple[int, bytes, Mapping[str, str]]:
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()


@contextlib.contextmanager
def running(image: Image, env: Mapping[str, str] | None = None) -> Iterator[Runtime]:
    """Start a runtime, wait until it is ready, and end it."""
    runtime = Runtime(image, env)
    try:
        runtime.wait_ready()
        yield runtime
    finally:
        runtime.close()


def refused(image: Image, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Start a runtime that must not come up; return its exit status and what it logged."""
    runtime = Runtime(image, env)
    try:
        return runtime.process.wait(timeout=120), runtime.log
    finally:
        runtime.close()


class ThreadWorker:
    """A worker in a thread of this process: the real desk behind the real wire."""

    def __init__(self, service: Service) -> None:
        self.connection, self._theirs = socket.socketpair()
        self._service = service
        threading.Thread(target=self._run, daemon=True).start()

    def _say(self, message: Any) -> None:
        self._theirs.sendall(pack(message))

    def _run(self) -> None:
        desk, frames = Desk(self._service, self._say), Frames()
        self._say({"say": "ready", "info": self._service.info(), "idle_unload": 0})
        while data := self._theirs.recv(1 << 16):
            for message, body in frames.feed(data):
                desk.handle(message, body)

    def resident(self) -> dict[str, int]:
        return {"anonymous": 0, "file": 0, "shared": 0}

    def wait(self, _seconds: float) -> int:
        return 0

    def end(self) -> int:
        self._theirs.close()
        return 0


def collect(service: Service, orders: Sequence[Order], *, seconds: float = 60) -> list[list[Piece]]:
    """Submit all and wait for all, at most so long for each next piece; pieces by request."""
    box: Queue[tuple[int, Piece]] = Queue()
    for number, item in enumerate(orders):
        service.submit(item, lambda piece, number=number: box.put((number, piece)))
    out: list[list[Piece]] = [[] for _ in orders]
    while not all(pieces and (pieces[-1].finish or pieces[-1].error) for pieces in out):
        number, piece = box.get(timeout=seconds)
        out[number].append(piece)
    return out
