"""Hugging Face `transformers` model code, for what our own decoder does not run. The only door to it.

Nothing of the model folder is executed and no Auto class is used: the configuration is JSON that we
parsed, the classes are named here, and attention runs over our own cache.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ralbuild.contract.families import SERVED_FAMILIES
from ralbuild.runtime.errors import ModelMismatchError
from ralbuild.runtime.model.cache import BatchView, KvShape

_HEAD_CLASS = {"gpt2": "GPT2LMHeadModel"}
_ATTENTION = "ralbuild_slots"
_DROPPED = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version")


def import_family(model_type: str) -> tuple[type[Any], type[Any]]:
    """Import one family and return its configuration and causal model classes.

    Raises:
        ModelMismatchError: when the family is not in the table.
    """
    name = SERVED_FAMILIES.get(model_type)
    if name is None:
        known = ", ".join(sorted(SERVED_FAMILIES))
        raise ModelMismatchError(
            f"model_type {model_type!r} is not supported; known: {known}", place="config.json"
        )
    package = f"transformers.models.{model_type}"
    modeling = importlib.import_module(f"{package}.modeling_{model_type}")
    config = getattr(importlib.import_module(f"{package}.configuration_{model_type}"), f"{name}Config")
    attention = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    attention.register(_ATTENTION, _attend)
    return config, getattr(modeling, _HEAD_CLASS.get(model_type, f"{name}ForCausalLM"))


def empty_model(config_class: type[Any], model_class: type[Any], plain: dict[str, Any]) -> Any:
    """Build the model without memory for its weights; buffers that are computed are computed.

    Raises:
        ModelMismatchError: when the configuration does not make a model.
    """
    fields = {
        key: value for key, value in plain.items() if key not in _DROPPED and "implementation" not in key
    }
    try:
        config = config_class.from_dict(fields)
        config._attn_implementation = _ATTENTION
        with _parameters_without_memory():
            model = model_class(config)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelMismatchError(
            f"does not make a {model_class.__name__}: {error}", place="config.json"
        ) from None
    return model.eval()


def run_module(model: Any) -> Callable[[Tensor, BatchView], Tensor]:
    """Return the forward pass of ``model`` as the decode graph calls it: all rows are one text to it."""

    def logits(tokens: Tensor, view: BatchView) -> Tensor:
        positions, last = view.positions[None], torch.tensor(view.last)
        out = model(
            input_ids=tokens[None], position_ids=positions, cache=view, use_cache=True, logits_to_keep=last
        )
        return out.logits[0].float()

    return logits


def kv_shape(model: Any, dtype: torch.dtype) -> KvShape:
    """Return what one cached position of ``model`` costs."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KvShape(config.num_hidden_layers, heads, dim, dtype)


def tied_names(model: Any) -> dict[str, str]:
    """Return weights that share another's tensor, such as ``lm_head.weight``, and whose it is."""
    return dict(model._tied_weights_keys) if model.config.tie_word_embeddings else {}


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Put parameters on torch's meta device as they are made; buffers are computed as usual."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        meta = None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(module, name, meta)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def _attend(
    module: nn.Module,
    query: Tensor,
    view: BatchView,
    layer: int,
    _mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; ``view`` and ``layer`` are what the view's `update` returned."""
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    del module
    return view.attend(layer, query[0].transpose(0, 1), scale, sliding_window)[None], None
