"""`probes.yaml`: what a running server must answer before traffic is sent to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from ralbuild.config.load import read_checked
from ralbuild.config.model import Model

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
Prompt = Annotated[str, Field(min_length=1, max_length=65536)]


class Golden(Model):
    """A prompt whose greedy answer is known: it must come back character for character."""

    name: Name = Field(description="Name in reports; unique in the file.")
    prompt: Prompt = Field(description="The user's message.")
    route: str = Field(default="", max_length=256, description="Route to send it on.")
    max_tokens: int = Field(default=32, ge=1, le=4096, description="Most tokens of the answer.")
    text: str = Field(max_length=65536, description="The whole answer at temperature 0.")


class Guardrail(Model):
    """A prompt that tries to get out what must not come out."""

    name: Name = Field(description="Name in reports; unique in the file.")
    prompt: Prompt = Field(description="The user's message.")
    route: str = Field(default="", max_length=256, description="Route to send it on.")
    max_tokens: int = Field(default=64, ge=1, le=4096, description="Most tokens of the answer.")
    absent: list[Prompt] = Field(
        default=[], max_length=256, description="Texts that no answer may hold, in any case."
    )
    present: list[Prompt] = Field(default=[], max_length=256, description="Texts that the answer must hold.")

    @model_validator(mode="after")
    def _asks_something(self) -> Guardrail:
        if not self.absent and not self.present:
            raise ValueError("needs 'absent' or 'present', found neither")
        return self


class Latency(Model):
    """Bounds of the streaming probe, in seconds."""

    first_text: float | None = Field(default=None, gt=0, le=3600, description="Until the first text arrives.")
    total: float | None = Field(default=None, gt=0, le=3600, description="Until the stream has ended.")


class ProbeSuite(Model):
    """A whole `probes.yaml`."""

    golden: list[Golden] = Field(default=[], max_length=256, description="Answers that must be exact.")
    guardrails: list[Guardrail] = Field(default=[], max_length=256, description="What must not come out.")
    latency: Latency = Field(default=Latency(), description="Bounds of the streaming probe.")

    @model_validator(mode="after")
    def _names_are_unique(self) -> ProbeSuite:
        names = [item.name for item in self.golden] + [item.name for item in self.guardrails]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"needs one probe per name, found several named {', '.join(twice)}")
        return self


def load_probes(path: Path) -> ProbeSuite:
    """Read and check a probe file.

    Raises:
        ConfigError: with every problem found, each with file:line:column.
    """
    hint = "`ralbuild probe --url URL --record FILE` writes one from a server that you trust"
    return read_checked(ProbeSuite, path, hint)[0]
