"""Every error the builder raises on purpose; one class is one exit code.

An error says where (``place``), what was found and what was needed (``message``) and what to do
(``hint``). Only `ralbuild.cli.main` turns one into text and an exit status. Stages raise these and
nothing else for bad input; any other exception is a bug in ralbuild (exit code 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        message: what was found and what was needed, one sentence without a full stop.
        place: where, as ``file:line:column``, a file, a tensor, a layer or a rule; may be empty.
        hint: what to do about it; may be empty.
    """

    message: str
    place: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


class RalError(Exception):
    """Base of the builder's errors; carries every problem that one run found."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, place: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.problems: tuple[Problem, ...] = (Problem(message, place, hint),)

    @classmethod
    def of(cls, problems: list[Problem]) -> RalError:
        """Return one error of this class that reports all of ``problems`` (at least one)."""
        error = cls(problems[0].message)
        error.problems = tuple(problems)
        return error

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class UsageError(RalError):
    """The command line asks for something that does not make sense."""

    exit_code = 2


class ConfigError(RalError):
    """``ral-config.yaml`` is wrong; every problem has ``file:line:column``."""

    exit_code = 2


class WeightsError(RalError):
    """The model folder is missing, broken, or not what it says it is."""

    exit_code = 3


class CompileError(RalError):
    """A rule cannot be folded or a kernel cannot be compiled ahead of time."""

    exit_code = 4


class CacheError(RalError):
    """`.ral_cache` cannot be used at all (a damaged entry alone is recomputed instead)."""

    exit_code = 5


class ImageError(RalError):
    """An image, a base or a registry answer is not acceptable, or writing one failed."""

    exit_code = 6


class HostError(RalError):
    """This machine lacks something: a tool, a permission, disk space."""

    exit_code = 7


class GateError(RalError):
    """A release gate failed; the old release still serves."""

    exit_code = 8


class RolledBackError(RalError):
    """A release was undone; the old release serves again."""

    exit_code = 9
