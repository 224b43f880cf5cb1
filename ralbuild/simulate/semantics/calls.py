"""Calls of the device runtime: `vprintf` behind `device_print`, and `__assertfail` behind `device_assert`.

CUDA C++ Programming Guide, "Formatted Output" and "Assertion". `ptx.link` writes out all other calls.
"""

from __future__ import annotations

import re
import struct

import numpy as np

from ralbuild.simulate.binder import Binder
from ralbuild.simulate.lanes import Array, Lanes, Step
from ralbuild.simulate.memory import BadAddress, Site
from ralbuild.simulate.ptx.model import Instruction, Symbol, Vector
from ralbuild.simulate.semantics.table import Mods, row

MAX_PRINTED = 4096
"""Texts that are kept; a kernel that prints in a loop must not fill the memory."""
_MAX_TEXT = 4096
_FORM = re.compile(
    rb"%(?P<flags>[-+ #0]*)(?P<width>\d{0,3})(?P<rest>\.\d{1,3})?(?P<size>hh|h|ll|l|)(?P<kind>.)", re.DOTALL
)


@row("call{.uni}", "Control Flow Instructions: call", "3")
def _call(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    _, callee, given = i.operands
    assert isinstance(callee, Symbol)
    assert isinstance(given, Vector)
    names = [item.name for item in given.items if isinstance(item, Symbol)]
    if any(name not in b.symbols for name in names) or len(names) != len(given.items):
        raise ValueError(f"a call of {callee.name} with other parameters")
    print_, fail = callee.name == "vprintf", callee.name == "__assertfail"
    if len(names) != (2 if print_ else 5):
        raise ValueError(f"a call of {callee.name} with {len(names)} parameters")
    memory = _Memory(b, i)

    def part(lanes: Lanes) -> None:
        for lane in lanes.index.tolist():
            values = [memory.word(b.symbols[name], lane) for name in names[:3]]
            if fail:
                message, file = memory.text(values[0], lane), memory.text(values[1], lane)
                detail = f"{message}, {file}:{values[2] & 0xFFFFFFFF}"
                raise b.services.fault("assertion failed", detail, i, lane)
            text = _formatted(memory, values[0], values[1], lane)
            if len(b.services.printed) < MAX_PRINTED:
                b.services.printed.append(text)

    return Step(lambda: part(Lanes(np.ones(b.lanes, bool))), part)


class _Memory:
    """Reads of one lane, checked as those of any instruction."""

    def __init__(self, b: Binder, i: Instruction) -> None:
        self.services, self.instruction = b.services, i

    def word(self, address: int, lane: int) -> int:
        """Return 8 bytes of a parameter of the call; narrower ones are followed by padding."""
        local = self.services.local
        at = address + int(local.row[lane]) * local.stride
        data: Array = local.buffer.bytes[at : at + 8]
        return int.from_bytes(data.tobytes(), "little")

    def read(self, address: int, size: int, lane: int) -> bytes:
        """Return bytes at a generic address."""
        where = np.array([address], np.uint64)
        pieces = self.services.locate(
            self.instruction, self.services.space(""), Site(size), where, np.array([lane])
        )
        start = int(pieces[0].offset[0])
        return pieces[0].buffer.bytes[start : start + size].tobytes()

    def text(self, address: int, lane: int) -> str:
        """Return a text up to its zero byte."""
        space = self.services.memory
        found = space.locate(Site(1), np.array([address], np.uint64), np.array([lane]))
        if isinstance(found, BadAddress):
            raise self.services.fault("out of bounds", f"a text: {found.detail}", self.instruction, lane)
        start = int(found[0].offset[0])
        data = found[0].buffer.bytes[start : start + _MAX_TEXT].tobytes()
        return data.split(b"\0")[0].decode("utf-8", "replace")


def _formatted(memory: _Memory, format_address: int, at: int, lane: int) -> str:
    """Return what a thread prints. Arguments are packed, each at a multiple of its size."""
    template = memory.text(format_address, lane).encode()

    def fill(found: re.Match[bytes]) -> bytes:
        nonlocal at
        kind = found["kind"].decode("latin-1")
        if kind == "%":
            return b"%"
        size = 8 if kind in "aAeEfFgGps" or found["size"] in (b"l", b"ll") else 4
        at = -(-at // size) * size
        raw = memory.read(at, size, lane)
        at += size
        return _one(memory, found, kind, raw, lane).encode()

    return _FORM.sub(fill, template).decode("utf-8", "replace")


def _one(memory: _Memory, found: re.Match[bytes], kind: str, raw: bytes, lane: int) -> str:
    form = f"%{(found['flags'] + found['width'] + (found['rest'] or b'')).decode()}"
    narrow = {b"hh": 1, b"h": 2}.get(found["size"], len(raw))
    if kind in "di":
        return f"{form}d" % int.from_bytes(raw[:narrow], "little", signed=True)
    if kind in "uoxX":
        return f"{form}{'d' if kind == 'u' else kind}" % int.from_bytes(raw[:narrow], "little")
    if kind in "eEfFgG":
        return f"{form}{kind}" % float(struct.unpack("<d", raw)[0])
    if kind == "c":
        return f"{form}s" % chr(raw[0])
    if kind == "s":
        return f"{form}s" % memory.text(int.from_bytes(raw, "little"), lane)
    if kind == "p":
        return f"{form}s" % hex(int.from_bytes(raw, "little"))
    raise memory.services.fault("bad format", f"%{kind} is no conversion", memory.instruction, lane)
