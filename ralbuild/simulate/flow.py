"""Basic blocks, and the order in which groups of lanes run so that they meet again.

Blocks are ranked in a weak topological order (Bourdoncle 1993): a loop's blocks stand together, its
header first, what follows the loop after it. The group with the lowest state runs first; a group that
comes back to a loop's header by a back edge waits at the loop's end for the others inside. So lanes
that a branch parted meet at its immediate post-dominator, or before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.ptx.model import Function, Instruction, Operand, Symbol

WARP_WIDE = frozenset({"shfl", "vote", "match", "redux", "elect", "ldmatrix", "stmatrix", "mma"})
_LEAVING = frozenset({"bra", "brx", "ret", "exit"})


@dataclass(slots=True)
class Block:
    """Instructions that run together.

    Attributes:
        sync: ``""``; ``"warp"`` when the first instruction needs its warp; ``"block"`` for a barrier.
        leave: the branch or return that ends it, if any.
        taken: blocks that ``leave`` may go to; empty for a return.
        following: block that comes after it in the text; -1 for none.
    """

    number: int
    code: Sequence[Instruction]
    sync: str
    leave: Instruction | None
    taken: tuple[int, ...]
    following: int

    @property
    def successors(self) -> tuple[int, ...]:
        """Blocks that can come next."""
        falls = self.leave is None or self.leave.guard is not None
        return (*self.taken, self.following) if falls and self.following >= 0 else self.taken


@dataclass(slots=True)
class Flow:
    """The blocks of a function and their states.

    Attributes:
        states: block number of each state, the one to run first first.
        entry: state of the first block.
        edges: (from, to) to the state that the edge leads to.
    """

    blocks: list[Block]
    states: list[int] = field(default_factory=list)
    entry: int = 0
    edges: dict[tuple[int, int], int] = field(default_factory=dict)


def is_block_barrier(instruction: Instruction) -> bool:
    """Tell whether an instruction waits for other warps."""
    return instruction.opcode in ("bar", "barrier") and "warp" not in instruction.modifiers


def _needs_warp(instruction: Instruction) -> bool:
    return instruction.opcode in WARP_WIDE or instruction.modifiers[:1] == ("warp",)


def analyze(function: Function) -> Flow:
    """Split a function into blocks and rank them.

    Raises:
        PtxError: for a branch to nowhere, or code that runs past its end.
    """
    flow = Flow(_split(function))
    _rank(flow)
    return flow


def _split(function: Function) -> list[Block]:
    code = function.code
    if not code:
        raise PtxError(f"{function.name!r} has no instructions", function.line)
    starts = {0, *function.labels.values()}
    for item in code:
        if item.opcode in _LEAVING:
            starts.add(item.index + 1)
        elif is_block_barrier(item):
            starts |= {item.index, item.index + 1}
        elif _needs_warp(item):
            starts.add(item.index)
    cuts = sorted(at for at in starts if at < len(code))
    number_at = {at: number for number, at in enumerate(cuts)}
    blocks = []
    for number, at in enumerate(cuts):
        end = cuts[number + 1] if number + 1 < len(cuts) else len(code)
        part = code[at:end]
        first, last = part[0], part[-1]
        leave = last if last.opcode in _LEAVING else None
        following = number + 1 if number + 1 < len(cuts) else -1
        if following < 0 and (leave is None or leave.guard is not None):
            raise PtxError("the code ends without ret", last.line, last.text)
        sync = "block" if is_block_barrier(first) else "warp" if _needs_warp(first) else ""
        if sync and first.guard is not None:
            raise PtxError("a barrier or warp-wide instruction under a predicate", first.line, first.text)
        body = part[:-1] if leave else part
        taken = _targets(function, leave, number_at) if leave else ()
        blocks.append(Block(number, body, sync, leave, taken, following))
    return blocks


def _targets(function: Function, leave: Instruction, number_at: dict[int, int]) -> tuple[int, ...]:
    """Return the blocks that a branch names."""
    if leave.opcode in ("ret", "exit"):
        return ()
    operands = leave.operands
    count = 1 if leave.opcode == "bra" else 2
    name = _label(operands[-1]) if len(operands) == count else None
    if leave.opcode == "brx" and leave.guard is not None:
        raise PtxError("an indirect branch under a predicate", leave.line, leave.text)
    labels = (name,) if leave.opcode == "bra" else function.tables.get(name or "")
    if name is None or labels is None:
        raise PtxError("a branch needs a label, or a list of them", leave.line, leave.text)
    targets = []
    for label in labels:
        at = function.labels.get(str(label))
        if at is None or at not in number_at:
            raise PtxError(f"no instruction follows the label {label!r}", leave.line, leave.text)
        targets.append(number_at[at])
    return tuple(targets)


def _label(operand: Operand) -> str | None:
    return operand.name if isinstance(operand, Symbol) else None


def _rank(flow: Flow) -> None:
    """Give every block a state, and every loop header one more, for groups that come round."""
    successors = {block.number: block.successors for block in flow.blocks}
    order: list[int] = []
    loops: dict[int, int] = {}
    _order(set(successors), 0, successors, order, loops)
    rank = {number: at for at, number in enumerate(order)}
    keys = {(2 * rank[number], 0, number) for number in rank}
    keys |= {(2 * last + 1, -rank[header], header) for header, last in loops.items()}
    ordered = sorted(keys)
    flow.states = [key[2] for key in ordered]
    state_of = {key: at for at, key in enumerate(ordered)}
    flow.entry = state_of[(2 * rank[0], 0, 0)]
    for block in flow.blocks:
        for to in block.successors:
            key = (2 * rank[to], 0, to)
            if rank[to] <= rank[block.number] and to in loops:
                key = (2 * loops[to] + 1, -rank[to], to)
            flow.edges[block.number, to] = state_of[key]


def _order(
    nodes: set[int],
    entry: int,
    successors: dict[int, tuple[int, ...]],
    order: list[int],
    loops: dict[int, int],
) -> None:
    """Append ``nodes`` in weak topological order; ``loops`` gets the last place of each loop header."""
    for component in _components(nodes, entry, successors):
        inside = set(component)
        header = _header(inside, entry, nodes, successors)
        order.append(header)
        if len(inside) > 1:
            start = next((to for to in successors[header] if to in inside and to != header), header)
            _order(inside - {header}, start, successors, order, loops)
        if len(inside) > 1 or header in successors[header]:
            loops[header] = len(order) - 1


def _header(inside: set[int], entry: int, nodes: set[int], successors: dict[int, tuple[int, ...]]) -> int:
    """Return where a component is entered."""
    if entry in inside:
        return entry
    outside = nodes - inside
    entered = {to for node in outside for to in successors[node] if to in inside}
    return min(entered or inside)


def _components(nodes: set[int], entry: int, successors: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """Return the strongly connected components in topological order (Tarjan 1972, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in [entry, *sorted(nodes)]:
        if root in index or root not in nodes:
            continue
        work = [(root, iter(successors[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, following = work[-1]
            for to in following:
                if to not in nodes:
                    continue
                if to not in index:
                    index[to] = low[to] = len(index)
                    stack.append(to)
                    on_stack.add(to)
                    work.append((to, iter(successors[to])))
                    break
                if to in on_stack:
                    low[node] = min(low[node], index[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    found.append(_unwind(stack, on_stack, node))
    return found[::-1]


def _unwind(stack: list[int], on_stack: set[int], node: int) -> list[int]:
    component = []
    while True:
        top = stack.pop()
        on_stack.discard(top)
        component.append(top)
        if top == node:
            return component
