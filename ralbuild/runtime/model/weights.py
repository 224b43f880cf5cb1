"""From safetensors files to a model in memory. No pickle is ever opened. The only door to safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import safetensors
import torch
from torch import Tensor

from ralbuild.contract.decoder_spec import DecoderSpec
from ralbuild.runtime.errors import ModelMismatchError, OutOfMemoryError
from ralbuild.runtime.model.cache import BatchView, KvShape
from ralbuild.runtime.model.decoder import EMBEDDING, HEAD, Decoder, expected_shapes
from ralbuild.runtime.model.linear import widen_linears

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_BENIGN = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
"""Tensors that old files carry and that are computed, not loaded."""


Forward: TypeAlias = Callable[[Tensor, BatchView], Tensor]
"""Tokens [rows] and the cache, which knows whose they are, to float32 logits [texts, V] after the last."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to decode.

    Attributes:
        logits: the forward pass.
        shape: what a cached position costs.
        kept: what its largest matrix is made of in memory.
    """

    logits: Forward
    shape: KvShape
    kept: torch.dtype


def prepare_torch(threads: int) -> None:
    """Set the compute threads of this process."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def read_weights(paths: tuple[Path, ...]) -> dict[str, Tensor]:
    """Map all tensors of the files; a page is read when it is used.

    Buffers of old files, which may be bytes or booleans, are passed over as transformers does.

    Raises:
        ModelMismatchError: for a file that is not safetensors, a tensor that appears twice, or one of
            another kind than floating point.
    """
    out: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                    if _BENIGN.fullmatch(name):
                        continue
                    tensor = file.get_tensor(name)
                    if name in out or not tensor.is_floating_point():
                        problem = "appears in two files" if name in out else f"has type {tensor.dtype}"
                        raise ModelMismatchError(f"tensor {name!r} {problem}", place=str(path))
                    out[name] = tensor
        except safetensors.SafetensorError as error:
            raise ModelMismatchError(f"is not a safetensors file: {error}", place=str(path)) from None
    return out


def load_decoder(
    spec: DecoderSpec,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    widen: bool,
    progress: Callable[[int, int], None],
) -> LoadedModel:
    """Put ``weights`` into our own decoder; nothing may be missing or left over; raises as `make_decoder`."""
    decoder = make_decoder(spec, weights, dtype, widen=widen, progress=progress)
    return LoadedModel(decoder.logits, decoder.shape, decoder.kept)


def make_decoder(
    spec: DecoderSpec,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    widen: bool,
    progress: Callable[[int, int], None],
    device: torch.device | None = None,
) -> Decoder:
    """Put ``weights`` into our own decoder, on ``device`` or where they lie.

    Raises:
        ModelMismatchError: naming the first tensors that are missing, unexpected or of another shape.
        OutOfMemoryError: when converting needs more memory than there is.
    """
    state = _without_ties(weights, {HEAD: EMBEDDING} if spec.tied else {})
    _require_shapes(state, expected_shapes(spec))
    with _memory_errors():
        return Decoder(spec, state, dtype, widen=widen, progress=progress, device=device)


def load_module(
    config_class: type[Any],
    model_class: type[Any],
    plain: dict[str, Any],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    widen: bool,
) -> LoadedModel:
    """Put ``weights`` into transformers' own model; nothing may be missing or left over.

    Raises:
        ModelMismatchError: naming the first tensors that are missing, unexpected or of another shape.
        OutOfMemoryError: when converting needs more memory than there is.
    """
    from ralbuild.runtime.model.families import empty_model, kv_shape, run_module, tied_names

    model = empty_model(config_class, model_class, plain)
    tied = tied_names(model)
    state = _without_ties(_with_prefix(model, weights), tied)
    _require_shapes(
        state, {name: tuple(item.shape) for name, item in model.state_dict().items() if name not in tied}
    )
    with _memory_errors():
        model.load_state_dict(
            {name: item.to(dtype) for name, item in state.items()}, strict=False, assign=True
        )
    if tied:
        model.tie_weights()
    left = [name for name, item in (*model.named_parameters(), *model.named_buffers()) if item.is_meta]
    if left:
        raise ModelMismatchError(_some("never filled", sorted(left)), place="weights")
    if widen:
        widen_linears(model)
    return LoadedModel(run_module(model), kv_shape(model, dtype), dtype)


def _without_ties(weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Drop tensors that repeat the one they are tied to."""
    state = dict(weights)
    for name, source in tied.items():
        if name in state and source in state:
            if not torch.equal(state[name], state[source]):
                raise ModelMismatchError(f"{name!r} differs from {source!r}, but the config ties them")
            del state[name]
    return state


def _require_shapes(state: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(set(wanted) - set(state))
    unexpected = sorted(set(state) - set(wanted))
    if missing or unexpected:
        raise ModelMismatchError(
            f"{_some('missing', missing)}{_some('unexpected', unexpected)}", place="weights"
        )
    for name, item in state.items():
        if tuple(item.shape) != wanted[name]:
            found, needed = list(item.shape), list(wanted[name])
            raise ModelMismatchError(f"tensor {name!r} needs shape {needed}, found {found}", place="weights")


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise OutOfMemoryError(f"loading the weights failed: {error}", place="weights") from None


def _with_prefix(model: Any, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Old GPT-2 files name tensors without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    if any(name.startswith(prefix) for name in state):
        return state
    return {name if name.startswith("lm_head.") else prefix + name: item for name, item in state.items()}


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}: {', '.join(names[:3])}{more}; "
