"""`runtime-rules.yaml`: rules of the serving side, which change often and stay outside the image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from ralbuild.config.load import read_checked
from ralbuild.config.model import Marker, Matcher, Model, Redact
from ralbuild.config.strict_yaml import Document


class RuntimeRulesFile(Model):
    """A whole `runtime-rules.yaml`. Without any rule it takes back what an earlier one did."""

    version: Literal["0.3"] = Field(description="Of this format.")
    serial: int = Field(
        ge=0, lt=1 << 53, description="Grows with every file that is published; servers never go back."
    )
    redact: list[Redact] = Field(default=[], max_length=10_000, description="What is replaced in answers.")
    stop: list[Marker] = Field(default=[], max_length=256, description="Exact texts that end an answer.")
    refuse: list[Matcher] = Field(
        default=[], max_length=10_000, description="What no text that a client sends may hold."
    )

    @field_validator("redact")
    @classmethod
    def _everywhere(cls, items: list[Redact]) -> list[Redact]:
        if any(item.in_ != "all" for item in items):
            raise ValueError("'in' needs spans, which only the rules of the image have")
        return items


@dataclass(frozen=True, slots=True)
class LoadedRuntimeRules:
    """A valid file and where each part of it stands."""

    file: RuntimeRulesFile
    document: Document

    def place(self, *path: str | int) -> str:
        """Return ``file:line:column`` of a value."""
        return self.document.values[path]


def load_runtime_rules(path: Path) -> LoadedRuntimeRules:
    """Read and check a file.

    Raises:
        ConfigError: with every problem found, each with file:line:column.
    """
    return LoadedRuntimeRules(*read_checked(RuntimeRulesFile, path))
