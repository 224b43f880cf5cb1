"""From safetensors files to a model in memory. No pickle is ever opened. The only door to safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from ralbuild.runtime.errors import ModelMismatchError, OutOfMemoryError
from ralbuild.runtime.model.cache import KvShape
from ralbuild.runtime.model.families import kv_shape, tied_names

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_BENIGN = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
"""Tensors that old files carry and that are computed, not loaded."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to decode.

    Attributes:
        module: the transformers model.
        shape: what a cached position costs.
        vocab_size: V, columns of a logits row.
    """

    module: Any
    shape: KvShape
    vocab_size: int


def prepare_torch(threads: int) -> None:
    """Set the compute threads of this process."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def read_weights(
    paths: tuple[Path, ...], dtype: torch.dtype, progress: Callable[[int, int], None]
) -> dict[str, Tensor]:
    """Read all tensors as ``dtype``; one that has it already stays mapped from its file.

    Buffers of old files, which may be bytes or booleans, are passed over as transformers does.

    Raises:
        ModelMismatchError: for a file that is not safetensors, a tensor that appears twice, or one of
            another kind than floating point.
        OutOfMemoryError: when converting needs more memory than there is.
    """
    out: dict[str, Tensor] = {}
    total = sum(path.stat().st_size for path in paths)
    done = 0
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
                    out[name] = tensor.to(dtype)
                    done += tensor.nbytes
                    progress(done, total)
        except safetensors.SafetensorError as error:
            raise ModelMismatchError(f"is not a safetensors file: {error}", place=str(path)) from None
        except (MemoryError, RuntimeError) as error:
            raise OutOfMemoryError(f"loading the weights failed: {error}", place=str(path)) from None
    return out


def fill_model(model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype) -> LoadedModel:
    """Put ``weights`` into a model made by `empty_model`; nothing may be missing or left over.

    Raises:
        ModelMismatchError: naming the first tensors that are missing, unexpected or of another shape.
    """
    tied = tied_names(model)
    state = _with_prefix(model, dict(weights))
    for name, source in tied.items():
        if name in state and source in state:
            if not torch.equal(state[name], state[source]):
                raise ModelMismatchError(f"{name!r} differs from {source!r}, but the config ties them")
            del state[name]
    wanted = model.state_dict()
    missing = sorted(set(wanted) - set(state) - set(tied))
    unexpected = sorted(set(state) - set(wanted))
    if missing or unexpected:
        raise ModelMismatchError(
            f"{_some('missing', missing)}{_some('unexpected', unexpected)}", place="weights"
        )
    for name, item in state.items():
        if item.shape != wanted[name].shape:
            found, needed = list(item.shape), list(wanted[name].shape)
            raise ModelMismatchError(f"tensor {name!r} needs shape {needed}, found {found}", place="weights")
    model.load_state_dict(state, strict=False, assign=True)
    if tied:
        model.tie_weights()
    left = [name for name, item in (*model.named_parameters(), *model.named_buffers()) if item.is_meta]
    if left:
        raise ModelMismatchError(_some("never filled", sorted(left)), place="weights")
    return LoadedModel(model, kv_shape(model, dtype), model.get_output_embeddings().weight.shape[0])


def _with_prefix(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
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
