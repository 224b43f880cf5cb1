"""Rows of loads, stores and atomics."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ralbuild.simulate.binder import Binder
from ralbuild.simulate.lanes import DTYPES, Array, Lanes, Step, copy
from ralbuild.simulate.memory import Piece, Site
from ralbuild.simulate.ptx.model import BITS, Address, Instruction, Sink, Symbol
from ralbuild.simulate.semantics import floats
from ralbuild.simulate.semantics.table import Mods, row
from ralbuild.simulate.services import Access, AccessKind

_SECTION = "Data Movement and Conversion Instructions"
_TYPES = "b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f16 bf16 f32 f64"
_WORDS = {
    "type": _TYPES,
    "vec": "v2 v4 v8",
    "space": "global shared local const shared::cta",
    "sem": "weak volatile relaxed acquire release",
    "cop": "ca cg cs lu cv wb wt",
    "evict": "L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate",
    "hint": "L2::cache_hint",
    "fetch": "L2::64B L2::128B L2::256B",
}
"""Cache operators, eviction priorities and fetch sizes change speed, never a value."""
_MAX_BYTES = 16


class Reach:
    """Addresses of one instruction and where they lie."""

    def __init__(self, b: Binder, i: Instruction, operand: int, space: str, size: int) -> None:
        if size > _MAX_BYTES:
            raise ValueError(f"an access of {size} bytes")
        self.services = b.services
        self.instruction = i
        self.space_name = space.split("::")[0] or "generic"
        self.base, offset = b.address(i.operands[operand])
        self.offset = np.uint64(offset & 0xFFFF_FFFF_FFFF_FFFF)
        self.space = b.services.space(space)
        self.site = Site(size)

    def pieces(self, lanes: Array | None, ahead: int = 0) -> tuple[list[Piece], Array]:
        """Return where the lanes (None: all) go, ``ahead`` bytes further on, and the lanes."""
        services = self.services
        base = self.base
        if lanes is None:
            lanes = services.numbers
        else:
            base = base[lanes]
        address = np.add(base, self.offset + np.uint64(ahead), dtype=np.uint64)
        return services.locate(self.instruction, self.space, self.site, address, lanes), lanes

    def tell(self, piece: Piece, lanes: Array, kind: AccessKind, values: Array | None = None) -> None:
        """Report an access to those who watch; local memory is a thread's own."""
        if not self.services.observers or piece.buffer is self.services.local.buffer:
            return
        chosen = lanes if piece.chosen is None else lanes[piece.chosen]
        chosen = chosen + self.services.first_block * self.services.threads
        space = "shared" if piece.buffer is self.services.shared.buffer else "global"
        access = Access(
            self.instruction, space, piece.buffer, piece.offset, chosen, self.site.size, kind, values
        )
        for observer in self.services.observers:
            observer.access(access)


def masked(run: Callable[[Array | None], None]) -> Step:
    """Return a step that runs over the lanes that take part, if any; None stands for all."""

    def part(lanes: Lanes) -> None:
        if lanes.count:
            run(lanes.index)

    return Step(lambda: run(None), part)


@row("ld.param.type", f"{_SECTION}: ld", "2", type=_TYPES)
def _load_parameter(b: Binder, i: Instruction, m: Mods) -> Step:
    operand = i.operands[1]
    if not isinstance(operand, Address) or not isinstance(operand.base, Symbol):
        raise ValueError("a parameter needs its name")
    offset = b.symbols.get(f"param {operand.base.name}")
    if offset is None:
        raise ValueError(f"unknown parameter {operand.base.name!r}")
    at = offset + operand.offset
    if at < 0 or at + BITS[m["type"]] // 8 > b.symbols["param block"]:
        raise ValueError("reads past the parameters")
    return copy(b.target(i.operands[0], m["type"], wide=True), b.services.parameter(at, m["type"]))


@row("ld{.sem}{.scope}{.space}{.nc}{.cop}{.evict}{.hint}{.fetch}{.vec}.type "
     "ldu{.space}{.vec}.type", f"{_SECTION}: ld, ldu", "2 3", **_WORDS)  # fmt: skip
def _load(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    items = b.items(i.operands[0])
    _check_count(i, len(items), m, 2)
    dtype = np.dtype(DTYPES[kind])
    targets = [None if isinstance(item, Sink) else b.target(item, kind, wide=True) for item in items]
    reach = Reach(b, i, 1, m["space"], dtype.itemsize * len(items))
    count, size = len(items), dtype.itemsize * len(items)

    def run(lanes: Array | None) -> None:
        pieces, active = reach.pieces(lanes)
        for piece in pieces:
            rows = piece.buffer.view(dtype, count).take(piece.offset // size, axis=0)
            reach.tell(piece, active, "read")
            for k, target in enumerate(targets):
                if target is None:
                    continue
                if lanes is None and piece.chosen is None:
                    np.copyto(target, rows[:, k], casting="unsafe")
                else:
                    target[active if piece.chosen is None else active[piece.chosen]] = rows[:, k]

    return masked(run)


@row("st{.sem}{.scope}{.space}{.cop}{.evict}{.hint}{.vec}.type", f"{_SECTION}: st", "2 3", **_WORDS)
def _store(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    items = b.items(i.operands[1])
    _check_count(i, len(items), m, 2)
    if m["space"] == "const":
        raise ValueError("constant memory cannot be written")
    sources = [b.source(item, f"u{BITS[kind]}" if kind[0] != "f" else kind, low=True) for item in items]
    dtype = sources[0].dtype
    size = dtype.itemsize * len(items)
    reach = Reach(b, i, 0, m["space"], size)

    def run(lanes: Array | None) -> None:
        pieces, active = reach.pieces(lanes)
        for piece in pieces:
            chosen = active if piece.chosen is None else active[piece.chosen]
            values = np.stack([source[chosen] for source in sources], axis=1)
            reach.tell(piece, active, "write", values.view(np.uint8))
            piece.buffer.view(dtype, len(items))[piece.offset // size] = values

    return masked(run)


def _check_count(i: Instruction, count: int, m: Mods, plain: int) -> None:
    if count != int(m["vec"][1:] or 1):
        raise ValueError(f"a vector of {count}")
    if len(i.operands) != plain + bool(m.get("hint")):
        raise ValueError("another number of operands")


_WHOLE_OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,  # noqa: ARG005
    "inc": lambda old, most: np.where(old >= most, 0, old + 1),
    "dec": lambda old, most: np.where((old == 0) | (old > most), most, old - 1),
}
_ATOMIC_TYPES = {
    "add": "u32 s32 u64 f32 f64 f16 bf16",
    "min": "u32 s32 u64 s64",
    "max": "u32 s32 u64 s64",
    "and": "b32 b64",
    "or": "b32 b64",
    "xor": "b32 b64",
    "exch": "b32 b64",
    "inc": "u32",
    "dec": "u32",
    "cas": "b16 b32 b64",
}
_ATOMIC = {
    "sem": "relaxed acquire release acq_rel",
    "space": "global shared shared::cta",
    "op": " ".join(_ATOMIC_TYPES),
    "type": "b16 b32 b64 u32 u64 s32 s64 f16 bf16 f32 f64",
}


@row("atom{.sem}{.scope}{.space}.op{.noftz}.type atom{.space}{.scope}{.sem}.op{.noftz}.type "
     "atom{.space}{.sem}{.scope}.op{.noftz}.type",
     "Parallel Synchronization and Communication Instructions: atom", "3 4", **_ATOMIC)  # fmt: skip
def _atomic(b: Binder, i: Instruction, m: Mods) -> Step:
    return _atomically(b, i, m, 1)


@row("red{.sem}{.scope}{.space}.op{.noftz}.type red{.space}{.scope}{.sem}.op{.noftz}.type "
     "red{.space}{.sem}{.scope}.op{.noftz}.type",
     "Parallel Synchronization and Communication Instructions: red", "2", **_ATOMIC)  # fmt: skip
def _reduce(b: Binder, i: Instruction, m: Mods) -> Step:
    if m["op"] in ("exch", "cas"):
        raise ValueError(f"red.{m['op']}")
    return _atomically(b, i, m, 0)


def _atomically(b: Binder, i: Instruction, m: Mods, at: int) -> Step:
    """Do one lane after another, in lane order: the ISA leaves the order open."""
    kind, name = m["type"], m["op"]
    if kind not in _ATOMIC_TYPES[name].split() or bool(m["noftz"]) != (kind in ("f16", "bf16")):
        raise ValueError(f"atomic {name} of .{kind}")
    values = [b.source(item, kind) for item in i.operands[at + 1 :]]
    if len(values) != 1 + (name == "cas"):
        raise ValueError("another number of operands")
    target = b.target(i.operands[0], kind) if at else None
    reach = Reach(b, i, at, m["space"], BITS[kind] // 8)
    combine = _combination(kind, name)

    def run(lanes: Array | None) -> None:
        pieces, active = reach.pieces(lanes)
        for piece in pieces:
            chosen = active if piece.chosen is None else active[piece.chosen]
            cells = piece.buffer.view(values[0].dtype, 1)[:, 0]
            reach.tell(piece, active, "atomic")
            for lane, cell in zip(chosen.tolist(), (piece.offset // reach.site.size).tolist(), strict=True):
                old = cells[cell : cell + 1].copy()
                cells[cell : cell + 1] = combine(old, *(value[lane : lane + 1] for value in values))
                if target is not None:
                    target[lane] = old[0]

    return masked(run)


def _combination(kind: str, name: str) -> Callable[..., Array]:
    if name == "cas":
        return _compare_and_swap
    if kind in ("f16", "bf16"):
        return lambda old, value: floats.narrow(
            floats.exact_sum(floats.widen(old, kind), floats.widen(value, kind)), kind, "rn"
        )
    return _WHOLE_OPERATIONS[name]


def _compare_and_swap(old: Array, expected: Array, new: Array) -> Array:
    swapped: Array = np.where(old == expected, new, old)
    return swapped
