"""The decode graph on a GPU, with the protocol of `ralbuild.runtime.lanes`.

A step is a captured graph: the model reads the ids and positions that the step before left on the device,
the patch draws, rewrites and feeds back. The host launches it before it reads what the step before did, so
the device never waits for the host; the price is one step too many for a text that ends, which changes
nothing (the slot is idle).

Prompts are read eagerly, up to their last token: that one is the input of the text's first step. So every
token is drawn inside a captured graph, and a prompt needs no launch of the patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ralbuild.contract.bans import BanSlot
from ralbuild.runtime.cuda.buffers import Buffers, Sizes
from ralbuild.runtime.cuda.device import Device, Wait
from ralbuild.runtime.cuda.driver import Driver
from ralbuild.runtime.cuda.graphs import Graphs
from ralbuild.runtime.cuda.kv import FixedCache, StepView
from ralbuild.runtime.cuda.patch import GpuPatch
from ralbuild.runtime.cuda.report import Line, Reports
from ralbuild.runtime.lanes import Read
from ralbuild.runtime.legal import LegalTokens
from ralbuild.runtime.logprobs import token_logprob
from ralbuild.runtime.model.cache import BatchView, KvShape, Seat, SlotCache, View
from ralbuild.runtime.orders import TokenLogprob
from ralbuild.runtime.sampler import Draw, Logits, masked
from ralbuild.runtime.steps import IDLE, UNLIMITED, Tables

Forward = Callable[[Tensor, View], Tensor]
"""The model: tokens [rows] and the cache as it may see it, to float32 logits."""


@dataclass(slots=True)
class DeviceText:
    """What is known of a text on the device: `steps.PatchSlot` has the meanings.

    Attributes:
        profile, draw, prompt, limit: how it began.
        ended: the device has written its end, and what the rules append.
        tail: the part of that which the rules append.
        row: its slot on the device; -1 before it is opened.
    """

    profile: int
    draw: Draw
    prompt: tuple[int, ...]
    limit: int
    row: int = -1
    step: int = 0
    token: int = IDLE
    output: bytes = b""
    held: int = 0
    stopped: bool = False
    ended: bool = False
    tail: bytes = b""
    events: list[int] = field(default_factory=list)
    refused: int = 0
    masked: int = 0
    exhausted: bool = False
    logprob: TokenLogprob | None = None


class DeviceRules:
    """The folded step as the decode loop sees it: how texts begin and end."""

    def __init__(self, device: Device, tables: Tables, buffers: Buffers) -> None:
        self._device = device
        self._tables = tables
        self._buffers = buffers
        self._appended: dict[int, tuple[bytes, list[int]]] = {}

    def open(
        self, profile: int, draw: Draw, prompt: Sequence[int] = (), limit: int = UNLIMITED
    ) -> DeviceText:
        """Return the state of a text that begins."""
        return DeviceText(profile, draw, tuple(prompt), limit)

    def appended(self, profile: int) -> tuple[bytes, list[int]]:
        """Return what a profile appends to any text, wherever it ends, and the rules that this counts."""
        if profile not in self._appended:
            slot = self._tables.machine.start(profile)
            self._appended[profile] = slot.abandon(), slot.events
        return self._appended[profile]

    def finish(self, slot: DeviceText, *, cut: bool) -> tuple[bytes, bytes]:
        """End a text; return what was undecided (nothing with ``cut``) and what the rules append to any.

        A text that has reached its limit is idle on the device, undecided bytes and all: they are read back.
        """
        if slot.ended:
            return b"", slot.tail
        tail, events = self.appended(slot.profile)
        if cut:
            slot.events += events
            return b"", tail
        with self._device.active():
            text = self._buffers.text(slot.row)
        rest, tail = text.close()
        slot.events += text.events
        return rest, tail


@dataclass(slots=True)
class DeviceLane:
    """One text in the graph.

    Attributes:
        launched: steps that were launched for it.
        rows: pinned rows of logits, in turn, when log probabilities are asked for.
        ban: the state of the bans, followed on the host for those.
    """

    seat: Seat
    slot: DeviceText
    launched: int = 0
    rows: tuple[Tensor, ...] = ()
    ban: BanSlot | None = None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose results are on their way: where they will be, and whose they are, by row."""

    turn: int
    wait: Wait
    lanes: dict[int, DeviceLane]


class CudaGraph:
    """Everything that one decode step runs. The engine's thread owns it once `prepare` is done."""

    def __init__(
        self,
        device: Device,
        driver: Driver,
        model: Forward,
        shape: KvShape,
        tables: Tables,
        patch: GpuPatch,
        buffers: Buffers,
        sizes: Sizes,
        max_positions: int,
    ) -> None:
        self._device = device
        self._model = model
        self._tables = tables
        self._launcher = patch
        self._buffers = buffers
        self._sizes = sizes
        self._legal = LegalTokens(tables.bans, tables.vocab, sizes.tokens, sizes.eos_ids)
        self.patch = DeviceRules(device, tables, buffers)
        self._joined: dict[int, DeviceLane] = {}
        self._flight: _Flight | None = None
        self._prefix: tuple[int, ...] = ()
        self._prefix_seat: Seat | None = None
        with device.active():
            self.cache = FixedCache(shape, max_positions, sizes.slots)
            self._reports = Reports(device, buffers, sizes)
            buffers.rest_all(self.cache.pool.trash)
        self._graphs = Graphs(device, driver, sizes.slots, self.cache.pool.capacity)
        self.least_span = 0
        """Positions that every step looks at, at least: the self-test tries all graphs."""

    def prepare(self, progress: Callable[[int, int], None]) -> None:
        """Warm and capture every graph.

        Raises:
            CaptureFailedError: when one cannot be captured; only a new process can try again.
        """
        with self._device.active():
            self._graphs.warm(self._step)
            self._graphs.capture(self._step, progress)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Slots and span of every graph, the largest first."""
        return self._graphs.shapes

    @property
    def kept_bytes(self) -> int:
        """Bytes of keys and values that `keep` holds; they live as long as the graph."""
        seat = self._prefix_seat
        return seat.pool.capacity * seat.pool.shape.position_bytes if seat is not None else 0

    def keep(self, prefix: Sequence[int]) -> None:
        """Read what many prompts begin with, once and for all: `open` gives it to those that do."""
        if 0 < len(prefix) < self.cache.max_positions:
            with self._device.active():
                seat = SlotCache(self.cache.pool.shape, self.cache.max_positions).stage(len(prefix))
                self._read_parts([(seat, prefix)])
            self._prefix, self._prefix_seat = tuple(prefix), seat

    def open(self, slot: DeviceText, prompt: Sequence[int]) -> DeviceLane:
        """Return a lane for a prompt; `advance` has to read it from ``seat.length`` on."""
        size = len(self._prefix)
        known = len(prompt) > size and tuple(prompt[:size]) == self._prefix
        with self._device.active():
            seat = self.cache.seat(self._prefix_seat if known else None)
        slot.prompt, slot.row = tuple(prompt), seat.row
        lane = DeviceLane(seat, slot)
        if slot.draw.logprobs is not None:
            columns = self._sizes.columns
            lane.rows = tuple(self._device.pinned(columns, dtype=torch.float32) for _ in range(2))
            lane.ban = BanSlot(self._tables.bans, slot.profile)
        return lane

    def advance(self, reads: Sequence[Read[DeviceLane]], lanes: Sequence[DeviceLane]) -> list[DeviceLane]:
        """Read parts of prompts, launch a step, and return the lanes that the step before gave a token.

        Args:
            reads: lanes that have not joined; those whose prompt ends here join this step.
            lanes: all lanes that have joined before, in any order.
        """
        del lanes  # they are known: a lane steps from its last read until it is closed
        with self._device.active():
            self._read(reads)
            before, self._flight = self._flight, self._launch()
            if before is not None:
                return self._collect(before)
            if self._flight is None and self._joined:
                # Every token that these texts may have was drawn, and one was not seen.
                raise RuntimeError("texts are left without a step")
            return []

    def close(self, lane: DeviceLane) -> None:
        """Free the lane's row; a step that is on its way for it is not read."""
        self._joined.pop(lane.seat.row, None)
        with self._device.active():
            self._buffers.rest(lane.seat.row)
        self.cache.pool.remove(lane.seat.row)

    def reset(self) -> None:
        """Forget all lanes, after a step that failed half-way and left the device usable."""
        self._joined.clear()
        self._flight = None
        self.cache.pool.forget()
        with self._device.active():
            self._buffers.rest_all(self.cache.pool.trash)

    def rewrite(self, profile: int, tokens: Sequence[int]) -> bytes:
        """Push ``tokens`` through the transducer's kernel alone, in slot 0; return what comes out."""
        found, out = self._buffers.tensors, bytearray()
        with self._device.active():
            self._buffers.set_rules(0, profile)
            for token in tokens:
                found["token"][0].fill_(token)
                self._launcher.launch_step("transduce", 1)
                out += found["output"][0, : int(found["output_len"][0])].cpu().numpy().tobytes()
            if int(found["fst_state"][0]) >= 0:
                out += self._buffers.text(0).finish()
            self._buffers.rest(0)
            found["token"][0].fill_(IDLE)
        return bytes(out)

    def logits(self, row: int) -> Logits:
        """Return the row of logits that the last step drew from, biases and penalties taken. Waits."""
        with self._device.active():
            values: Logits = self._buffers.tensors["logits"][row].cpu().numpy().copy()
        return values

    def _step(self, slots: int, span: int) -> None:
        """Put a whole step on the stream: what a graph records."""
        found = self._buffers.tensors
        view = StepView(self.cache.pool, found["position"][:slots], span)
        found["logits"][:slots].copy_(self._model(found["input_id"][:slots], view))
        self._launcher.launch(slots)
        self._reports.pack(slots)

    def _read(self, reads: Sequence[Read[DeviceLane]]) -> None:
        parts = [(read.lane.seat, read.tokens[: len(read.tokens) - read.last]) for read in reads]
        self._read_parts([(seat, tokens) for seat, tokens in parts if tokens])
        for read in reads:
            if read.last:
                slot, row = read.lane.slot, read.lane.seat.row
                read.lane.seat.length += 1
                self._buffers.begin(row, slot.profile, slot.draw, slot.prompt, slot.limit)
                self._joined[row] = read.lane

    def _read_parts(self, parts: Sequence[tuple[Seat, Sequence[int]]]) -> None:
        if not parts:
            return
        tokens = [token for _, part in parts for token in part]
        view = BatchView([(seat, len(part)) for seat, part in parts], ())
        self._model(torch.tensor(tokens, device=self._device.place), view)
        for seat, part in parts:
            seat.length += len(part)

    def _launch(self) -> _Flight | None:
        """Launch a step, if any text may still draw; its rows are those of the bucket that holds them all."""
        live = {row: lane for row, lane in self._joined.items() if lane.launched < lane.slot.limit}
        if not live:
            return None
        positions = max(self.least_span, *(len(lane.slot.prompt) + lane.launched for lane in live.values()))
        slots = self._graphs.replay(max(live) + 1, positions)
        turn = self._reports.send(slots)
        for row, lane in live.items():
            lane.launched += 1
            if lane.rows:
                self._device.fetch(lane.rows[turn], self._buffers.tensors["logits"][row])
        return _Flight(turn, self._device.mark(), live)

    def _collect(self, flight: _Flight) -> list[DeviceLane]:
        """Wait for a step and take over what it did to the texts that are still wanted."""
        flight.wait()
        drawn = []
        for row, lane in flight.lanes.items():
            line = self._reports.line(flight.turn, row)
            if self._joined.get(row) is lane and line.token >= 0:
                self._take(lane, line, flight.turn)
                drawn.append(lane)
        if drawn:  # whose the matches are is not known, and only their sum is asked for
            drawn[0].slot.events += self._reports.events(flight.turn)
        return drawn

    def _take(self, lane: DeviceLane, line: Line, turn: int) -> None:
        slot = lane.slot
        slot.token, slot.step, slot.held = line.token, line.step, max(line.held, 0)
        slot.refused += line.refused
        slot.masked += line.event > 0
        slot.exhausted = line.event > 1
        slot.output, slot.ended = line.text, line.state < 0
        if slot.ended:
            slot.output, slot.tail = _split(line, self.patch.appended(slot.profile)[0])
            slot.stopped = line.token not in self._sizes.eos_ids
        if lane.ban is not None and slot.draw.logprobs is not None and not slot.exhausted:
            slot.logprob = self._logprob(lane, lane.ban, lane.rows[turn], slot.draw.logprobs)

    def _logprob(self, lane: DeviceLane, ban: BanSlot, row: Tensor, most: int) -> TokenLogprob:
        vocab, token = self._tables.vocab, lane.slot.token
        value: Logits = row.numpy()[: self._sizes.tokens]
        value = np.where(np.isnan(value), np.float32(-np.inf), value)
        if ban.active:
            value = masked(value, self._legal.mask(ban))
        found = token_logprob(value, token, most, vocab)
        if token not in self._sizes.eos_ids:
            ban.advance(vocab[token])
        return found


def _split(line: Line, tail: bytes) -> tuple[bytes, bytes]:
    """Part the end of a text into what the model wrote and what the rules appended.

    What the step had no room for is made up for, if it was appended. A user's kernel may have rewritten
    the end: then nothing tells the parts from one another, and all of it is the model's.
    """
    if line.size > len(line.text):
        return line.text[: line.size - len(tail)], tail
    return (line.text.removesuffix(tail), tail) if line.text.endswith(tail) else (line.text, b"")
