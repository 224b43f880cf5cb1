"""Damages the built-in kernels' PTX in small ways and counts how many are caught.

    python tests/simulate_mutants.py [--count N] [--seed S] [--kernel NAME]

A mutant is caught when it faults, races, or differs from the executor. One that the parser refuses is no
mutant. Survivors are printed with their line: docs/simulate.md says why each is equivalent or missed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from simulate_support import kernel, module, ptx, shared_bytes
from test_kernels_sample import ban_automaton

from ralbuild.contract.transducer import (
    COPY,
    DROP,
    EMIT,
    EVENT,
    STATE_BITS,
    Front,
    read_transducer,
    write_transducer,
)
from ralbuild.contract.vocab import read_vocab, write_vocab
from ralbuild.simulate.buffers import Tables
from ralbuild.simulate.cases import random_draws
from ralbuild.simulate.compare import Case, Comparison, compare_transduce
from ralbuild.simulate.compare_draws import DrawCase, compare_sample
from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.ptx.model import Module
from ralbuild.simulate.ptx.parser import parse_module
from ralbuild.simulate.session import Options

CLASSES, HELD, RULES, PROFILES = 6, 70, 5, 3
STATES = PROFILES + 2 * HELD
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


@dataclass(frozen=True, slots=True)
class Mutant:
    kernel: str
    kind: str
    line: int
    before: str
    after: str


def hard_table(seed: int):
    """Legal transitions with copies longer than a warp and strings longer than the output row."""
    rng = random.Random(seed)
    strings = [rng.randbytes(size) for size in (0, 1, 3, 32, 45, 200, 1060, 1500)]
    programs: list[list[tuple[int, int]]] = [[(COPY, 1)]]
    held = [0] * PROFILES + [1 + n // 2 for n in range(2 * HELD)]

    def program(consumed: int) -> int:
        ops = (
            [(EVENT, rng.randrange(RULES)), (EMIT, rng.randrange(len(strings)))] if rng.random() < 0.4 else []
        )
        if consumed > 33 and rng.random() < 0.7:
            if rng.random() < 0.4:  # a copy across the end of the output row
                ops += [(EMIT, 7), (EMIT, 7), (EMIT, 6)]
            ops.append((COPY, consumed))
            consumed = 0
        while consumed or rng.random() < 0.4:
            kind = rng.randrange(4)
            if kind == EMIT:
                ops.append((EMIT, rng.randrange(len(strings))))
            elif kind == EVENT:
                ops.append((EVENT, rng.randrange(RULES)))
            elif consumed:
                taken = rng.randint(1, consumed)
                ops.append((COPY if kind == COPY else DROP, taken))
                consumed -= taken
        programs.append(ops)
        return len(programs) - 1

    def entry(state: int) -> int:
        if held[state] == 0 and rng.random() < 0.5:
            return rng.randrange(PROFILES)  # program 0: a byte that no rule can touch
        grown = [to for to in range(STATES) if held[to] == held[state] + 1]
        to = (
            rng.choice(grown)
            if grown and rng.random() < 0.9
            else rng.choice([to for to in range(STATES) if held[to] <= held[state] + 1])
        )
        consumed = held[state] + 1 - held[to]
        plain = consumed == 1 and rng.random() < 0.5
        return to | (0 if plain else program(consumed)) << STATE_BITS

    rows = [[entry(state) for _ in range(CLASSES)] for state in range(STATES)]
    none = (1 << 32) - 1
    data = write_transducer(
        cls=[symbol % CLASSES for symbol in range(512)],
        trans=[entry for row in rows for entry in row],
        final=[program(held[state]) for state in range(STATES)],
        programs=programs,
        strings=strings,
        starts=list(range(PROFILES)),
        front=Front(modes=[(none, none, state, none) for state in range(PROFILES)]),
        words=(bytes(4352), bytes(32)),
        max_held=HELD,
        rules=RULES,
    )
    return read_transducer(data, "mutants")


def transduce_work() -> Callable[[Module], Comparison]:
    rng = random.Random(4)
    words = [bytes([byte]) for byte in range(256)] + [
        rng.randbytes(rng.choice([0, 2, 7, 33, 70])) for _ in range(60)
    ]
    tables = Tables(
        hard_table(2),
        ban_automaton([b"ab"]),
        read_vocab(write_vocab([*words, b"", b""]), "mutants"),
        (316, 317),
    )
    cases = []
    for number in range(32):
        tokens = [
            rng.randrange(-1, 321) if rng.random() < 0.3 else rng.randrange(256, 318)
            for _ in range(rng.randint(3, 8))
        ]
        if number % 8 == 0:
            tokens = [300 + k % 16 for k in range(40)]  # more bytes than the ring holds
        cases.append(
            Case(number % PROFILES, (*[t for t in tokens if t not in (316, 317)], rng.choice([316, 317, 5])))
        )
    options = Options(races=True, step_limit=40_000)
    one_end = replace(tables, eos_ids=(316,))

    def work(parsed: Module) -> Comparison:
        result = compare_transduce(parsed, kernel("transduce"), tables, cases, options, 32)
        if not result.ok:
            return result
        return compare_transduce(parsed, kernel("transduce"), one_end, cases[1:7], options, 6)

    return work


def sample_work() -> Callable[[Module], Comparison]:
    rng = np.random.default_rng(4)
    letters = list(b"abc ")
    words = [bytes([letter]) for letter in letters]
    words += [bytes(rng.choice(letters, int(rng.integers(0, 5))).tolist()) for _ in range(1100)]
    tables = Tables(
        hard_table(2), ban_automaton([b"ab", b"cac"]), read_vocab(write_vocab(words), "mutants"), (3,)
    )
    draws = random_draws(tables, 12, 5)
    state = next(
        x for x in range(1, 8) if tables.bans.trans[x * tables.bans.classes + tables.bans.cls[98]] == 0
    )
    walls: list[DrawCase] = []
    refused = [n for n, word in enumerate(words) if word[:1] == b"b"]
    for count, others in (
        (15, 1),
        (16, 1),
        (17, 1),
        (300, 0),
        (3, 2),
        (40, 9),
    ):  # bans near the limit of 16
        for top_p in (1.0, 0.4) if count < 99 else (1.0,):
            logits = np.full(len(draws[0].logits), -np.inf, np.float32)
            logits[refused[:count]] = 9.0 + np.arange(len(refused[:count])) / 64
            logits[4 : 4 + others] = 1.0
            walls.append(DrawCase(logits, 0.0 if others == 9 else 0.7, top_p, 77 + count, 3, state))
    for k in range(8):  # near ties, and rows that are refused to the end
        logits = np.full(len(draws[0].logits), -np.inf, np.float32)
        logits[4 + 7 * k : 4 + 7 * k + 300] = 1.0 + (k % 2)
        draws.append(
            replace(
                draws[0],
                logits=logits,
                temperature=float(k % 3),
                top_p=[1.0, 0.5][k % 2],
                done=0,
            )
        )
    options = Options(shared=shared_bytes("sample"), races=True, step_limit=40_000)
    quiet = Options(shared=shared_bytes("sample"), step_limit=400_000)

    def work(parsed: Module) -> Comparison:
        result = compare_sample(parsed, kernel("sample"), tables, draws, options, 32)
        return compare_sample(parsed, kernel("sample"), tables, walls, quiet, 8) if result.ok else result

    return work


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


def caught_by(mutant: Mutant, work: Callable[[Module], Comparison]) -> str:
    """Return what catches a mutant: a word, empty for nothing."""
    lines = ptx(mutant.kernel).splitlines()
    lines[mutant.line] = mutant.after
    try:
        result = work(parse_module("\n".join(lines)))
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


WORK = {"transduce": transduce_work, "sample": sample_work}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=130, help="mutants of each kernel")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernel", action="append", choices=list(WORK))
    options = parser.parse_args()
    tally: dict[tuple[str, str], list[int]] = {}
    survivors: list[Mutant] = []
    reasons: dict[str, int] = {}
    for name in options.kernel or WORK:
        work = WORK[name]()
        clean = work(module(name))
        assert clean.ok, (clean.difference, clean.fault, clean.races)
        for mutant in chosen(name, options.count, options.seed):
            how = caught_by(mutant, work)
            if how == "refused":
                continue
            row = tally.setdefault((name, mutant.kind), [0, 0])
            row[0] += bool(how)
            row[1] += 1
            reasons[how] = reasons.get(how, 0) + 1
            if not how:
                survivors.append(mutant)
                print(
                    f"survives: {name}:{mutant.line + 1} {mutant.kind}: {mutant.before.strip()} -> {mutant.after.strip()}",
                    flush=True,
                )
    for (name, kind), (good, total) in sorted(tally.items()):
        print(f"{name:<10} {kind:<26} {good:>4} of {total}")
    total = sum(row[1] for row in tally.values())
    print(
        f"caught {total - len(survivors)} of {total} ({100 * (1 - len(survivors) / total):.1f} %): {reasons}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
