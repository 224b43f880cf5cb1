"""What a user wants stored beside an image; a module of its own, for most builds want nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ralbuild.errors import UsageError
from ralbuild.image.outputs import DockerOutput, Output

if TYPE_CHECKING:
    from ralbuild.signing import PrivateKey

LOCAL_BUILDER = "urn:ralbuild:builder:local"
"""The builder's id where nobody names another one: somebody's machine, with no promise about it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to store beside an image: a signature by ``key``, its bill of materials, its provenance.

    With a key, bill and provenance are signed too. ``builder`` is the URI of who ran the build.
    """

    key: PrivateKey | None = None
    sbom: bool = False
    provenance: bool = False
    builder: str = LOCAL_BUILDER

    def __bool__(self) -> bool:
        return self.key is not None or self.sbom or self.provenance

    def __str__(self) -> str:
        names = {"signature": self.key is not None, "sbom": self.sbom, "provenance": self.provenance}
        return ", ".join(name for name, wanted in names.items() if wanted)

    def check_outputs(self, outputs: Iterable[Output]) -> None:
        """Raise UsageError when something is wanted and no output has a place for it."""
        if self and all(isinstance(output, DockerOutput) for output in outputs):
            raise UsageError(
                "what is signed and attested lies beside an image, and a docker engine has no place for it",
                place="--output",
                hint="add --output oci:DIR",
            )


NOTHING = Wanted()
