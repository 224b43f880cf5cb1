"""Which models our own decoder runs, and what it has to know of them: read from ``config.json`` alone.

The llama-shaped families differ in a few switches. A configuration that says anything else than what
is understood here has no spec: on a CPU it runs on transformers' code, which is slower and right; no
image for GPUs is built of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Family:
    """How one family differs from llama.

    Attributes:
        qkv_bias: key of the configuration that says whether q, k and v have biases, or the fixed answer.
        head_dim: what the configuration means when it does not say.
        window: sliding window when it does not say; ``layers`` has its own rule (qwen).
        norm_offset: the norms' weights are stored less one, and applied before rounding.
    """

    qkv_bias: str | bool = False
    out_bias: str | bool = False
    mlp_bias: str | bool = False
    head_dim: int | None = None
    window: int | None = None
    window_by_layer: bool = False
    qk_norm: bool = False
    norm_offset: bool = False
    scaled_embedding: bool = False
    tied: bool = False
    fused: bool = False
    eps: float = 1e-6


_FAMILIES = {
    "llama": _Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": _Family(window=4096),
    "phi3": _Family(fused=True, eps=1e-5),
    "qwen2": _Family(qkv_bias=True, window=4096, window_by_layer=True),
    "qwen3": _Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        head_dim=128,
        window=4096,
        window_by_layer=True,
        qk_norm=True,
    ),
    "gemma": _Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        head_dim=256,
        norm_offset=True,
        scaled_embedding=True,
        tied=True,
    ),
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_READ = {
    *_SIZES,
    *("attention_bias", "head_dim", "hidden_act", "layer_types", "max_window_layers", "mlp_bias"),
    *("partial_rotary_factor", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
    *("sliding_window", "tie_word_embeddings", "use_bidirectional_attention", "use_sliding_window"),
}
_INERT = {
    *("_model_name_or_path", "_name_or_path", "architectures", "attention_dropout", "auto_map"),
    *("bos_token_id", "dtype"),
    *("embd_pdrop", "eos_token_id", "initializer_range", "is_llama_config", "max_position_embeddings"),
    *("model_type", "original_max_position_embeddings", "pad_token_id", "pretraining_tp", "resid_pdrop"),
    *("rope_interleaved", "torch_dtype", "transformers_version", "unk_token_id", "use_cache"),
}
"""Keys that change nothing when text is generated. (``rope_interleaved`` is not read by transformers.)"""
_ACTIVATIONS = ("gelu_pytorch_tanh", "silu")
_ROW_STEP = 64
"""Rows have a multiple of so many positions: attention wants its mask aligned."""
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: base, and Llama 3's scaling (factor, low, high, old length) when there is one."""

    theta: float
    llama3: tuple[float, float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A llama-shaped decoder.

    Attributes:
        heads, kv_heads, dim: query heads, key/value heads, elements of a head.
        windows: sliding window of each layer, or None to see everything.
        fused: the files hold q, k, v as one matrix, and gate and up as one.
        activation: ``silu`` or ``gelu_pytorch_tanh``.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    activation: str
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norm_offset: bool
    scaled_embedding: bool
    fused: bool

    def cache_bytes(self, texts: int, positions: int, item: int) -> int:
        """Return what keys and values of so many texts take on a GPU, with ``item`` bytes an element."""
        return texts * row_positions(positions) * 2 * self.layers * self.kv_heads * self.dim * item


def row_positions(positions: int) -> int:
    """Return the positions of a row of the GPU's cache: those of a text, and one for steps of idle slots."""
    return -(-(positions + 1) // _ROW_STEP) * _ROW_STEP


def read_spec(plain: Mapping[str, Any]) -> DecoderSpec | str:
    """Return the spec of a parsed ``config.json``, or in words why our decoder does not run it."""
    family = _FAMILIES.get(str(plain.get("model_type")))
    if family is None:
        return f"no decoder for {plain.get('model_type')!r}"
    unknown = sorted(
        key for key in plain if key not in _READ and key not in _INERT and "implementation" not in key
    )
    if unknown:
        return f"unknown key {unknown[0]!r}"
    sizes = [plain.get(key) for key in _SIZES]
    if not all(type(size) is int and size > 0 for size in sizes):
        return "a size is missing"
    hidden, inner, heads, layers, kv_heads, vocab = (int(size) for size in sizes if size)
    rope = _read_rope(plain)
    windows = _read_windows(plain, family, layers)
    dim = plain.get("head_dim") or family.head_dim or hidden // heads
    activation = _activation(plain, family)
    problem = next((item for item in (rope, windows) if isinstance(item, str)), "")
    if activation not in _ACTIVATIONS:
        problem = f"activation {activation!r}"
    elif type(dim) is not int or dim % 2 or heads % kv_heads or plain.get("use_bidirectional_attention"):
        problem = "unusual attention"
    if problem or isinstance(rope, str) or isinstance(windows, str):
        return problem
    return DecoderSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        inner=inner,
        vocab=vocab,
        eps=float(plain.get("rms_norm_eps", family.eps)),
        rope=rope,
        windows=windows,
        activation=activation,
        tied=bool(plain.get("tie_word_embeddings", family.tied)),
        qkv_bias=_switch(plain, family.qkv_bias),
        out_bias=_switch(plain, family.out_bias),
        mlp_bias=_switch(plain, family.mlp_bias),
        qk_norm=family.qk_norm,
        norm_offset=family.norm_offset,
        scaled_embedding=family.scaled_embedding,
        fused=family.fused,
    )


def _switch(plain: Mapping[str, Any], key: str | bool) -> bool:
    return bool(plain.get(key, False)) if isinstance(key, str) else key


def _activation(plain: Mapping[str, Any], family: _Family) -> str:
    usual = "gelu_pytorch_tanh" if family.norm_offset else "silu"
    name = str(plain.get("hidden_act", usual))
    # Gemma's first files say "gelu" and mean its approximation; transformers reads them so too.
    return usual if family.norm_offset and name == "gelu" else name


def _read_rope(plain: Mapping[str, Any]) -> Rope | str:
    """Read both dialects: ``rope_parameters`` of version 5, ``rope_theta`` and ``rope_scaling`` before."""
    found = plain.get("rope_scaling") or plain.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        return "rope parameters"
    kind = found.get("rope_type", found.get("type", "default"))
    theta = found.get("rope_theta", plain.get("rope_theta", 10000.0))
    parts = {found.get("partial_rotary_factor", 1.0), plain.get("partial_rotary_factor", 1.0)}
    numbers = [found.get(key) for key in _LLAMA3] if kind == "llama3" else [theta]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= set(_LLAMA3) if kind == "llama3" else set()
    if kind not in ("default", "llama3") or set(found) - known or parts != {1.0}:
        return f"rotary positions of kind {kind!r}"
    if not all(isinstance(number, int | float) and number for number in (*numbers, theta)):
        return "rope parameters"
    if kind == "default":
        return Rope(float(theta))
    factor, low, high, old = (float(number) for number in numbers if number)
    return Rope(float(theta), (factor, low, high, old))


def _read_windows(plain: Mapping[str, Any], family: _Family, layers: int) -> tuple[int | None, ...] | str:
    if family.window_by_layer:
        if plain.get("use_sliding_window") or "sliding_attention" in (plain.get("layer_types") or ()):
            return "sliding windows by layer"
        return (None,) * layers
    if plain.get("layer_types") or plain.get("use_sliding_window"):
        return "sliding windows by layer"
    supported = family.window is not None or family.fused
    window = plain.get("sliding_window", family.window) if supported else None
    if window is not None and (type(window) is not int or window < 1):
        return "sliding window"
    return (window,) * layers
