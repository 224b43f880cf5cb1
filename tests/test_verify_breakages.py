"""Every way to break a model folder that was reported or tried, and the finding that it must have.

The cases come from the format's own tests, from 39 altered copies that the reference library mostly
loads without a word, and from bug reports of other engines. Each starts from a healthy tiny folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_factory import (
    HIDDEN,
    TEMPLATE,
    VOCAB,
    edit_json,
    edit_tensors,
    read_tensors,
    safetensors_bytes,
    tokenizer_json,
    write_model,
    write_tensors,
)

from ralbuild.digests import DigestCache
from ralbuild.weights.rules import rules_by_id
from ralbuild.weights.scan import Verdict, verify_folder

pytestmark = pytest.mark.usefixtures("one_worker_a_request")

Change = Callable[[Path], Any]
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EMBEDDING, DOWN, QUERY = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
)


def verify(folder: Path) -> Verdict:
    return verify_folder(folder, DigestCache(None), 0, lambda done, total: None)


def ids(verdict: Verdict, *severities: str) -> set[str]:
    return {item.rule.id for item in verdict.findings if not severities or item.severity in severities}


def config(**changes: Any) -> Change:
    return lambda folder: edit_json(folder / "config.json", lambda c: c.update(changes))


def without(file: str, key: str) -> Change:
    return lambda folder: edit_json(folder / file, lambda c: c.pop(key))


def index(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: edit_json(folder / INDEX, change)


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: edit_json(folder / "tokenizer.json", change)


def tensors(change: Callable[[dict[str, Any]], Any], file: str = ONE) -> Change:
    return lambda folder: edit_tensors(folder / file, change)


def write(name: str, content: bytes | str) -> Change:
    data = content.encode() if isinstance(content, str) else content

    def apply(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return apply


def header(change: Callable[[dict[str, Any]], Any], *, extra: bytes = b"", pad: int | None = None) -> Change:
    """Change the header's JSON of the one weight file; its data stays, with ``extra`` behind it."""

    def apply(folder: Path) -> None:
        path = folder / ONE
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        value = json.loads(data[8 : 8 + size])
        text = change(value)
        text = json.dumps(value).encode() if not isinstance(text, bytes) else text
        text += b" " * (-len(text) % 8 if pad is None else pad)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :] + extra)

    return apply


def raw_header(text: bytes) -> Change:
    return write(ONE, struct.pack("<Q", len(text)) + text)


def swap(name: str, dtype: str, shape: list[int], data: bytes) -> Change:
    return tensors(lambda t: t.update({name: (dtype, shape, data)}))


def truncate(name: str, count: int) -> Change:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - count)


def poke(name: str, at: int, value: bytes) -> Change:
    """Overwrite bytes of a tensor."""

    def change(t: dict[str, Any]) -> None:
        dtype, shape, data = t[name]
        t[name] = (dtype, shape, data[:at] + value + data[at + len(value) :])

    return tensors(change)


def move_tensor(name: str, source: str, target: str, *, keep: bool = False) -> Change:
    def apply(folder: Path) -> None:
        item = read_tensors(folder / source)[name]
        if not keep:
            edit_tensors(folder / source, lambda t: t.pop(name))
        edit_tensors(folder / target, lambda t: t.update({name: item}))

    return apply


def untied_head(folder: Path, *, equal: bool) -> None:
    def change(t: dict[str, Any]) -> None:
        dtype, shape, data = t[EMBEDDING]
        t["lm_head.weight"] = (dtype, shape, data if equal else data[4:] + data[:4])

    edit_tensors(folder / ONE, change)


def to_bf16(folder: Path, *, swapped: bool) -> None:
    """Rewrite the weights as BF16, with the bytes in the wrong order when asked."""

    def change(t: dict[str, Any]) -> None:
        for name, (_, shape, data) in t.items():
            words = [data[at + 2 : at + 4] for at in range(0, len(data), 4)]
            t[name] = ("BF16", shape, b"".join(word[::-1] if swapped else word for word in words))

    edit_tensors(folder / ONE, change)
    edit_json(folder / "config.json", lambda c: c.update(torch_dtype="bfloat16"))


def all_of(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def bos_processor(t: dict[str, Any]) -> None:
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    t["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }


def set_fields(name: str, **fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda h: h[name].update(fields)


ZERO = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}

# --- the format: every edge case, with what the reference library does in a comment ---
FORMAT: list[tuple[str, str | None, Change]] = [
    ("duplicate tensor key", "W110", header(lambda h: json.dumps(h)[:-1].encode() + b',"model.norm.weight":' + json.dumps(h["model.norm.weight"]).encode() + b"}")),
    ("duplicate key in the metadata", "W110", header(lambda h: json.dumps(h).replace('"format": "pt"', '"format": "pt", "format": "pt"').encode())),
    ("duplicate dtype in a tensor", "W110", header(lambda h: json.dumps(h).replace('"dtype": "F32"', '"dtype": "F32", "dtype": "F32"', 1).encode())),
    ("duplicate metadata", "W110", header(lambda h: b'{"__metadata__":{},' + json.dumps(h)[1:].encode())),
    ("unknown field in a tensor", "W125", header(set_fields(EMBEDDING, note=1))),
    ("null metadata", "W113", header(lambda h: h.update(__metadata__=None))),
    ("empty metadata", "W128", header(lambda h: h.update(__metadata__={}))),
    ("metadata of another format", "W128", header(lambda h: h.update(__metadata__={"format": "np"}))),
    ("no metadata", "W128", header(lambda h: h.pop("__metadata__"))),
    ("a number in the metadata", "W112", header(lambda h: h.update(__metadata__={"n": 1}))),
    ("metadata that is a list", "W112", header(lambda h: h.update(__metadata__=[]))),
    ("overlap", "W119", header(lambda h: h.update(x={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}))),
    ("a hole", "W120", header(lambda h: h.pop("model.layers.1.mlp.up_proj.weight"))),
    ("a hole at the start", "W120", header(lambda h: h.pop(EMBEDDING))),
    ("reversed offsets", "W117", header(set_fields(EMBEDDING, data_offsets=[64, 0]))),
    ("negative offsets", "W117", header(set_fields(EMBEDDING, data_offsets=[-4, 0]))),
    ("float offsets", "W117", header(set_fields(EMBEDDING, data_offsets=[0.0, 4.0]))),
    ("offsets in exponent form", "W117", header(lambda h: json.dumps(h).replace('"data_offsets": [0,', '"data_offsets": [0e0,').encode())),
    ("three offsets", "W117", header(set_fields(EMBEDDING, data_offsets=[0, 1, 2]))),
    ("a wrong size", "W118", header(set_fields(EMBEDDING, data_offsets=[0, 12]))),
    ("trailing bytes", "W122", header(lambda h: None, extra=b"xyz")),
    ("truncated data", "W121", truncate(ONE, 100)),
    ("truncated inside the header", "W108", lambda f: os.truncate(f / ONE, 100)),
    ("zero first, then an overflow", "W116", header(lambda h: h.update(x={**ZERO, "shape": [0, 1 << 63, 1 << 63]}))),
    ("an overflow, then zero", "W116", header(lambda h: h.update(x={**ZERO, "shape": [1 << 63, 1 << 63, 0]}))),
    ("an absurd empty shape", "W116", header(lambda h: h.update(x={**ZERO, "shape": [1 << 58, 0]}))),
    ("an overflow of sane sizes", "W118", header(lambda h: h.update(x={**ZERO, "shape": [1 << 40] * 4}))),
    ("a negative size", "W116", header(set_fields(EMBEDDING, shape=[-272, -16]))),
    ("a true size", "W116", header(set_fields("model.norm.weight", shape=[True, 16]))),
    ("an empty tensor in place of one that is needed", "W310", all_of(swap("model.norm.weight", "F32", [0], b""))),
    ("data that starts at an odd byte", "W123", header(lambda h: None, pad=1)),
    ("a byte in front of the floats", "W123", tensors(lambda t: [t.update({"x": ("U8", [1], b"x")}), t.update({name: t.pop(name) for name in list(t) if name != "x"})])),
    ("an empty tensor name", "W124", header(lambda h: h.update({"": h.pop(EMBEDDING)}))),
    ("a NUL in a tensor name", "W124", header(lambda h: h.update({"../../x\0": h.pop(EMBEDDING)}))),
    ("a path for a tensor name", "W309", header(lambda h: h.update({"../../x": h.pop(EMBEDDING)}))),
    ("a lone surrogate", "W109", header(lambda h: json.dumps(h).replace("model.norm", "\\ud800.norm").encode())),
    ("a byte order mark", "W109", header(lambda h: b"\xef\xbb\xbf" + json.dumps(h).encode())),
    ("NUL padding", "W109", header(lambda h: json.dumps(h).encode() + bytes(8))),
    ("leading blanks", "W111", header(lambda h: b"        " + json.dumps(h).encode())),
    ("a list for a header", "W109", raw_header(b"[]")),
    ("null for a header", "W109", raw_header(b"null")),
    ("nested 200 deep", "W109", raw_header(b'{"a":' + b"[" * 200 + b"]" * 200 + b"}")),
    ("nested 100,000 deep", "W109", raw_header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    ("NaN in the header", "W109", raw_header(b'{"a":NaN}')),
    ("not UTF-8", "W109", raw_header(b'{"\xff":1}')),
    ("not JSON", "W109", raw_header(b"{..")),
    ("a header above 100,000,000 bytes", "W108", write(ONE, struct.pack("<Q", 100_000_001) + b"{")),
    ("an endless header", "W108", write(ONE, struct.pack("<Q", (1 << 64) - 1) + b"{}")),
    ("an unknown dtype", "W115", header(set_fields(EMBEDDING, dtype="F31"))),
    ("a dtype that is no text", "W115", header(set_fields(EMBEDDING, dtype=["F32"]))),
    ("a tensor without dtype", "W114", header(lambda h: h[EMBEDDING].pop("dtype"))),
    ("a tensor that is a number", "W114", header(lambda h: h.update({EMBEDDING: 7}))),
    ("six-bit floats", "W126", swap("x", "F6_E2M3", [4], bytes(3))),
    ("four-bit floats of odd width", "W126", swap("x", "F4", [2, 3], bytes(3))),
    ("git-lfs pointer", "W101", write(ONE, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")),
    ("git-lfs pointer for the tokenizer", "W101", write("tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")),
    ("HTML page", "W102", write(ONE, "<!DOCTYPE html><html>not found</html>")),
    ("HTML page for the config", "W102", write("config.json", "\n<html>not found</html>")),
    ("XML page", "W102", write(ONE, '<?xml version="1.0"?><Error>AccessDenied</Error>')),
    ("zip archive", "W103", write(ONE, b"PK\x03\x04" + bytes(100))),
    ("pickle", "W104", write(ONE, b"\x80\x02}q\x00." + bytes(100))),
    ("pickle of protocol 5", "W104", write(ONE, b"\x80\x05\x95\x10\x00\x00\x00\x00\x00\x00\x00" + bytes(64))),
    ("GGUF", "W105", write(ONE, b"GGUF\x03\x00\x00\x00" + bytes(64))),
    ("empty file", "W106", write(ONE, b"")),
    ("five bytes", "W107", write(ONE, b"abcde")),
    ("gzip", "W107", write(ONE, b"\x1f\x8b\x08\x00" + bytes(64))),
]  # fmt: skip

# --- folders: what the reference library mostly loads without raising ---
ALTERED: list[tuple[str, str | None, Change]] = [
    ("a missing tensor", "W308", tensors(lambda t: t.pop(DOWN))),
    ("a tensor of layer 9", "W312", tensors(lambda t: t.update({"model.layers.9.mlp.up_proj.weight": t[DOWN]}))),
    ("another shape", "W310", swap(DOWN, "F32", [HIDDEN, HIDDEN], struct.pack("<256f", *range(256)))),
    ("a transposed matrix", "W310", tensors(lambda t: t.update({DOWN: ("F32", t[DOWN][1][::-1], t[DOWN][2])}))),
    ("NaN in the embedding", "W401", poke(EMBEDDING, 40, struct.pack("<f", float("nan")))),
    ("negative NaN", "W401", poke(EMBEDDING, 40, b"\x01\x00\x80\xff")),
    ("infinity", "W402", poke(EMBEDDING, 40, struct.pack("<f", float("-inf")))),
    ("an all-zero matrix", "W404", tensors(lambda t: t.update({DOWN: ("F32", t[DOWN][1], bytes(len(t[DOWN][2])))}))),
    ("an all minus zero matrix", "W404", tensors(lambda t: t.update({DOWN: ("F32", t[DOWN][1], b"\0\0\0\x80" * (len(t[DOWN][2]) // 4))}))),
    ("an all-zero matrix of both signs", "W404", swap(DOWN, "F32", [HIDDEN, 2 * HIDDEN], (bytes(4) + b"\0\0\0\x80") * (HIDDEN * HIDDEN))),
    ("an all-zero matrix of eight-bit floats with one zero", "W404", swap(DOWN, "F8_E4M3FNUZ", [HIDDEN, 2 * HIDDEN], bytes(2 * HIDDEN * HIDDEN))),
    ("a constant matrix", "W405", tensors(lambda t: t.update({DOWN: ("F32", t[DOWN][1], b"\0\0\x80\x3f" * (len(t[DOWN][2]) // 4))}))),
    ("an all-zero norm", "W404", tensors(lambda t: t.update({"model.norm.weight": ("F32", [HIDDEN], bytes(4 * HIDDEN))}))),
    ("one flipped exponent bit", "W403", lambda f: edit_tensors(f / ONE, lambda t: t.update({DOWN: ("F32", t[DOWN][1], t[DOWN][2][:3] + bytes([t[DOWN][2][3] | 0x40]) + t[DOWN][2][4:])}))),
    ("bytes in the wrong order", "W403", lambda f: to_bf16(f, swapped=True)),
    ("not tied, and no head", "W314", config(tie_word_embeddings=False)),
    ("tied, and another head", "W313", lambda f: untied_head(f, equal=False)),
    ("tied, and an equal head", "W315", lambda f: untied_head(f, equal=True)),
    ("tie flag absent", "W314", without("config.json", "tie_word_embeddings")),
    ("too few layers in the config", "W312", config(num_hidden_layers=1)),
    ("too many layers in the config", "W311", config(num_hidden_layers=3)),
    ("other key-value heads", "W310", config(num_key_value_heads=1)),
    ("heads that do not divide", "W307", config(num_key_value_heads=3, num_attention_heads=4)),
    ("an odd head size", "W307", config(head_dim=3)),
    ("hidden size that heads do not divide", "W307", config(num_attention_heads=3, num_key_value_heads=3)),
    ("no rotary base", "W317", without("config.json", "rope_theta")),
    ("rotary base in version 5 words", None, all_of(without("config.json", "rope_theta"), config(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}))),
    ("both dialects, agreeing", None, config(rope_parameters={"rope_theta": 10000.0})),
    ("both dialects, disagreeing", "W316", config(rope_parameters={"rope_theta": 500000.0})),
    ("rotary scaling that disagrees", "W316", config(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0})),
    ("rotary base of zero", "W324", config(rope_theta=0)),
    ("rotary base of thousands of digits", "W324", config(rope_theta=int("9" * 4000))),
    ("rotary base of thousands of digits, by layer", "W324", config(rope_parameters={"full_attention": {"rope_theta": int("9" * 4000)}})),
    ("rotary scaling of an unheard kind", "W324", config(rope_scaling={"rope_type": "unheard", "factor": 2.0})),
    ("rotary scaling without a factor", "W324", config(rope_scaling={"type": "linear"})),
    ("rotary scaling that is text", "W324", config(rope_scaling="linear")),
    ("rotary parameters that are a list", "W324", config(rope_parameters=[1])),
    ("rotary scaling of Llama 3", None, config(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})),
    ("no rotary scaling", None, config(rope_scaling=None)),
    ("a tie flag that is text", "W325", config(tie_word_embeddings="false")),
    ("a bias flag that is text", "W325", config(attention_bias="false")),
    ("an epsilon that is text", "W325", config(rms_norm_eps="1e-5")),
    ("an activation that is a list", "W325", config(hidden_act=["silu"])),
    ("a dtype that torch lacks", "W325", config(torch_dtype="float31")),
    ("a dtype that is a number", "W325", config(torch_dtype=5)),
    ("sizes whose product has more digits than Python prints", "W306", config(head_dim=10**4000, intermediate_size=10**4000)),
    ("positions of thousands of digits", "W306", config(max_position_embeddings=10**4000)),
    ("a layer whose number has thousands of digits", "W309", tensors(lambda t: t.update({f"model.layers.{'9' * 5000}.mlp.up_proj.weight": t[DOWN]}))),
    ("a matrix of integers", "W326", swap(QUERY, "I32", [HIDDEN, HIDDEN], bytes(range(256)) * 4)),
    ("a matrix of bytes", "W326", swap(QUERY, "U8", [HIDDEN, HIDDEN], bytes(range(256)))),
    ("a norm of integers", "W326", swap("model.norm.weight", "I64", [HIDDEN], bytes(range(8 * HIDDEN)))),
    ("a matrix of four-bit floats", "W326", swap(QUERY, "F4", [HIDDEN, HIDDEN], bytes(range(128)))),
    ("weights in double precision", None, tensors(lambda t: t.update({name: ("F64", shape, struct.pack(f"<{len(data) // 4}d", *struct.unpack(f"<{len(data) // 4}f", data))) for name, (_, shape, data) in t.items()}))),
    ("vocabulary above the rows", "W304", config(vocab_size=VOCAB + 8)),
    ("vocabulary below the tokenizer", "W507", config(vocab_size=100)),
    ("vocabulary that is text", "W304", config(vocab_size="272")),
    ("a wrong epsilon", "W321", config(rms_norm_eps=1e-2)),
    ("a wrong activation", "W322", config(hidden_act="gelu")),
    ("architectures of another family", "W303", config(architectures=["MistralForCausalLM"])),
    ("a model type of another family", "W303", config(model_type="mistral")),
    ("a class without a head", "W303", config(architectures=["LlamaModel"])),
    ("no model type", "W301", without("config.json", "model_type")),
    ("no architectures", "W302", without("config.json", "architectures")),
    ("an unknown family", "W305", config(model_type="newmodel", architectures=["NewForCausalLM"])),
    ("no dtype", "W318", without("config.json", "torch_dtype")),
    ("dtypes that disagree", "W316", config(dtype="bfloat16")),
    ("a null torch_dtype", "W323", config(dtype="float32", torch_dtype=None)),
    ("a dtype that the weights do not have", "W319", config(torch_dtype="bfloat16")),
    ("no number of layers", "W306", without("config.json", "num_hidden_layers")),
    ("a million layers", "W306", config(num_hidden_layers=1_000_000)),
    ("layers as text", "W306", config(num_hidden_layers="2")),
    ("mixed element types", "W320", lambda f: edit_tensors(f / ONE, lambda t: t.update({DOWN: ("F16", t[DOWN][1], b"\x00\x3c\x01\x3c" * 256)}))),
    ("old rotary buffers", None, tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [2], bytes(8))}))),
    ("a config that is a git repository's list", "W221", write("config.json", "[]")),
    ("a config with a duplicate key", "W221", write("config.json", '{"model_type":"llama","model_type":"gemma"}')),
    ("a config with NaN", "W221", write("config.json", '{"rope_theta": NaN}')),
    ("a config of 2 MB", "W219", write("config.json", "{" + " " * (2 << 20) + "}")),
    ("no config", "W203", lambda f: (f / "config.json").unlink()),
    ("no tokenizer", "W204", lambda f: (f / "tokenizer.json").unlink()),
    ("a SentencePiece model alone", "W204", lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model")),
    ("a stray .bin", "W217", write("pytorch_model.bin", b"PK\x03\x04")),
    ("a stray GGUF", "W217", write("model.Q4.gguf", b"GGUF")),
    ("consolidated weights beside", "W217", write("consolidated.safetensors", b"x")),
    ("an unfinished download", "W218", write("model.safetensors.incomplete", b"x")),
    ("a link to a file of the host", "W201", lambda f: (f / "notes.txt").symlink_to("/etc/passwd")),
    ("a link for the config", "W201", lambda f: ((f / "config.json").unlink(), (f / "config.json").symlink_to("/etc/hostname"))),
    ("a pipe", "W202", lambda f: os.mkfifo(f / "pipe")),
    ("a pipe for the config", "W202", lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json"))),
    ("a pipe for the weights", "W202", lambda f: ((f / ONE).unlink(), os.mkfifo(f / ONE))),
    ("a folder for the weights", "W205", lambda f: ((f / ONE).unlink(), (f / ONE).mkdir())),
    ("weights renamed to .bin", "W205", lambda f: (f / ONE).rename(f / "pytorch_model.bin")),
    ("an empty folder", "W205", lambda f: [path.unlink() for path in f.iterdir()]),
    ("weights of mode 0600", None, lambda f: (f / ONE).chmod(0o600)),
]  # fmt: skip

SHARDED: list[tuple[str, str | None, Change]] = [
    ("a missing shard", "W207", lambda f: (f / SECOND).unlink()),
    ("the index omits a tensor", "W211", index(lambda i: i["weight_map"].pop(QUERY))),
    ("the index names the wrong shard", "W210", index(lambda i: i["weight_map"].update({QUERY: FIRST if i["weight_map"][QUERY] == SECOND else SECOND}))),
    ("the index knows a tensor that is nowhere", "W212", index(lambda i: i["weight_map"].update({"ghost": FIRST}))),
    ("a wrong total size", "W216", index(lambda i: i["metadata"].update(total_size=1))),
    ("no metadata in the index", "W216", index(lambda i: i.pop("metadata"))),
    ("a path out of the folder", "W208", index(lambda i: i["weight_map"].update({QUERY: "../../etc/passwd"}))),
    ("an absolute path", "W208", index(lambda i: i["weight_map"].update({QUERY: "/etc/x.safetensors"}))),
    ("a number for a shard", "W208", index(lambda i: i["weight_map"].update({QUERY: 5}))),
    ("an empty map", "W209", index(lambda i: i.update(weight_map={}))),
    ("an index that is a list", "W221", write(INDEX, "[]")),
    ("one file and an index", "W206", lambda f: shutil.copy(f / FIRST, f / ONE)),
    ("shards without an index", "W205", lambda f: (f / INDEX).unlink()),
    ("one tensor in two shards", "W213", move_tensor(EMBEDDING, FIRST, SECOND, keep=True)),
    ("a tensor moved to the other shard", "W210", move_tensor(EMBEDDING, FIRST, SECOND)),
    ("a numbered shard that the index does not name", "W214", lambda f: shutil.copy(f / FIRST, f / "model-00003-of-00002.safetensors")),
    ("shards of two versions", "W215", lambda f: ((f / SECOND).rename(f / "model-00002-of-00003.safetensors"), edit_json(f / INDEX, lambda i: i["weight_map"].update({k: "model-00002-of-00003.safetensors" for k, v in i["weight_map"].items() if v == SECOND})))),
    ("a truncated shard", "W121", truncate(SECOND, 64)),
    ("a corrupt shard header", "W109", lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:8] + b"X" + (f / SECOND).read_bytes()[9:])),
    ("a stale index that names shards long gone", "W207", index(lambda i: i["weight_map"].update({f"t{n}": f"model-{n:05}-of-00030.safetensors" for n in range(3, 18)}))),
    ("a shard that is an LFS pointer", "W101", write(SECOND, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")),
    ("consolidated weights beside shards", "W217", write("consolidated.safetensors", b"x")),
]  # fmt: skip

WORDS: list[tuple[str, str | None, Change]] = [
    ("truncation baked in", "W509", tokenizer(lambda t: t.update(truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}))),
    ("padding baked in", "W510", tokenizer(lambda t: t.update(padding={"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}))),
    ("an end token that is no token", "W511", write("tokenizer_config.json", '{"eos_token": "<|nothing|>"}')),
    ("an end token as an object", None, write("tokenizer_config.json", '{"eos_token": {"content": "<|im_end|>"}}')),
    ("an end token that is a number", "W325", write("tokenizer_config.json", '{"eos_token": 2}')),
    ("an end id that is text", "W325", config(eos_token_id="2")),
    ("an end id that is true", "W325", config(eos_token_id=True)),
    ("a list of end ids with text in it", "W325", write("generation_config.json", '{"eos_token_id": [2, "0"]}')),
    ("an additional special token that is no token", "W511", write("tokenizer_config.json", '{"eos_token": "<|im_end|>", "additional_special_tokens": ["<|nothing|>"]}')),
    ("an extra special token that is no token", "W511", write("tokenizer_config.json", '{"eos_token": "<|im_end|>", "extra_special_tokens": {"image_token": "<|image|>"}}')),
    ("an additional special token in the map alone", "W511", write("special_tokens_map.json", '{"additional_special_tokens": [{"content": "<|nothing|>"}]}')),
    ("additional special tokens that are tokens", None, write("tokenizer_config.json", '{"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}')),
    ("an added token that the tokenizer lacks", "W511", write("tokenizer_config.json", '{"eos_token": "<|im_end|>", "added_tokens_decoder": {"999": {"content": "<|new|>"}}}')),
    ("an added token of another id in the tokenizer's config", "W504", write("tokenizer_config.json", '{"eos_token": "<|im_end|>", "added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}')),
    ("added tokens as in the tokenizer", None, write("tokenizer_config.json", '{"eos_token": "<|im_end|>", "added_tokens_decoder": {"2": {"content": "<|im_end|>"}}}')),
    ("merges dropped at random", "W524", tokenizer(lambda t: t["model"].update(dropout=0.1))),
    ("a dropout of zero", None, tokenizer(lambda t: t["model"].update(dropout=0.0))),
    ("an id beyond the vocabulary in front of every text", "W515", tokenizer(lambda t: t.update(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [99999], "tokens": ["<|im_end|>"]}}}))),
    ("no end token anywhere", "W512", all_of(without("config.json", "eos_token_id"), write("generation_config.json", "{}"), write("tokenizer_config.json", "{}"))),
    ("the end token only in the generation config", None, all_of(without("config.json", "eos_token_id"), write("tokenizer_config.json", "{}"))),
    ("an end token outside the vocabulary", "W513", config(eos_token_id=9999)),
    ("end tokens that differ", "W518", config(eos_token_id=2)),
    ("a beginning token of another id", "W519", write("tokenizer_config.json", '{"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}')),
    ("a padding id outside the embedding", "W520", config(pad_token_id=VOCAB)),
    ("a padding id of -1", None, config(pad_token_id=-1)),
    ("no tokenizer config", "W521", lambda f: (f / "tokenizer_config.json").unlink()),
    ("two words of one id", "W503", tokenizer(lambda t: t["model"]["vocab"].update(zz=5))),
    ("two added tokens of one id", "W503", tokenizer(lambda t: t["added_tokens"].append({**t["added_tokens"][0], "content": "<|other|>"}))),
    ("an added token whose id is another's", "W504", tokenizer(lambda t: t["added_tokens"][0].update(id=40))),
    ("swapped ids of special tokens", "W504", tokenizer(lambda t: (t["added_tokens"][0].update(id=1), t["added_tokens"][1].update(id=0)))),
    ("an added token without an id", "W501", tokenizer(lambda t: t["added_tokens"][0].pop("id"))),
    ("a negative id", "W501", tokenizer(lambda t: t["model"]["vocab"].update(zz=-1))),
    ("an id of a billion", "W501", tokenizer(lambda t: t["model"]["vocab"].update(zz=10**9))),
    ("ids with a hole", "W505", tokenizer(lambda t: t["model"]["vocab"].update(zz=268))),
    ("more ids than rows", "W507", tokenizer(lambda t: t["added_tokens"].append({**t["added_tokens"][0], "id": VOCAB, "content": "<|new|>"}))),
    ("spare rows", "W517", lambda f: None),
    ("no merges", "W506", tokenizer(lambda t: (t["model"].update(merges=[]), t["model"]["vocab"].update({f"{chr(97 + n % 26)}{chr(97 + n // 26)}": 264 + n for n in range(80)})))),
    ("a merge of an unknown word", "W506", tokenizer(lambda t: t["model"]["merges"].append("q x"))),
    ("a merge that is no pair", "W506", tokenizer(lambda t: t["model"]["merges"].append("qx"))),
    ("no pre-tokenizer", "W516", tokenizer(lambda t: t.update(pre_tokenizer=None))),
    ("a vocabulary without the letter a", "W508", tokenizer(lambda t: t["model"]["vocab"].update({"<gone>": t["model"]["vocab"].pop("a")}))),
    ("a WordPiece tokenizer", "W502", tokenizer(lambda t: t.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}, pre_tokenizer=None))),
    ("no vocabulary", "W501", tokenizer(lambda t: t["model"].pop("vocab"))),
    ("a vocabulary of text", "W501", tokenizer(lambda t: t["model"].update(vocab={"a": "b"}))),
    ("a decoder that says otherwise", "W515", tokenizer(lambda t: t.update(decoder={"type": "Sequence", "decoders": [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}, {"type": "Replace", "pattern": {"String": "o"}, "content": "0"}]}))),
    ("what the library cannot read", "W514", tokenizer(lambda t: t["model"].update(type="Unheard"))),
]  # fmt: skip


def chat(text: str, **config_changes: Any) -> Change:
    return all_of(
        write("chat_template.jinja", text),
        lambda f: edit_json(f / "tokenizer_config.json", lambda c: c.update(config_changes)),
    )


START = {"bos_token": "<|im_start|>"}
PLAIN = "{% for m in messages %}{{ m.content }} {% endfor %}"
TEMPLATES: list[tuple[str, str | None, Change]] = [
    ("no template", "W601", lambda f: (f / "chat_template.jinja").unlink()),
    ("only in the tokenizer's config", None, lambda f: ((f / "chat_template.jinja").unlink(), edit_json(f / "tokenizer_config.json", lambda c: c.update(chat_template=TEMPLATE)))),
    ("a list of named ones", None, lambda f: ((f / "chat_template.jinja").unlink(), edit_json(f / "tokenizer_config.json", lambda c: c.update(chat_template=[{"name": "default", "template": TEMPLATE}])))),
    ("two that differ", "W602", lambda f: edit_json(f / "tokenizer_config.json", lambda c: c.update(chat_template="x"))),
    ("a syntax error", "W603", chat("{% for m in %}")),
    ("an error while rendering", "W603", chat("{{ raise_exception('no') }}")),
    ("more loops in loops than Python compiles", "W603", chat("{% for a in [1] %}" * 25 + "{% endfor %}" * 25 + TEMPLATE)),
    ("more conditions in conditions than Python compiles", "W603", chat("{% if 1 %}" * 200 + "{% endif %}" * 200 + TEMPLATE)),
    ("an address in memory", "W608", chat("{{ raise_exception }}" + TEMPLATE)),
    ("a division by zero", "W603", chat("{{ 1 // 0 }}")),
    ("the user's message is left out", "W603", chat("hello")),
    ("not UTF-8", "W603", write("chat_template.jinja", b"\xff\xfe")),
    ("Python's innards", "W604", chat("{{ ''.__class__.__mro__[1].__subclasses__() }}")),
    ("globals of a helper", "W604", chat(PLAIN + "{{ raise_exception.__globals__['os'].system('true') }}")),
    ("an endless loop", "W605", chat("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")),
    ("too much memory", "W605", chat("{{ 'a' * 2000000000 }}")),
    ("too much text", "W605", chat(PLAIN + "{{ 'a' * 2000000 }}")),
    ("twice the beginning", "W606", chat("{{ bos_token }}{{ bos_token }}" + TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", ""), **START)),
    ("beginning written by template and tokenizer", "W610", all_of(chat("{{ bos_token }}" + TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", ""), **START), tokenizer(bos_processor))),
    ("no generation prompt", "W607", chat(TEMPLATE.partition("{% if add")[0])),
    ("a template without roles needs none", None, chat("{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}")),
    ("today's date", "W608", chat("{{ strftime_now('%Y-%m-%d') }}" + TEMPLATE)),
    ("chance", "W608", chat("{{ [1, 2, 3] | random }}" + TEMPLATE)),
    ("a marker that is no token", "W609", chat(TEMPLATE.replace("im_start", "im_begin"))),
    ("no system role", "W611", chat("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE)),
    ("loop controls and generation tags", None, chat("{% generation %}{% endgeneration %}" + TEMPLATE.replace("{% endfor %}", "{% continue %}{% endfor %}"))),
]  # fmt: skip

CODE: list[tuple[str, str | None, Change]] = [
    ("auto_map", "W702", config(auto_map={"AutoModel": "modeling.Model"})),
    ("auto_map of the tokenizer", "W702", lambda f: edit_json(f / "tokenizer_config.json", lambda c: c.update(auto_map={"AutoTokenizer": ["a.B", None]}))),
    ("auto_map in the generation config", "W702", write("generation_config.json", '{"eos_token_id": 2, "auto_map": {"a": "b"}}')),
    ("auto_map deep inside", "W702", config(text_config={"inner": [{"auto_map": {"a": "b"}}]})),
    ("custom_pipelines", "W702", config(custom_pipelines={"x": {"impl": "a.B"}})),
    ("trust_remote_code", "W702", config(trust_remote_code=True)),
    ("trust_remote_code that is off", None, config(trust_remote_code=False)),
    ("transformers_weights", "W702", config(transformers_weights="other.safetensors")),
    ("internal attention code", "W702", config(_attn_implementation_internal="org/kernel")),
    ("attention from a repository", "W702", config(attn_implementation="org/kernel")),
    ("attention from a repository, by part", "W702", config(attn_implementation={"text": "kernels-community/flash"})),
    ("attention by a plain name", None, config(attn_implementation="sdpa")),
    ("experts from a repository", "W702", config(experts_implementation="org/kernel:fn")),
    ("a Python file", "W701", write("modeling_llama.py", "boom")),
    ("a compiled library", "W701", write("kernel.so", b"\x7fELF")),
    ("a Python file in a folder", "W701", write("custom/deep/modeling_llama.py", "boom")),
    ("a Python file of git's own", None, write(".git/hooks/update.py", "boom")),
    ("other files in a folder", None, write("onnx/model.onnx", "x")),
    ("GPTQ in the config, but plain weights", "W708", config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})),
    ("AWQ in the config, but plain weights", "W708", config(quantization_config={"quant_method": "awq", "bits": 4})),
    ("FP8 in the config, but plain weights", "W708", config(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})),
    ("compressed-tensors", "W703", config(quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})),
    ("bitsandbytes", "W703", config(quantization_config={"quant_method": "bitsandbytes"})),
    ("an old GPTQ file beside plain weights", "W708", write("quantize_config.json", '{"bits": 4}')),
    ("MXFP4", "W703", config(quantization_config={"quant_method": "mxfp4"})),
    ("GPTQ of five bits", "W703", config(quantization_config={"quant_method": "gptq", "bits": 5})),
    ("AWQ of another version", "W703", config(quantization_config={"quant_method": "awq", "bits": 4, "version": "gemv"})),
    ("a quantisation that is no object", "W703", config(quantization_config="4bit")),
    ("ModelOpt", "W703", write("hf_quant_config.json", "{}")),
    ("packed weights that the config hides", "W703", tensors(lambda t: t.update({"model.layers.0.mlp.down_proj.qweight": ("I32", [2, 2], bytes(16))}))),
    ("eight-bit weights without a scale", "W705", tensors(lambda t: t.update({DOWN: ("F8_E4M3", t[DOWN][1], bytes(range(64)) * 8)}))),
    ("an adapter", "W704", write("adapter_config.json", '{"base_model_name_or_path": "x", "r": 8}')),
    ("adapter tensors", "W704", tensors(lambda t: t.update({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ("F32", [2, 2], struct.pack("<4f", 1, 2, 3, 4))}))),
]  # fmt: skip

REPORTS: dict[int, tuple[str, ...]] = {
    1: ("git-lfs pointer", "a shard that is an LFS pointer"),
    2: ("a corrupt shard header",),
    3: ("truncated data", "a truncated shard"),
    4: ("a missing shard",),
    5: ("an empty folder", "a missing shard"),
    6: ("a stale index that names shards long gone",),
    7: ("one file and an index",),
    8: ("the index omits a tensor",),
    9: ("one tensor in two shards",),
    10: ("consolidated weights beside shards", "consolidated weights beside"),
    11: ("the index knows a tensor that is nowhere",),
    12: ("an all-zero matrix",),
    13: ("a truncated shard",),
    14: ("trailing bytes", "truncated data"),
    15: ("weights of mode 0600",),
    16: ("data that starts at an odd byte", "a byte in front of the floats"),
    17: ("empty metadata", "no metadata"),
    18: ("not tied, and no head", "tie flag absent"),
    19: ("not tied, and no head",),
    20: ("tied, and another head",),
    21: ("tied, and an equal head",),
    22: ("rotary base in version 5 words", "both dialects, disagreeing", "no rotary base"),
    25: ("a null torch_dtype", "no dtype"),
    26: ("spare rows",),
    27: ("more ids than rows",),
    28: ("two added tokens of one id",),
    29: ("no end token anywhere", "the end token only in the generation config", "end tokens that differ"),
    30: ("no template", "only in the tokenizer's config"),
}
"""Bug reports of other engines, by their number in our notes; 23 and 24, of head sizes, are whole families."""

ONE_FILE = [*FORMAT, *ALTERED, *WORDS, *TEMPLATES, *CODE]


def check(expected: str | None, verdict: Verdict) -> None:
    if expected is None:
        assert ids(verdict, "error", "warning") == set(), verdict.findings
        return
    assert expected in ids(verdict), verdict.findings
    assert verdict.failed == bool(ids(verdict, "error"))
    if rules_by_id()[expected].severity == "error":
        assert verdict.model is None


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("healthy") / "model")


@pytest.mark.parametrize(("what", "expected", "change"), ONE_FILE, ids=[case[0] for case in ONE_FILE])
def test_each_breakage_has_its_finding(
    what: str, expected: str | None, change: Change, healthy: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(healthy, tmp_path / "model"))
    change(folder)
    check(expected, verify(folder))


@pytest.mark.parametrize(("what", "expected", "change"), SHARDED, ids=[case[0] for case in SHARDED])
def test_each_breakage_of_shards_has_its_finding(
    what: str, expected: str | None, change: Change, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", shards=2)
    change(folder)
    check(expected, verify(folder))


def test_every_bug_report_has_its_case() -> None:
    names = {case[0] for case in (*ONE_FILE, *SHARDED)}
    assert {name for cases in REPORTS.values() for name in cases} <= names
    assert set(range(1, 31)) - set(REPORTS) == {23, 24}


def test_the_healthy_folders_have_nothing_above_info(healthy: Path, tmp_path: Path) -> None:
    check(None, verify(healthy))
    check(None, verify(write_model(tmp_path / "model", shards=3)))
    bf16 = Path(shutil.copytree(healthy, tmp_path / "bf16"))
    to_bf16(bf16, swapped=False)
    check(None, verify(bf16))


def test_all_findings_of_one_run_come_worst_first(healthy: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(healthy, tmp_path / "model"))
    all_of(
        config(num_hidden_layers=3, rms_norm_eps=1e-2),
        poke(EMBEDDING, 40, struct.pack("<f", float("nan"))),
        write("modeling.py", "boom"),
        write("pytorch_model.bin", b""),
        tokenizer(lambda t: t.update(truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0})),
    )(folder)  # fmt: skip
    verdict = verify(folder)
    assert {"W311", "W321", "W401", "W701", "W217", "W509"} <= ids(verdict)
    ranks = ["error", "warning", "info"]
    order = [ranks.index(item.severity) for item in verdict.findings]
    assert order == sorted(order)


def test_nothing_of_the_folder_is_run(tmp_path: Path) -> None:
    import pickle

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "pickle-ran",))

    folder = write_model(tmp_path / "model")
    code = f"from pathlib import Path; Path({str(tmp_path)!r}, 'code-ran').touch()"
    for name in (
        "modeling_llama.py",
        "conftest.py",
        "sitecustomize.py",
        "jinja2.py",
        "numpy.py",
        "tokenizers.py",
    ):
        (folder / name).write_text(code)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    (folder / "consolidated.safetensors").write_bytes(pickle.dumps(Payload()))
    escape = "{{ cycler.__init__.__globals__.os.system('touch %s') }}" % (tmp_path / "template-ran")
    (folder / "chat_template.jinja").write_text(escape)
    edit_json(folder / "config.json", lambda c: c.update(auto_map={"AutoConfig": "modeling_llama.Config"}))
    before = os.getcwd()
    os.chdir(folder)
    try:
        verdict = verify(folder)
    finally:
        os.chdir(before)
    assert {"W701", "W702", "W604"} <= ids(verdict)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def cache_layout(root: Path, model: Path) -> Path:
    """Lay a folder out as the Hugging Face cache does; return the snapshot."""
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd")
    (root / "blobs").mkdir()
    for path in model.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(root / "blobs" / digest)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    return snapshot


@pytest.mark.parametrize(
    ("expected", "change"),
    [
        (None, lambda root, snap: None),
        (None, lambda root, snap: (root / "refs" / "main").unlink()),
        ("W222", lambda root, snap: (root / "refs" / "main").write_text("deadbeef")),
        ("W222", lambda root, snap: (root / "refs" / "main").write_text("../../x")),
        ("W201", lambda root, snap: ((snap / "config.json").unlink(), (snap / "config.json").symlink_to("../../../other"))),
        ("W201", lambda root, snap: ((snap / ONE).unlink(), (snap / ONE).symlink_to("../../blobs/dangling"))),
        ("W201", lambda root, snap: (snap / "x").symlink_to(root / "blobs" / next((root / "blobs").iterdir()).name)),
        ("W223", lambda root, snap: (snap / ONE).resolve().write_bytes(safetensors_bytes({**read_tensors(snap / ONE), "model.norm.weight": ("F32", [HIDDEN], struct.pack("<16f", *[2.0] * 16))}, {"format": "pt"}))),
    ],
)  # fmt: skip
def test_the_hugging_face_cache(expected: str | None, change: Any, tmp_path: Path) -> None:
    root = tmp_path / "models--org--name"
    snapshot = cache_layout(root, write_model(tmp_path / "plain"))
    change(root, snapshot)
    check(expected, verify(root))
    if expected not in ("W222",):
        check(expected, verify(snapshot))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64", "F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ"])
def test_a_nan_is_found_in_every_float_type(dtype: str, healthy: Path, tmp_path: Path) -> None:
    nan = {"F32": b"\0\0\xc0\x7f", "F16": b"\0\x7e", "BF16": b"\xc0\x7f", "F64": b"\0" * 6 + b"\xf8\x7f", "F8_E5M2": b"\x7e", "F8_E4M3": b"\xff", "F8_E4M3FNUZ": b"\x80"}[dtype]  # fmt: skip
    count = HIDDEN * 2 * HIDDEN
    body = bytes([1, 2] * (count * len(nan) // 2))
    folder = Path(shutil.copytree(healthy, tmp_path / "model"))
    path = folder / ONE
    items = read_tensors(path)
    items[DOWN] = (dtype, [HIDDEN, 2 * HIDDEN], body[: 100 * len(nan)] + nan + body[101 * len(nan) :])
    write_tensors(path, items)
    found = [item for item in verify(folder).findings if item.rule.id == "W401"]
    assert [item.tensor for item in found] == [DOWN]
    assert found[0].message == "1 of 512 elements, the first at [3, 4]"


def test_the_tokenizer_has_no_finding_but_spare_rows(healthy: Path) -> None:
    assert len(tokenizer_json()["model"]["vocab"]) < VOCAB
    assert ids(verify(healthy)) <= {"W517", "W518", "W224"}
