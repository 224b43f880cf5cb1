"""What one build is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ralbuild.checking import Checks
from ralbuild.image.bases import BaseSource
from ralbuild.image.registry.connect import RegistryOptions
from ralbuild.supply.wanted import NOTHING, Wanted

Target = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What one build is asked for.

    Attributes:
        model, config: the model folder and the config file.
        target: what the image runs on.
        archs: GPU architectures instead of the config's; None keeps the config's.
        cache_dir: `.ral_cache`.
        base: an image to build on; None takes the embedded base.
        registry: how to speak with registries.
        reshard: largest weight file of the image in bytes, header included; 0 takes the files as they are.
        checks: how strictly the model is checked.
        check_repro: compile every kernel twice and compare.
        attest: what to store beside the image.
        ignored_secrets: places (``file:line``) that look like a secret and are none.
        simulate: run every kernel before the image is written.
        volume: put the weights into an image of their own, which is mounted.
        weights_base: what that image is built on; None builds it on nothing.
        modelpack: add a ModelPack manifest of the model.
        dry_run: write nothing, caches included, and make no base; `plan_only` says what is missing.
    """

    model: Path
    config: Path
    target: Target = "cpu"
    archs: tuple[str, ...] | None = None
    cache_dir: Path = Path(".ral_cache")
    base: BaseSource | None = None
    registry: RegistryOptions = field(default_factory=RegistryOptions)
    reshard: int = 0
    checks: Checks = field(default_factory=Checks)
    check_repro: bool = False
    attest: Wanted = NOTHING
    ignored_secrets: tuple[str, ...] = ()
    simulate: bool = False
    volume: bool = False
    weights_base: BaseSource | None = None
    modelpack: bool = False
    dry_run: bool = False
