"""What is likely wrong with a user's kernel, read from its text. Nothing here runs the kernel.

Every defect has a stable id, a place and a remedy; docs/kernels.md lists them. A comment
``# ral: allow K113`` at the end of a line accepts a defect on that line. Only what the text shows is
reported: an address that cannot be followed is not guessed at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ralbuild.compile.addresses import MAX_DEPTH, Scope, Sum, argument, call_name
from ralbuild.compile.spec import ELEMENT_SIZES, KernelSpec
from ralbuild.compile.user_data import PREFIX
from ralbuild.compile.user_source import is_jit, parse_source
from ralbuild.contract.buffers import OUTPUT_BYTES, RING_BYTES
from ralbuild.errors import CompileError, Problem

LINT_RULES: Mapping[str, str] = {
    "K101": "ids are compared with elements that are too narrow to hold them",
    "K102": "a store lands beside the element that was read",
    "K103": "an access reaches past the bound that its mask checks",
    "K104": "a program writes an element that belongs to another program",
    "K105": "the cost grows with the number of terms",
    "K106": "a bound is a number in the source",
    "K110": "tensor descriptors",
    "K111": "a helper that is not inlined",
    "K112": "a result that depends on the order of atomic operations",
    "K113": "an access without a mask",
    "K114": "print in a kernel",
    "K115": "autotune or heuristics",
}
"""Id to title. An id never changes its meaning."""

ID_BUFFERS = frozenset({"token", "terms", "eos_ids", "eos_id"})
"""Buffers that hold token ids, which need more than 16 bits."""
ROW_SIZES = {"ring": RING_BYTES, "output": OUTPUT_BYTES}
"""Elements in a slot's row: a tile of that size needs no mask, and such a bound is no forgotten parameter."""
_ALLOW = re.compile(r"ral:\s*allow\s+((?:K\d{3}[,\s]*)+)")
_DESCRIPTORS = ("make_tensor_descriptor", "_experimental_make_tensor_descriptor", "load_tensor_descriptor")


@dataclass(frozen=True, slots=True)
class Defect:
    """One thing that the lint found; ``problem`` holds the place, the words and the remedy."""

    rule: str
    problem: Problem


@dataclass(frozen=True, slots=True)
class _Access:
    """A load or a store: the call, the pointer parameter, and the sum of the rest of the address."""

    call: ast.Call
    base: str | None
    offset: Sum
    mask: ast.expr | None
    store: bool


def lint_kernel(spec: KernelSpec) -> tuple[Defect, ...]:
    """Return the defects of a user's kernel and its helpers, in the order of the file.

    Raises:
        CompileError: when the file is no Python, or its expressions are nested too deeply to be read.
    """
    tree, comments = parse_source(spec.source, spec.filename)
    try:
        return _lint(spec, tree, comments)
    except RecursionError:
        raise CompileError("expressions are nested too deeply", place=spec.filename) from None


def _lint(spec: KernelSpec, tree: ast.Module, comments: Mapping[int, str]) -> tuple[Defect, ...]:
    found: list[Defect] = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and any(is_jit(item) for item in function.decorator_list):
            own = function.name == spec.entry
            types = spec.signature if own else _guessed_types(function)
            buffers = spec.buffers if own else {}
            found += _Linter(spec.filename, function, types, buffers, spec.constants).run()
    kept = {_key(item): item for item in found if item.rule not in _allowed(comments, item)}
    return tuple(kept[key] for key in sorted(kept))


def _key(defect: Defect) -> tuple[int, int, str]:
    _, line, column = defect.problem.place.rsplit(":", 2)
    return int(line), int(column), defect.rule


def _allowed(comments: Mapping[int, str], defect: Defect) -> list[str]:
    line = _key(defect)[0]
    match = _ALLOW.search(comments.get(line, ""))
    return re.findall(r"K\d{3}", match[1]) if match else []


def _guessed_types(function: ast.FunctionDef) -> dict[str, str]:
    """Take a helper's parameter for a pointer when its name says so; its element type is not known."""
    return {item.arg: "*" for item in function.args.args if re.search(r"_ptrs?$", item.arg)}


class _Linter:
    """Looks at one function."""

    def __init__(
        self,
        filename: str,
        function: ast.FunctionDef,
        types: Mapping[str, str],
        buffers: Mapping[str, str],
        constants: Mapping[str, int],
    ) -> None:
        self.filename = filename
        self.function = function
        self.types = types
        self.buffers = buffers
        self.constants = constants
        self.scope = Scope(function, [name for name, kind in types.items() if kind.startswith("*")])
        self.nodes = [node for part in function.body for node in ast.walk(part)]
        self.accesses = [access for node in self.nodes if (access := self._access(node)) is not None]
        self.found: list[Defect] = []

    def run(self) -> list[Defect]:
        """Apply every rule."""
        self._check_decorators()
        for node in self.nodes:
            self._check_narrow(node)
            self._check_calls(node)
            self._check_loop(node)
            self._check_literal_bound(node)
        for access in self.accesses:
            self._check_mask(access)
            self._check_bound(access)
            if access.store:
                self._check_neighbour(access)
        return self.found

    def _report(self, rule: str, node: ast.expr | ast.stmt, message: str, hint: str) -> None:
        place = f"{self.filename}:{node.lineno}:{node.col_offset + 1}"
        self.found.append(Defect(rule, Problem(f"{rule}: {message}", place, hint)))

    def _access(self, node: ast.AST) -> _Access | None:
        name = call_name(node)
        if name not in ("load", "store") or not isinstance(node, ast.Call) or not node.args:
            return None
        base, offset = self.scope.address(node.args[0])
        mask = argument(node, 1 if name == "load" else 2, "mask")
        return _Access(node, base, offset, mask, name == "store")

    def _check_decorators(self) -> None:
        for item in self.function.decorator_list:
            call = item if isinstance(item, ast.Call) else None
            flag = argument(call, 99, "noinline") if call else None
            if isinstance(flag, ast.Constant) and flag.value:
                self._report(
                    "K111",
                    item,
                    f"{self.function.name!r} is not inlined: its name stays in the object, and calls cost",
                    "remove `noinline=True`",
                )
            name = ast.unparse(call.func if call else item).rsplit(".", 1)[-1]
            if name in ("autotune", "heuristics"):
                self._report(
                    "K115",
                    item,
                    f"`{name}` chooses values at the first launch; ahead of time nothing is launched",
                    "give the constants in the transformer's config",
                )

    def _check_narrow(self, node: ast.AST) -> None:
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
            return
        sides = [self._loaded_from(node.left), self._loaded_from(node.comparators[0])]
        for narrow, wide in (sides, sides[::-1]):
            if narrow is None or wide is None or self.buffers.get(wide) not in ID_BUFFERS:
                continue
            element = self.types[narrow].removeprefix("*")
            if element[:1] in "iu" and ELEMENT_SIZES.get(element, 4) < 4:
                most = (1 << (8 * ELEMENT_SIZES[element] - (element[0] == "i"))) - 1
                self._report(
                    "K101",
                    node,
                    f"{narrow!r} holds {element}, {wide!r} holds ids: none above {most} can ever match",
                    "compare ids with `token`, or bytes with bytes: a list of text is passed as UTF-8 "
                    "to a parameter of type *uint8",
                )

    def _loaded_from(self, node: ast.expr) -> str | None:
        """Return the parameter that a value was loaded from, or that it is."""
        node = self.scope.value(node)
        for _ in range(MAX_DEPTH):
            if not isinstance(node, ast.Subscript):
                break
            node = self.scope.value(node.value)
        if isinstance(node, ast.Name) and node.id in self.types:
            return node.id
        access = self._access(node)
        return access.base if access is not None and not access.store else None

    def _check_calls(self, node: ast.AST) -> None:
        name = call_name(node)
        if not isinstance(node, ast.Call) or not name:
            return
        if name in _DESCRIPTORS:
            self._report(
                "K110",
                node,
                f"`{name}` becomes instructions that the pinned assembler (CUDA 12.2) does not know",
                "use tl.load and tl.store with a mask",
            )
        elif name in ("print", "device_print"):
            self._report(
                "K114",
                node,
                "prints from the device at every launch: it is not ignored, and it is slow",
                "remove it; `ralbuild debug --kernel` runs the kernel on the CPU, where print and pdb work",
            )
        elif name.startswith("atomic_"):
            self._check_atomic(node, name)

    def _check_atomic(self, node: ast.Call, name: str) -> None:
        base = self.scope.address(node.args[0])[0] if node.args else None
        floating = name == "atomic_add" and self.types.get(base or "", "").startswith(("*fp", "*bf"))
        ignored = any(isinstance(item, ast.Expr) and item.value is node for item in self.nodes)
        if floating or (not ignored and name not in ("atomic_max", "atomic_min")):
            why = "floating-point sums depend on it" if floating else "the value it returns is used"
            self._report(
                "K112",
                node,
                f"programs reach `{name}` in no fixed order, and {why}: the same request may differ",
                "add whole numbers, or write one partial result per program",
            )

    def _check_loop(self, node: ast.AST) -> None:
        if (
            not isinstance(node, ast.For)
            or call_name(node.iter) != "range"
            or not isinstance(node.target, ast.Name)
        ):
            return
        call = node.iter
        assert isinstance(call, ast.Call)
        bound = call.args[min(1, len(call.args) - 1)] if call.args else None
        scalar = isinstance(bound, ast.Name) and self.types.get(bound.id, "*")[0] != "*"
        if not scalar or len(call.args) > 2:
            return
        for inner in ast.walk(node):
            access = self._access(inner)
            if access is None or not self._holds_terms(access.base):
                continue
            if access.offset.terms == ((node.target.id, 1),) and self._compared(node, inner):
                self._report(
                    "K105",
                    node,
                    f"one round per term: {ast.unparse(bound or call)} dependent loads for every token",
                    "load the terms at once with tl.arange and a mask, or use the built-in html_enhancer, "
                    "whose cost does not depend on the number of terms",
                )
                return

    def _holds_terms(self, parameter: str | None) -> bool:
        buffer = self.buffers.get(parameter or "", "")
        return buffer == "terms" or buffer.startswith(PREFIX)

    def _compared(self, loop: ast.For, load: ast.AST) -> bool:
        for inner in ast.walk(loop):
            if isinstance(inner, ast.Compare) and isinstance(inner.ops[0], ast.Eq | ast.NotEq):
                sides = [self.scope.value(item) for item in (inner.left, *inner.comparators)]
                if any(side is load for side in sides):
                    return True
        return False

    def _check_literal_bound(self, node: ast.AST) -> None:
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Lt | ast.LtE):
            return
        bound = node.comparators[0]
        if (
            not isinstance(bound, ast.Constant)
            or type(bound.value) is not int
            or bound.value in ROW_SIZES.values()
        ):
            return
        offset = self.scope.sum(node.left)
        if offset.is_vector and offset.by_program:
            self._report(
                "K106",
                node,
                f"the bound is {bound.value}, whatever the buffers hold",
                "take it as a parameter: `MAX_SEQ_LEN: tl.constexpr` is derived, `output_len` is the length",
            )

    def _check_mask(self, access: _Access) -> None:
        tile = access.offset.tiled
        if access.mask is not None or tile is None or access.base is None:
            return
        size = int(tile) if tile.isdecimal() else self.constants.get(tile, 0)
        if size != ROW_SIZES.get(self.buffers.get(access.base, "")):
            verb = "stores to" if access.store else "loads from"
            self._report(
                "K113",
                access.call,
                f"{verb} {access.base!r} without a mask: the last program reaches past the end",
                "pass `mask=`, comparing the offset with the number of elements",
            )

    def _check_bound(self, access: _Access) -> None:
        if access.mask is None or not access.offset.is_vector or access.base is None:
            return
        covers = [
            cover for part in self.scope.conjuncts(access.mask) for cover in self._cover(part, access.offset)
        ]
        past = access.offset.shift - max(covers, default=0)
        if past > 0:
            what = "checks another element" if covers else "does not bound the offset"
            self._report(
                "K103",
                access.call,
                f"the mask {what}: the last lane reaches {past} past the end of {access.base!r}",
                f"compare the shifted offset with the bound: `offset + {access.offset.shift} < n`",
            )

    def _cover(self, part: ast.expr, offset: Sum) -> Iterator[int]:
        """Yield the largest shift for which ``part`` keeps ``offset`` below its bound."""
        if not isinstance(part, ast.Compare) or len(part.ops) != 1:
            return
        left, right = part.left, part.comparators[0]
        if isinstance(part.ops[0], ast.Gt | ast.GtE):
            left, right = right, left
        elif not isinstance(part.ops[0], ast.Lt | ast.LtE):
            return
        low, high = self.scope.sum(left), self.scope.sum(right)
        if low.terms == offset.terms:
            yield low.shift - (high.shift if high.terms else 0)

    def _check_neighbour(self, store: _Access) -> None:
        if not store.offset.is_vector or store.base is None:
            return
        loads = [
            item
            for item in self.accesses
            if not item.store
            and item.base == store.base
            and item.offset.terms == store.offset.terms
            and item.offset.shift != store.offset.shift
        ]
        if not loads:
            return
        shift = store.offset.shift - loads[0].offset.shift
        if store.offset.tiled is not None and not self._stays_in_row(store):
            self._report(
                "K104",
                store.call,
                f"at the edge of a block it writes element {shift:+d}, which another program reads: a race",
                "write only elements of the program's own block, or to another buffer",
            )
        if not self._barrier_between(loads[0].call, store.call):
            self._report(
                "K102",
                store.call,
                f"writes {store.base!r} at {shift:+d} from where it was read: what stood there is lost",
                "move the text that follows before writing, with tl.debug_barrier() between loads and stores",
            )

    def _stays_in_row(self, access: _Access) -> bool:
        """Tell whether the mask bounds the lane by itself: then a program's tile is a row of its own."""
        for part in self.scope.conjuncts(access.mask):
            if isinstance(part, ast.Compare):
                low = self.scope.sum(part.left)
                if low.is_vector and not low.by_program:
                    return True
        return False

    def _barrier_between(self, load: ast.Call, store: ast.Call) -> bool:
        return any(
            call_name(node) == "debug_barrier" and load.lineno < node.lineno < store.lineno
            for node in self.nodes
            if isinstance(node, ast.Call)
        )
