"""What a config, a model and a target must agree on before anything is compiled."""

from __future__ import annotations

from pathlib import Path

from ralbuild.config.load import LoadedConfig, load_config
from ralbuild.contract import bundle as contract
from ralbuild.contract.families import SERVED_FAMILIES
from ralbuild.errors import ConfigError, UsageError, WeightsError
from ralbuild.pipeline.request import Target
from ralbuild.weights.decoder import decoder_spec
from ralbuild.weights.scan import ScannedModel


def check_config(path: Path, model: ScannedModel | None = None) -> LoadedConfig:
    """Load a config and, given the model, check it against that.

    Raises:
        ConfigError: with every mistake.
    """
    loaded = load_config(path)
    if model is not None:
        engine_of(loaded, model, "cpu")
    return loaded


def engine_of(loaded: LoadedConfig, model: ScannedModel, target: Target) -> contract.Engine:
    """Return the engine's settings: the config's, bounded by the model.

    Raises:
        ConfigError: for a length that the model was not made for.
        WeightsError: for weights that the engine does not serve.
    """
    config = loaded.config
    family = model.manifest.model_type
    if model.quantised:
        raise WeightsError(
            f"the engine serves unquantised weights only; these are {model.quantised}",
            place="config.json",
            hint="use the unquantised weights",
        )
    if target == "cpu" and family not in SERVED_FAMILIES:
        raise WeightsError(
            f"the engine does not serve model_type {family!r}: an image of it could not start",
            place="config.json",
            hint=f"served families: {', '.join(sorted(SERVED_FAMILIES))}",
        )
    limit = model.manifest.max_positions
    written = loaded.document.values.get(("max_seq_len",))
    if limit and config.max_seq_len > limit and written:
        raise ConfigError(
            f"max_seq_len is {config.max_seq_len}, but the model was made for {limit} positions",
            place=written,
            hint=f"use at most {limit}",
        )
    dtype = config.runtime.dtype
    if dtype == "auto":
        dtype = "float32" if target == "cpu" else "bfloat16"
    length = min(config.max_seq_len, limit) if limit else config.max_seq_len
    return contract.Engine(config.max_batch_size, length, dtype, config.runtime.idle_unload)


def refuse_unservable(bundle: contract.Bundle, model: ScannedModel) -> None:
    """Refuse an image for GPUs that could not start on any.

    Raises:
        UsageError: when no architecture was asked for.
        WeightsError: when our own decoder does not run the model: there is no other code on a GPU.
    """
    if bundle.target != "cuda":
        return
    if not any(kernel.objects for kernel in bundle.kernels):
        raise UsageError(
            "an image for GPUs needs an architecture, found none",
            place="build.targets",
            hint="name one: --arch sm_80",
        )
    spec = decoder_spec(model)
    if isinstance(spec, str):
        raise WeightsError(
            f"a GPU image runs ralbuild's own decoder, which does not run this model: {spec}",
            place="config.json",
            hint="`--target cpu` builds an image that runs it with transformers' code",
        )


def refuse_user_kernels(loaded: LoadedConfig, target: Target) -> None:
    """Raise ConfigError for a user kernel in an image that has no GPU."""
    if target == "cpu" and loaded.kernels and loaded.config.runtime.cpu_user_kernels is None:
        kernel = loaded.kernels[0]
        raise ConfigError(
            f"{kernel.name!r} is a user kernel, and a CPU image has no GPU to run it on",
            place=kernel.place,
            hint="`runtime: {cpu_user_kernels: interpret}` puts Triton into the image and runs it, slowly; "
            "`ralbuild compile --target cuda` compiles it",
        )
