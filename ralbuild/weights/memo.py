"""What was worked out from the same bytes before: a tokenizer that was proved is not proved again.

A changed rule is the commonest build, and loading the tokenizer in its own process would be most of it.
Results are kept by a digest of everything that decides them: the input, this room's code and the
libraries. Only `ralbuild.cache` implements `Memo`; it checks what it reads.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, TypeVar

from ralbuild.contract import codec
from ralbuild.contract.codec import FormatError, canonical_json, sha256_hex

Result = TypeVar("Result")


class Memo(Protocol):
    """The cache, as far as checks need it."""

    def fetch(
        self,
        key: str,
        miss: Callable[[], Mapping[str, bytes]],
        label: str,
        accept: Callable[[Mapping[str, bytes]], bool],
    ) -> Mapping[str, bytes]:
        """Return the stored outputs of ``key`` if ``accept`` takes them, else those that ``miss`` makes."""


def remember(
    memo: Memo | None,
    source: bytes,
    label: str,
    make: Callable[[], Result],
    pack: Callable[[Result], Mapping[str, bytes]],
    unpack: Callable[[Mapping[str, bytes]], Result],
) -> Result:
    """Return what ``make`` returns, or what it returned for the same ``source`` before.

    Args:
        memo: None works it out each time.
        source: all that ``make`` looks at.
        label: names the kind of result, in the key and in notes.
        pack: result to named bytes; none of them for a result that must be worked out again.
        unpack: the reverse; raises FormatError, ValueError, KeyError or TypeError for what it cannot read.
    """
    if memo is None:
        return make()
    fresh: list[Result] = []
    kept: list[Result] = []

    def miss() -> Mapping[str, bytes]:
        fresh.append(make())
        return pack(fresh[0])

    def accept(outputs: Mapping[str, bytes]) -> bool:
        try:
            kept.extend([unpack(outputs)] if outputs else [])
        except (FormatError, ValueError, KeyError, TypeError):
            return False
        return True

    memo.fetch(_key(label, source), miss, label, accept)
    if fresh:
        return fresh[0]
    return kept[0] if kept else make()


def _key(label: str, source: bytes) -> str:
    identity = {"label": label, "source": sha256_hex(source), "maker": _maker()}
    return sha256_hex(canonical_json(identity))


@functools.cache
def _maker() -> dict[str, str]:
    """Return what works results out: the code of this room, Python and the libraries of the workers."""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    parser = Path(str(codec.__file__)).read_bytes()
    libraries = {name: version(name) for name in ("jinja2", "tokenizers")}
    return {"code": sha256_hex(code + parser), "python": platform.python_version(), **libraries}
