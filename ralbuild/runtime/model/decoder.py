"""Our own forward pass for the llama-shaped families: the same sums as transformers, in fewer calls.

It needs nothing of transformers, whose import would take longer than torch's, and per layer it makes
four products and some twenty small calls. tests/test_runtime_decode.py holds it to transformers' tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from ralbuild.contract.decoder_spec import DecoderSpec, Rope
from ralbuild.runtime.model.cache import CPU, KvShape, View
from ralbuild.runtime.model.linear import Product

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Norm:
    """Root mean square norm; with ``offset`` gemma's, which rounds after the weight and not before."""

    weight: Tensor
    eps: float
    offset: bool

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.dtype == torch.float32:
            return rms_norm(rows, self.weight.shape, self.weight, self.eps)
        wide = rms_norm(rows.float(), self.weight.shape, None, self.eps)
        if self.offset:
            return (wide * self.weight).to(rows.dtype)
        return self.weight * wide.to(rows.dtype)


@dataclass(frozen=True, slots=True)
class _Layer:
    before: _Norm
    qkv: Product
    q_norm: _Norm | None
    k_norm: _Norm | None
    out: Product
    after: _Norm
    gate_up: Product
    down: Product
    window: int | None


class Decoder:
    """A model ready to run. `logits` is what the decode graph calls."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        *,
        widen: bool,
        progress: Callable[[int, int], None],
        device: torch.device | None = None,
    ) -> None:
        """Take tensors as they lie in the files, named and shaped as `expected_shapes` says.

        With ``device`` they are copied there, each product as one matrix; else they stay where they lie.
        """
        self._spec = spec
        self._dtype = dtype
        self._embedding = weights[EMBEDDING] if device is None else weights[EMBEDDING].to(device, dtype)
        self._scale = torch.tensor(spec.hidden**0.5).to(device, dtype) if spec.scaled_embedding else None
        self._frequencies = frequencies(spec.rope, spec.dim).to(device)
        self._activation = silu if spec.activation == "silu" else _gelu
        make = _Maker(spec, weights, dtype, widen, device)
        self._norm = make.norm("model.norm.weight")
        self._layers: list[_Layer] = []
        # Packing is one thread's work for each matrix, and does not hold the interpreter's lock.
        with ThreadPoolExecutor(torch.get_num_threads() if device is None else 1) as pool:
            head = pool.submit(make.product, [EMBEDDING if spec.tied else HEAD])  # the largest first
            for number, layer in enumerate(pool.map(make.layer, range(spec.layers))):
                self._layers.append(layer)
                progress(number + 1, spec.layers + 1)
            self._head = head.result()
        self.kept = self._head.kept
        """What the largest matrix is made of in memory."""
        self.shape = KvShape(spec.layers, spec.kv_heads, spec.dim, dtype, device or CPU)

    def logits(self, tokens: Tensor, view: View) -> Tensor:
        """Return float32 [texts, V] after the last of each text's ``tokens`` [rows].

        ``view`` says whose rows they are; their keys and values go into it.
        """
        spec, count = self._spec, len(tokens)
        turned = spec.heads + spec.kv_heads
        rows = self._embedding[tokens].to(self._dtype)
        if self._scale is not None:
            rows = rows * self._scale
        cos, sin = self._rotation(view.positions)
        for number, layer in enumerate(self._layers):
            heads = layer.qkv(layer.before(rows)).view(count, -1, spec.dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                heads[:, : spec.heads] = layer.q_norm(heads[:, : spec.heads])
                heads[:, spec.heads : turned] = layer.k_norm(heads[:, spec.heads : turned])
            # In place: x * cos + rotate_half(x) * sin; the halves' signs are in `sin`.
            rotary = heads[:, :turned]
            other = rotary.roll(spec.dim // 2, -1).mul_(sin)
            rotary.mul_(cos).add_(other)
            view.store(number, heads[:, spec.heads :])
            seen = view.attend(number, heads[:, : spec.heads], spec.dim**-0.5, layer.window)
            if layer is self._layers[-1]:  # of the other rows only keys and values were wanted
                rows, seen = rows[view.last], seen[view.last]
            rows = rows + layer.out(seen.flatten(1))
            gate, up = layer.gate_up(layer.after(rows)).chunk(2, -1)
            rows = rows + layer.down(self._activation(gate) * up)
        return self._head(self._norm(rows)).float()

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines, [rows, 1, dim] each."""
        angles = positions[:, None, None].float() * self._frequencies
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def frequencies(rope: Rope, dim: int) -> Tensor:
    """Return the angle per position of each pair of a head, [dim / 2]; transformers' formulas."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2).float() / dim))
    if rope.llama3 is None:
        return plain
    factor, low, high, old = rope.llama3
    length = 2 * math.pi / plain
    scaled = torch.where(length > old / low, plain / factor, plain)
    smooth = (old / length - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(length < old / high) & ~(length > old / low)
    return torch.where(medium, smoothed, scaled)


def expected_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return every tensor that the model's files must hold, and its shape."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (spec.vocab, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tied:
        shapes[HEAD] = (spec.vocab, spec.hidden)
    query, keys = spec.heads * spec.dim, spec.kv_heads * spec.dim
    attention, mlp = "self_attn", "mlp"
    products = {
        f"{attention}.o_proj": ((spec.hidden, query), spec.out_bias),
        f"{mlp}.down_proj": ((spec.hidden, spec.inner), spec.mlp_bias),
    }
    if spec.fused:
        products[f"{attention}.qkv_proj"] = ((query + 2 * keys, spec.hidden), spec.qkv_bias)
        products[f"{mlp}.gate_up_proj"] = ((2 * spec.inner, spec.hidden), spec.mlp_bias)
    else:
        for name, size in (("q", query), ("k", keys), ("v", keys)):
            products[f"{attention}.{name}_proj"] = ((size, spec.hidden), spec.qkv_bias)
        for name in ("gate", "up"):
            products[f"{mlp}.{name}_proj"] = ((spec.inner, spec.hidden), spec.mlp_bias)
    vectors = {"input_layernorm": spec.hidden, "post_attention_layernorm": spec.hidden}
    if spec.qk_norm:
        vectors |= {f"{attention}.q_norm": spec.dim, f"{attention}.k_norm": spec.dim}
    for number in range(spec.layers):
        place = f"model.layers.{number}."
        shapes |= {f"{place}{name}.weight": (size,) for name, size in vectors.items()}
        for name, (shape, biased) in products.items():
            shapes[f"{place}{name}.weight"] = shape
            if biased:
                shapes[f"{place}{name}.bias"] = shape[:1]
    return shapes


class _Maker:
    """Builds the parts of a layer from tensors by name."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        widen: bool,
        device: torch.device | None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._weights = weights
        self._dtype = dtype
        self._widen = widen

    def layer(self, number: int) -> _Layer:
        spec, place = self._spec, f"model.layers.{number}."
        attention, mlp = f"{place}self_attn.", f"{place}mlp."
        qkv = ["qkv_proj"] if spec.fused else ["q_proj", "k_proj", "v_proj"]
        gate_up = ["gate_up_proj"] if spec.fused else ["gate_proj", "up_proj"]
        return _Layer(
            before=self.norm(f"{place}input_layernorm.weight"),
            qkv=self.product([f"{attention}{name}.weight" for name in qkv]),
            q_norm=self.norm(f"{attention}q_norm.weight") if spec.qk_norm else None,
            k_norm=self.norm(f"{attention}k_norm.weight") if spec.qk_norm else None,
            out=self.product([f"{attention}o_proj.weight"]),
            after=self.norm(f"{place}post_attention_layernorm.weight"),
            gate_up=self.product([f"{mlp}{name}.weight" for name in gate_up]),
            down=self.product([f"{mlp}down_proj.weight"]),
            window=spec.windows[number],
        )

    def norm(self, name: str) -> _Norm:
        weight = self._weights[name].to(self._device, self._dtype)
        # Gemma adds its one in float32, whatever the dtype.
        weight = 1.0 + weight.float() if self._spec.norm_offset else weight
        return _Norm(weight, self._spec.eps, self._spec.norm_offset)

    def product(self, names: list[str]) -> Product:
        matrices = [self._weights[name] for name in names]
        biases = [name.removesuffix("weight") + "bias" for name in names]
        found = [self._weights[name] for name in biases if name in self._weights]
        return Product(matrices, found, dtype=self._dtype, widen=self._widen, device=self._device)


def _gelu(rows: Tensor) -> Tensor:
    return gelu(rows, approximate="tanh")
