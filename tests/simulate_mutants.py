"""Damages the built-in kernels' PTX in small ways and counts how many are caught.

    python tests/simulate_mutants.py [--count N] [--seed S] [--kernel NAME] [--first N]

A mutant is caught when it faults, races, or differs from the executor. One that the parser refuses is no
mutant; nor is one of `EQUIVALENT`, which can change nothing, with the reason why. Survivors are printed with
their line of the PTX and of the kernel's source.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from compile_support import Shelf, specs, toolchain
from mutant_sample import sample_stages
from mutant_transduce import Stage, edge_table, transduce_stages
from simulate_support import kernel, module, ptx, shared_bytes
from test_kernels_sample import ban_automaton

from ralbuild.compile.source_lines import SourceLines, source_lines
from ralbuild.contract.vocab import read_vocab, write_vocab
from ralbuild.simulate.buffers import Tables
from ralbuild.simulate.compare import Comparison
from ralbuild.simulate.compare_feedback import compare_around
from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.ptx.model import Module
from ralbuild.simulate.ptx.parser import parse_module
from ralbuild.simulate.session import Options

OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
NEARBY = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
OTHER = {
    "add": "sub",
    "sub": "add",
    "and": "or",
    "or": "and",
    "xor": "or",
    "min": "max",
    "max": "min",
    "shl": "shr",
}


EQUIVALENT = (
    ("", "off by one in a bound", r"^for (done|first) in range\(0, ", r"setp\.le",
     "one round more when the size is a multiple of the step: every lane of it is masked"),
    ("", "predicate", r"^tl\.store\((fst_state|front|read_pos|pending_pos|output_len|token|ban_\w+|draw_event|step)\b",
     r"@!?%p\d+ st\.global|^st\.global", "all threads of the block hold the same value for the same address"),
    ("feedback", "off by one in a constant", r"^$", r"and\.b32.*, 25", "the lowest bit of a multiple of 8"),
    ("feedback", "off by one in a constant", r"^$", r"shl\.b64.*, 33", "the high word of a sum below 2^32 is zero"),
    ("feedback", "predicate", r"^$", r"st\.shared\.b64 \[ %r58 ",
     "every lane of a warp holds the warp's sum, for one address"),
    ("penalize", "off by one in a bound", r"tl\.where\(value > 0", r"setp\.ge\.f32",
     "zero stays zero, whether divided or multiplied"),
    ("penalize|feedback", "no predicate", r"tl\.load\(", r"^ld\.global",
     "the address stays in its buffer, and what a lane that is off loads is not used"),
    ("transduce", "no predicate", r"tl\.load\(ring \+", r"ld\.global",
     "the address stays within the ring, and what a masked lane loads is not stored"),
    ("sample", "off by one in a constant", r"tl\.load\(row \+ ids", r"mov\.b32.*-838860[78]",
     "minus infinity becomes NaN, which the next line of the source makes minus infinity"),
    ("sample", "off by one in a bound", r"going & \(here > 0\)", r"setp\.ge", "state 0 of the bans leads to itself"),
    ("sample", "off by one in a constant", r"^$", r"selp\.b32.*, 2, 0,", "the largest of ones and zeros is only compared with zero"),
    ("transduce", "off by one in a constant", r"b0 < 0xC2, 5,", r"selp\.b32.*, 6, %p",
     "no character has more than four bytes, so every need above four is alike"),
    ("sample", "predicate", "", r"st\.shared\.b(32|64) \[ %r(917|170|308|457|458) ",
     "every lane of a warp holds what the warp has in common, for one address"),
    ("sample", "off by one", r"tl\.log\(", r"setp\.l[te]\.u32.*213909504[01]",
     "tests for infinity in a logarithm whose argument is finite"),
    ("sample", "off by one in a bound|swap a compare", r"tl\.log\(", r"0f00800000",
     "scales subnormal arguments by 2^23 and takes 23 off the exponent: exact, and no argument is subnormal"),
)  # fmt: skip
"""Kernel, kind, source line, changed line, and why nothing can come of it: patterns to search for."""


@dataclass(frozen=True, slots=True)
class Mutant:
    kernel: str
    kind: str
    line: int
    before: str
    after: str


def first_failure(stages: Iterable[Stage], parsed: Module) -> Comparison:
    """Run stages until one fails; the cheapest stand first."""
    for stage in stages:
        result = stage(parsed)
        if not result.ok:
            return result
    return result


def around_stages(name: str, sizes: Sequence[tuple[int, int, int]]) -> list[Stage]:
    """Random slots: (launches, slots, tokens), one after another."""
    bans, fst = ban_automaton([b"ab"]), edge_table()
    options = Options(shared=shared_bytes(name), races=True, step_limit=40_000)

    def stage(seed: int, launches: int, slots: int, tokens: int) -> Stage:
        tables = Tables(fst, bans, read_vocab(write_vocab([b"a"] * tokens), "around"), (3,))
        return lambda parsed: compare_around(
            parsed, kernel(name), tables, launches, seed, options, slots=slots
        )

    return [stage(seed, *size) for seed, size in enumerate(sizes)]


def variants(line: str) -> Iterator[tuple[str, str]]:
    """Every small damage of one line: (kind, line)."""
    stripped = line.strip()
    if stripped.startswith("bar."):
        yield "drop a barrier", "// " + line
    found = re.search(r"setp\.(\w+)", line)
    if found and found[1] in OPPOSITE:
        yield "swap a compare", line.replace(f"setp.{found[1]}", f"setp.{OPPOSITE[found[1]]}")
    if found and found[1] in NEARBY and ".b32" not in line:
        yield "off by one in a bound", line.replace(f"setp.{found[1]}", f"setp.{NEARBY[found[1]]}")
    number = re.search(r", (-?\d+)(?=[,;])", line)
    if number and not stripped.startswith(("shfl", "bar")):
        changed = f", {int(number[1]) + 1}"
        yield "off by one in a constant", line[: number.start()] + changed + line[number.end() :]
    if stripped.startswith("@%p"):
        yield "wrong predicate", line.replace("@%p", "@!%p")
        if " bra" not in line and "\tbra" not in line:
            yield "no predicate", re.sub(r"@%p\d+ ", "", line)
    offset = re.search(r"\+ 0 \]", line)
    if offset:
        size = 4 if re.search(r"\.[bu]32", line) else 8 if ".b64" in line else 1
        yield "wrong offset", line.replace("+ 0 ]", f"+ {size} ]")
    opcode = re.match(r"\s*(\w+)\.", line)
    if opcode and opcode[1] in OTHER and not re.search(r"\.(wide|pred)", line):
        if not (opcode[1] == "xor" and ".pred" in line) and not (
            opcode[1] in ("min", "max") and "NaN" in line
        ):
            yield "another operation", line.replace(f"{opcode[1]}.", f"{OTHER[opcode[1]]}.", 1)


def all_mutants(name: str) -> list[Mutant]:
    out = []
    for number, line in enumerate(ptx(name).splitlines()):
        if ";" in line and not line.strip().startswith((".", "//")):
            out += [
                Mutant(name, kind, number, line, changed)
                for kind, changed in variants(line)
                if changed != line
            ]
    return out


@cache
def source_text(name: str, line: int) -> str:
    """The kernel's source behind a line of its PTX, counted from 0."""
    return map_of(name).text(line + 1)


@cache
def map_of(name: str) -> SourceLines:
    return source_lines(specs()[name], "sm_80", ptx(name).encode(), toolchain(), Shelf())


def why_equivalent(mutant: Mutant) -> str:
    """Return why a mutant can change nothing; empty for all others."""
    source = source_text(mutant.kernel, mutant.line)
    if mutant.line in copies_at_an_end(mutant.kernel):
        return "a program of an end copies nothing: nothing is pending when it runs"
    for name, kind, place, changed, reason in EQUIVALENT:
        if (
            re.fullmatch(name or ".*", mutant.kernel)
            and re.search(kind, mutant.kind)
            and re.search(place, source)
            and re.search(changed, mutant.after.strip())
        ):
            return reason
    return ""


@cache
def copies_at_an_end(name: str) -> range:
    """Lines of `transduce` that copy for the program at the end of a text: the last program that is run."""
    if name != "transduce":
        return range(0)
    lines = ptx(name).splitlines()
    branch = max(number for number, line in enumerate(lines) if "brx.idx" in line)
    first = max(number for number in range(branch) if ".branchtargets" in lines[number]) + 1
    begin = next(n for n, line in enumerate(lines) if line.startswith(lines[first].strip(" \t,;") + ":"))
    return range(begin, next(n for n in range(begin, len(lines)) if "bra.uni" in lines[n]))


def caught_by(mutant: Mutant, stages: Sequence[Stage]) -> str:
    """Return what catches a mutant: a word, empty for nothing."""
    lines = ptx(mutant.kernel).splitlines()
    lines[mutant.line] = mutant.after
    try:
        result = first_failure(stages, parse_module("\n".join(lines)))
    except PtxError:
        return "refused"
    if result.fault:
        return result.fault.kind
    if result.difference:
        return "difference"
    return "race" if result.races else ""


def chosen(name: str, count: int, seed: int) -> list[Mutant]:
    """Take every kind in turn, so that rare kinds are all there."""
    rng = random.Random(seed)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in all_mutants(name):
        kinds.setdefault(mutant.kind, []).append(mutant)
    for group in kinds.values():
        rng.shuffle(group)
    out: list[Mutant] = []
    while len(out) < count and any(kinds.values()):
        out += [group.pop() for group in kinds.values() if group]
    return out[:count]


STAGES = {
    "transduce": transduce_stages,
    "sample": sample_stages,
    "penalize": partial(
        around_stages, "penalize", [(2, 16, 4500), *((1, 16, 100 + 257 * k) for k in range(8))]
    ),
    "feedback": partial(around_stages, "feedback", [(1, 964 - 129 * k, 60) for k in range(8)]),
}


@dataclass(slots=True)
class Tally:
    """What became of the mutants of a kernel."""

    caught: dict[str, int] = field(default_factory=dict)
    equivalent: dict[str, int] = field(default_factory=dict)
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.caught.values()) + len(self.survivors)


def run_mutants(
    name: str, count: int, seed: int, tell: Callable[[str], None] = print, first: int = 0
) -> Tally:
    """Damage a kernel ``count`` times, but for the ``first`` of them, and say what catches it."""
    stages = STAGES[name]()
    clean = first_failure(stages, module(name))
    assert clean.ok, (clean.difference, clean.fault, clean.races)
    tally = Tally()
    for number, mutant in enumerate(chosen(name, count, seed)[first:], first):
        if number > first and number % 5 == 0:
            tell(f"{name}: {number} mutants, {sum(tally.caught.values())} of {tally.total} caught")
        reason = why_equivalent(mutant)
        how = "" if reason else caught_by(mutant, stages)
        if reason:
            tally.equivalent[reason] = tally.equivalent.get(reason, 0) + 1
        elif how and how != "refused":
            tally.caught[how] = tally.caught.get(how, 0) + 1
        elif not how:
            tally.survivors.append(mutant)
            place = map_of(name).place(mutant.line + 1)
            tell(
                f"survives: {name}:{mutant.line + 1} {mutant.kind}: {mutant.before.strip()} -> "
                f"{mutant.after.strip()}  [{place}: {source_text(name, mutant.line)}]"
            )
    return tally


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=130, help="mutants of each kernel")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="begin behind as many of the mutants")
    parser.add_argument("--kernel", action="append", choices=list(STAGES))
    options = parser.parse_args()
    for name in options.kernel or STAGES:
        tally = run_mutants(
            name, options.count, options.seed, partial(print, flush=True), first=options.first
        )
        good = tally.total - len(tally.survivors)
        print(f"{name}: caught {good} of {tally.total} ({100 * good / tally.total:.1f} %): {tally.caught}")
        for reason, count in sorted(tally.equivalent.items()):
            print(f"  {count} equivalent: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
