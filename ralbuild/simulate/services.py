"""What bound instructions need besides registers: memory, who a lane is, and who watches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from ralbuild.simulate.copies import Copies, Copy
from ralbuild.simulate.faults import Fault, FaultError, FaultKind
from ralbuild.simulate.lanes import DTYPES, Array
from ralbuild.simulate.memory import (
    LOCAL_WINDOW,
    SHARED_WINDOW,
    BadAddress,
    BlockMemory,
    Buffer,
    GenericMemory,
    GlobalMemory,
    Piece,
    Site,
    Space,
)
from ralbuild.simulate.ptx.model import BITS, Instruction

AccessKind = Literal["read", "write", "atomic"]


class Access(NamedTuple):
    """What an instruction did to memory, for observers.

    Attributes:
        offset: byte offset in the buffer per thread.
        threads: the threads, by their number in the grid, ascending.
        size: bytes per thread.
        values: the bytes written, [threads, size]; None for reads and atomics.
    """

    instruction: Instruction
    space: str
    buffer: Buffer
    offset: Array
    threads: Array
    size: int
    kind: AccessKind
    values: Array | None


class Observer(Protocol):
    """Sees every access to global and shared memory."""

    def access(self, access: Access) -> None:
        """Take note of an access."""

    def emptied(self, buffer: Buffer) -> None:
        """Take note that a buffer now belongs to other blocks."""

    def synchronized(self, threads: Array, *, block: bool) -> None:
        """Take note that threads met at a barrier: of their blocks, or of their warps."""

    def arrived(self, threads: Array) -> None:
        """Take note that threads of one block came to a barrier and went on."""

    def joined(self, waiting: Array, arrived: Array) -> None:
        """Take note that threads of one block met those that had arrived."""


@dataclass(slots=True)
class Services:
    """One machine's memory and identity.

    Attributes:
        threads: threads of a block.
        first_block: linear number of the block whose threads are lanes 0 and up.
        printed: what threads printed, in the order of execution here.
        copies: asynchronous copies on their way.
    """

    lanes: int
    threads: int
    memory: GlobalMemory
    shared: BlockMemory
    local: BlockMemory
    observers: list[Observer] = field(default_factory=list)
    first_block: int = 0
    printed: list[str] = field(default_factory=list)
    copies: Copies = field(init=False)
    numbers: Array = field(init=False)
    _parameters: dict[tuple[int, str], Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers = np.arange(self.lanes)
        self.copies = Copies(self.lanes, self.shared.buffer)

    def space(self, name: str) -> Space:
        """Return the space that a modifier names; empty is generic."""
        if name == "":
            return GenericMemory(self.memory, self.shared, self.local)
        if name.startswith("shared"):
            return self.shared
        return self.local if name == "local" else self.memory

    @staticmethod
    def window(space: str) -> int:
        """Return what is added to an address of a space to make it generic."""
        return {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)

    def fault(self, kind: FaultKind, detail: str, instruction: Instruction, lane: int) -> FaultError:
        """Return the error for what a lane did."""
        block, thread = divmod(lane, self.threads)
        return FaultError(
            Fault(kind, detail, instruction.line, instruction.text, self.first_block + block, thread)
        )

    def locate(
        self, instruction: Instruction, space: Space, site: Site, address: Array, lanes: Array
    ) -> list[Piece]:
        """Return where the lanes' addresses lie, or raise for the first that is wrong."""
        found = space.locate(site, address, lanes)
        if isinstance(found, BadAddress):
            kind: FaultKind = "misaligned" if found.misaligned else "out of bounds"
            raise self.fault(kind, found.detail, instruction, int(lanes[found.position]))
        if self.copies.open:
            self._expect_arrived(instruction, site, found, lanes)
        return found

    def _expect_arrived(
        self, instruction: Instruction, site: Site, pieces: list[Piece], lanes: Array
    ) -> None:
        for piece in pieces:
            met = self.copies.touched(piece, site.size)
            if met is not None:
                active = lanes if piece.chosen is None else lanes[piece.chosen]
                at = int(met.argmax())
                where = int(piece.offset[at]) % self.shared.stride
                detail = f"shared memory byte {where}: an asynchronous copy is on its way there"
                raise self.fault("copy not waited for", detail, instruction, int(active[at]))

    def tell_copy(self, copy: Copy) -> None:
        """Report the bytes that a copy wrote, as its thread's own."""
        for observer in self.observers:
            order = np.argsort(copy.lanes)
            threads = copy.lanes[order] + self.first_block * self.threads
            observer.access(
                Access(
                    copy.instruction, "shared", self.shared.buffer, copy.offset[order], threads,
                    copy.values.shape[1], "write", copy.values[order],
                )
            )  # fmt: skip

    def parameter(self, offset: int, kind: str) -> Array:
        """Return the lanes that hold a kernel parameter; `set_parameters` fills them."""
        key = (offset, kind)
        if key not in self._parameters:
            self._parameters[key] = np.zeros(self.lanes, DTYPES[kind])
        return self._parameters[key]

    def set_parameters(self, block: bytes) -> None:
        """Fill the parameters of a launch from its parameter block."""
        for (offset, kind), array in self._parameters.items():
            raw = block[offset : offset + BITS[kind] // 8]
            array[:] = np.frombuffer(raw, array.dtype)[0]
