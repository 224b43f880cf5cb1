"""Damages the built-in kernels' PTX in small ways and counts how many are caught.

    python tests/simulate_mutants.py [--count N] [--seed S] [--kernel NAME]

A mutant is caught when it faults, races, or differs from the executor. One that the parser refuses is no
mutant; nor is one of `EQUIVALENT`, which can change nothing, with the reason why. Survivors are printed with
their line of the PTX and of the kernel's source.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from compile_support import Shelf, specs, toolchain
from simulate_support import kernel, module, ptx, shared_bytes
from test_kernels_sample import ban_automaton
from test_kernels_transduce import RandomMachine

from ralbuild.compile.source_lines import SourceLines, source_lines
from ralbuild.config.load import load_config
from ralbuild.contract.bans import BanTable
from ralbuild.contract.transducer import (
    COPY,
    DROP,
    EMIT,
    EVENT,
    STATE_BITS,
    TransducerTable,
    read_transducer,
    write_transducer,
)
from ralbuild.contract.transducer_table import Front
from ralbuild.contract.vocab import read_vocab, write_vocab
from ralbuild.fold.folding import fold
from ralbuild.simulate.buffers import Tables
from ralbuild.simulate.cases import Splitter, random_draws
from ralbuild.simulate.compare import Case, Comparison, compare_transduce
from ralbuild.simulate.compare_draws import DrawCase, compare_sample
from ralbuild.simulate.compare_feedback import compare_around
from ralbuild.simulate.draws import CANDIDATES
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


Ops = list[tuple[int, int]]


def final_program(state: int, held: int, program: Callable[[int], int], programs: list[Ops]) -> int:
    """Ends of all kinds: nothing at all, copies behind a text, texts across the end of the output row."""
    kind = state % 5
    if kind == 0 and held == 0:
        programs.append([])
    elif kind < 3:
        return program(held)
    else:
        full = [(EMIT, 7), (EMIT, 7), (EMIT, 6)] if kind == 3 else [(EMIT, 3)]
        tail = [(COPY, held)] if held else []
        programs.append([*full, *tail, (EMIT, 5), (EVENT, 1), (EMIT, 7)])
    return len(programs) - 1


def hard_table(seed: int) -> TransducerTable:
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
    final = [final_program(state, held[state], program, programs) for state in range(STATES)]
    return table_of(CLASSES, rows, final, programs, strings, PROFILES, HELD, RULES)


def table_of(
    classes: int,
    rows: list[list[int]],
    final: list[int],
    programs: list[Ops],
    strings: list[bytes],
    profiles: int,
    held: int,
    rules: int,
) -> TransducerTable:
    """Return a table whose bytes have their class by turns, and whose profiles start at its first states."""
    none = (1 << 32) - 1
    data = write_transducer(
        cls=[symbol % classes for symbol in range(512)],
        trans=[entry for row in rows for entry in row],
        final=[(program, program) for program in final],
        programs=programs,
        strings=strings,
        starts=list(range(profiles)),
        front=Front(modes=[(none, none, state, none, 0) for state in range(profiles)]),
        words=(bytes(4352), bytes(32)),
        max_held=held,
        rules=rules,
    )
    return read_transducer(data, "mutants")


def edge_table() -> TransducerTable:
    """One state: a byte that emits 4,060 bytes, and bytes that are copied one by one, past the row's end."""
    strings = [bytes(range(1, 251)) * 4 + b"." * 60, b"ab", b"-" * 1000]
    fill = [(EMIT, 2), (EMIT, 2), (EMIT, 2), (EMIT, 0), (COPY, 1)]
    programs = [[(COPY, 1)], fill, [(DROP, 1), (EMIT, 1)], [(COPY, 1), (EVENT, 0)]]
    rows = [[0, 1 << STATE_BITS, 2 << STATE_BITS, 3 << STATE_BITS]]
    return table_of(4, rows, [4], [*programs, []], strings, 1, 1, 1)


LONGEST = 70


def chain_table() -> TransducerTable:
    """A byte of class 0 is held back; one of class 1 copies all that is held, of class 2 the last byte alone."""
    programs: list[Ops] = [[(COPY, 1)], []]
    rows, final = [], []
    for held in range(LONGEST + 1):
        programs += [[(COPY, held + 1)], [(DROP, held), (COPY, 1)] if held else [(COPY, 1)]]
        full = [(EMIT, 1)] if held > LONGEST - 4 else []  # the copy behind it goes past the output row's end
        programs.append([*full, (COPY, held)] if held else [])
        copy, last, end = range(len(programs) - 3, len(programs))
        hold = (held + 1) | 1 << STATE_BITS if held < LONGEST else copy << STATE_BITS
        rows.append([hold, copy << STATE_BITS, last << STATE_BITS])
        final.append(end)
    return table_of(3, rows, final, programs, [b"", b"=" * 4060], 1, LONGEST, 1)


def chain_work(bans: BanTable) -> tuple[Tables, list[Case]]:
    """Copies of every length around one and two steps of a warp, in the text and at its end."""
    lengths = [0, 1, 2, *range(31, 35), *range(63, LONGEST, 2)]
    texts = [bytes(3 * (1 + (length + k) % 80) for k in range(length)) for length in lengths]
    words = [text + end for text in texts for end in (b"", b"\1", b"\2")]
    vocab = read_vocab(write_vocab([*words, b""]), "chain")
    tables = Tables(chain_table(), bans, vocab, (len(words),))
    return tables, [Case(0, (token, len(words))) for token in range(len(words))]


RULES_OF_ALL_KINDS = """
version: "0.3"
model: "m"
actions:
  guard:
    redact: [{text: "acct", whole_words: true}, {kind: card, with: "[card]"}, {kind: iban, with: "[iban]"}]
    append: " ."
routing: {rules: [{match: "a", action: "guard"}]}
postprocessing:
  stop: ["STOP", "TOP SECRET"]
  spans: [{open: "<t>", close: "</t>", do: drop}, {name: raw, open: "<raw>", close: "</raw>", do: exempt}]
  output_transformers:
    - {name: "html_enhancer", config: {bold_terms: ["risk", "\u98ce\u9669"], escape: true}}
"""
PIECES = [
    *(text.encode() for text in (
        "risk", " risk ", "\u98ce\u9669", "\u00e9risk", "risk\U0001f642", "\U00020000risk", "acct", "acct\u00e9", "<t>", "</t>",
        "<raw>risk</raw>", "<t", "STO", "STOP", "TOP SECRE", "4111 1111 1111 1111", "4111-1111-1111-1112", "378282246310005",
        "5555555555554444", "41111111111111111", "GB82 WEST 1234 5698 7654 32", "gb82west12345698765432",
        "DE89370400440532013000", "DE89370400440532013001", "NO9386011117947", "\ufffd", "\u0378", "\ud7ff", "\u07ff", "\u0800",
        "\uffff", "\U0010ffff", "\u0301", "&", " ", "x",
    )),
    b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\x80\x80", b"\xf4\x90\x80\x80", b"\xc1\x80", b"\xf5\x80", b"\xe9\xa3", b"\xf0\x9f\x99",
    b"\xc3", b"\x80risk", b"\xe9risk", b"\xf0\x9frisk", b"\xf0\x9f\x99risk", b"\xff",
]  # fmt: skip
"""Texts around rules of every kind: right and wrong checksums, characters of every length, cut and broken ones."""


def folded_work(bans: BanTable) -> tuple[Tables, list[Case]]:
    """Compiled rules of every kind over texts of `PIECES`, cut into tokens of one to three bytes or long ones."""
    rng = random.Random(6)
    cut = {piece[at : at + 3] for piece in PIECES for at in range(0, len(piece), 2)}
    words = sorted({bytes([byte]) for byte in range(256)} | cut | set(PIECES))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(RULES_OF_ALL_KINDS)
        folded = fold(load_config(path), [*words, b""])
    vocab = read_vocab(write_vocab([*words, b""], strips=True), "folded")
    tables = Tables(read_transducer(folded.transducer, "folded"), bans, vocab, (len(words),))
    split, cases = Splitter(vocab), []
    texts = [piece + after for piece, after in zip(PIECES, itertools.cycle((b"", b" acct")), strict=False)]
    texts += [b" " + b"".join(rng.choices(PIECES, k=3)) for _ in range(64 - len(texts))]
    for number, text in enumerate(texts):
        tokens = split.greedy(text) if number % 3 else split.any_way(text, rng)
        profile = number % 5 % len(tables.transducer.starts)
        cases.append(Case(profile, (*tokens[:16], len(words))))
    return tables, cases


def random_front_work(bans: BanTable, seed: int) -> tuple[Tables, list[Case]]:
    """Markers and redactions that no rule would give."""
    rng = random.Random(seed)
    words = [rng.randbytes(rng.randint(0, 11)) for _ in range(60)]
    vocab = read_vocab(write_vocab([*words, b""]), "front")
    tables = Tables(RandomMachine(seed).table, bans, vocab, (60,))
    tokens = [[rng.randrange(60) for _ in range(rng.randint(1, 4))] for _ in range(48)]
    return tables, [Case(number % 3, (*found, 60)) for number, found in enumerate(tokens)]


def transduce_work() -> Callable[[Module], Comparison]:
    rng = random.Random(4)
    words = [bytes([byte]) for byte in range(256)] + [
        rng.randbytes(rng.choice([0, 2, 7, 33]) if number < 52 else 70) for number in range(60)
    ]
    vocab = read_vocab(write_vocab([*words, b"", b""]), "mutants")
    bans = ban_automaton([b"ab"])
    tables = Tables(hard_table(2), bans, vocab, (316, 317))
    cases = [Case(0, (0, 318, 5, 319, -1, 316)), Case(1, (318, 7, 317)), Case(2, (5, 320, 318, 316))]
    for number in range(29):
        tokens = [
            rng.randrange(-1, 321) if rng.random() < 0.3 else rng.randrange(256, 318)
            for _ in range(rng.randint(2, 5))
        ]
        if number == 0:
            tokens = [308 + k % 8 for k in range(17)]  # more bytes than the ring holds
        cases.append(
            Case(number % PROFILES, (*[t for t in tokens if t not in (316, 317)], rng.choice([316, 317, 5])))
        )
    ends = [
        Case(
            rng.randrange(PROFILES),
            (*[rng.randrange(316) for _ in range(rng.randint(0, 2))], 316 + number % 2),
        )
        for number in range(64)
    ]
    edge_words = [b"\1" + bytes([4 * (k % 60)]) * k + b"\2\3" for k in range(30, 40)]
    edge_words += [b"\0\1\2\3", b"\1\1"]
    count = len(edge_words)
    edges = Tables(edge_table(), bans, read_vocab(write_vocab([*edge_words, b""]), "edges"), (count,))
    edge_cases = [Case(0, (number, count - 2, (number + 3) % count, count)) for number in range(count)]
    options = Options(races=True, step_limit=20_000)
    quiet = Options(step_limit=20_000)
    one_end = replace(tables, eos_ids=(316,))
    chain, chain_cases = chain_work(bans)
    folded, texts = folded_work(bans)
    front, front_texts = random_front_work(bans, 3)
    stages = (
        (folded, texts, quiet, len(texts)),
        (front, front_texts, quiet, len(front_texts)),
        (chain, chain_cases, quiet, len(chain_cases)),
        (tables, cases[:3] + cases[4:11], options, 10),
        (tables, cases, quiet, 32),
        (edges, edge_cases, options, count),
        (tables, ends, quiet, 64),
        (one_end, cases[4:10], options, 6),
    )

    def work(parsed: Module) -> Comparison:
        return first_failure(
            partial(compare_transduce, parsed, kernel("transduce"), *stage) for stage in stages
        )

    return work


def first_failure(stages: Iterable[Callable[[], Comparison]]) -> Comparison:
    """Run stages until one fails; the cheapest stand first."""
    for stage in stages:
        result = stage()
        if not result.ok:
            return result
    return result


def spike(columns: int, size: int, at: int, share: float) -> np.ndarray:
    """A row in which one token holds ``share`` of the mass; columns that are no token would win."""
    logits = np.zeros(columns, np.float32)
    logits[at] = np.log((size - 1) * share / (1 - share))
    logits[size:] = 50.0
    return logits


def mass(logits: np.ndarray, size: int) -> tuple[int, int]:
    """Weight of the heaviest token and of all, in units of 2^-24 (docs/kernels.md)."""
    weights = np.exp(logits[:size] - logits[:size].max()) * np.float32(2.0**24) + np.float32(0.5)
    return int(weights.max()), int(weights.astype(np.int64).sum())


def decisive_draws(columns: int, size: int, edges: Sequence[int]) -> list[DrawCase]:
    """Rows in which one of these ids is half of the mass, inside the nucleus or not enough for it."""
    return [
        DrawCase(spike(columns, size, at, 0.5), 1.0, top_p, 1000 * at + k, k, 1)
        for at in edges
        for top_p in (0.4, 0.7)
        for k in range(6)
    ]


def fine_draws(columns: int, size: int) -> list[DrawCase]:
    """Rows in which one unit of mass, or the noise of one quarter of a pass, decides."""
    equal = np.zeros(columns, np.float32)
    equal[size:] = 50.0
    draws = [DrawCase(equal, 0.0, 1.0, 1, 1, 1)]  # the lowest id wins, whatever lane it lies in
    for quarter in range(4):
        row = spike(columns, size, quarter * 256 + 9, 0.5)
        heavy, total = mass(row, size)
        for wanted in (heavy, heavy + 50):
            top_p = next(
                (
                    p
                    for p in near(np.float32(wanted / total))
                    if int(np.float64(p) * total) in (wanted, wanted + 1)
                ),
                0.5,
            )
            draws += [DrawCase(row, 1.0, float(top_p), 50 * quarter + k, k, 1) for k in range(4)]
        twins = np.full(columns, -20.0, np.float32)
        twins[quarter * 256 + 9], twins[(quarter * 256 + 400) % 1024] = 0.0, -6e-8
        twins[size:] = 50.0
        draws += [DrawCase(twins, 1.0, 0.4, 90 * quarter + k, k, 1) for k in range(4)]
        few = np.full(columns, -np.inf, np.float32)
        few[[quarter * 256 + k for k in (3, 90, 200)]] = 1.0
        few[size:] = 50.0
        draws += [DrawCase(few, 1.0, 1.0, 70 * quarter + k, k, 1) for k in range(8)]
    return draws


def tied_draws(columns: int, size: int) -> list[DrawCase]:
    """Rows in which two ids hold three tenths each, in any two places of a pass, and the nucleus is both."""
    draws = []
    for place in range(8):
        for k in range(16):  # the search for the edge meets it in another way at each height
            row = np.full(columns, 0.213 * k, np.float32)
            row[[256 * place + 9, (256 * place + 700) % size]] += np.log(0.75 * size)
            row[size:] = 50.0
            draws.append(DrawCase(row, 1.0, 0.55, 300 * place + k, k, 1))
    return draws


def near(p: np.float32) -> Iterator[np.float32]:
    """Numbers around ``p``, the nearest first."""
    below = above = p
    for _ in range(40):
        yield above
        yield below
        below, above = np.nextafter(below, np.float32(0)), np.nextafter(above, np.float32(1))


def sample_work() -> Callable[[Module], Comparison]:
    rng = np.random.default_rng(4)
    letters = list(b"abc ")
    words = [bytes([letter]) for letter in letters]
    words += [bytes(rng.choice(letters, int(rng.integers(0, 5))).tolist()) for _ in range(2044)]
    bans = ban_automaton([b"ab", b"cac"])
    fst = edge_table()

    def tables_of(size: int) -> Tables:
        return Tables(fst, bans, read_vocab(write_vocab(words[:size]), "mutants"), (3,))

    tables = tables_of(1104)
    draws = random_draws(tables, 12, 5)
    for k in range(8):  # near ties, and rows that are refused to the end
        logits = np.full(len(draws[0].logits), -np.inf, np.float32)
        logits[4 + 7 * k : 4 + 7 * k + 300] = 1.0 + (k % 2)
        top_p = [1.0, 0.5][k % 2]
        draws.append(replace(draws[0], logits=logits, temperature=float(k % 3), top_p=top_p))
    options = Options(shared=shared_bytes("sample"), races=True, step_limit=40_000)
    quiet = Options(shared=shared_bytes("sample"), step_limit=40_000)
    nothing_banned = Tables(fst, ban_automaton([b"zzzz"]), tables.vocab, (3,))
    stages = [(tables, draws, options, 32)]
    for size in (1104, 204, 424, 624, 924, 1324, 1624, 2044):
        same = Tables(fst, nothing_banned.bans, read_vocab(write_vocab(words[:size]), "mutants"), (3,))
        last = [(size - 1) // 256 * 256, size - 1]
        edges = [*range(0, size - 256, 256), *last] if size == 1104 else last
        stages.append((same, decisive_draws(size + 37, size, edges), quiet, 64))
        if size == 1104:
            stages.append((same, fine_draws(size + 37, size), quiet, 64))
        if size == 2044:
            stages.append((same, tied_draws(size + 37, size), quiet, 64))
    wide = read_vocab(write_vocab([*words, *(word + b" " for word in words), *words[:300]]), "wide")
    for k in range(8):  # one token is longer than all others, and its end decides
        long = [b"b"] * 2044
        long[256 * k + 9] = b"bcccab"
        longer = Tables(fst, bans, read_vocab(write_vocab(long), "long"), (3,))
        row = np.where(np.arange(2081) < 2044, np.float32(0), np.float32(50))
        stages.append((longer, [DrawCase(row, 1.0, 1.0, k, k, 1, ban_strict=1)], quiet, 1))
    few = Tables(fst, bans, read_vocab(write_vocab(words[:90]), "few"), (3,))
    hard = [b"b" + word for word in words[:1000]] + words[:20]
    wall = Tables(fst, bans, read_vocab(write_vocab(hard), "walls"), (1019,))
    stages += [
        (few, [replace(draw, ban_strict=1) for draw in random_draws(few, 4, 6)], quiet, 4),
        (wall, walls(bans, hard), quiet, 8),
        (wall, walls(bans, hard)[-1:], options, 1),
        (Tables(fst, bans, wide, (3, 7)), cut_draws(len(wide)), quiet, 64),
    ]
    flat = read_vocab(write_vocab([b"a"] * 66_000), "flat")
    even = DrawCase(np.zeros(66_000, np.float32), 1.0, 0.6, 3, 1, 1)
    stages.append((Tables(fst, nothing_banned.bans, flat, (3,)), [even], quiet, 1))

    def work(parsed: Module) -> Comparison:
        return first_failure(partial(compare_sample, parsed, kernel("sample"), *stage) for stage in stages)

    return work


def cut_draws(size: int) -> list[DrawCase]:
    """Rows of more than one pass of a scan, cut by top_k, top_p and min_p, with ties at the edge; an `allow`."""
    rng = np.random.default_rng(9)
    out = []
    for k in range(12):
        logits = (rng.integers(-40, 40, size + 37) / 8).astype(np.float32)
        logits[size:] = 50.0
        logits[rng.integers(0, size, 5)] = np.nan
        out.append(
            DrawCase(
                logits,
                [0.7, 1.3, 0.7, 0.0][k % 4],
                [1.0, 0.8, 0.5][k % 3],
                31 * k,
                k,
                1 + k % 4,
                0,
                [0, 40, 700, size - 1, 1][k % 5],
                [0.0, 0.2, 0.02][k // 2 % 3],
                int(k % 2),
            )
        )
    return out


def around_work(name: str, sizes: Sequence[tuple[int, int, int]]) -> Callable[[Module], Comparison]:
    """Random slots: (launches, slots, tokens), one after another."""
    bans, fst = ban_automaton([b"ab"]), edge_table()
    options = Options(shared=shared_bytes(name), races=True, step_limit=40_000)
    stages = [
        (Tables(fst, bans, read_vocab(write_vocab([b"a"] * tokens), "around"), (3,)), launches, slots)
        for launches, slots, tokens in sizes
    ]

    def work(parsed: Module) -> Comparison:
        return first_failure(
            partial(compare_around, parsed, kernel(name), tables, launches, seed, options, slots=slots)
            for seed, (tables, launches, slots) in enumerate(stages)
        )

    return work


def walls(bans: BanTable, words: list[bytes]) -> list[DrawCase]:
    """Rows whose best tokens are all refused, up to the limit of candidates and past it."""
    state = next(x for x in range(1, 8) if bans.trans[x * bans.classes + bans.cls[98]] == 0)
    refused = [n for n, word in enumerate(words) if word[:1] == b"b"]
    allowed = [n for n, word in enumerate(words) if word[:1] == b" "]
    out = []
    most = CANDIDATES
    for count, others in ((most - 1, 1), (most, 1), (most + 1, 1), (most + 44, 0), (3, 2), (40, 9)):
        for top_p in (1.0, 0.4) if others > 1 else (1.0,):
            logits = np.full(len(words) + 37, -np.inf, np.float32)
            spread = refused[:: len(refused) // count][:count]  # some in every quarter of a pass
            logits[spread] = 9.0 + np.arange(len(spread)) / 64
            logits[allowed[:others]] = 1.0
            out.append(DrawCase(logits, 0.0 if others < 2 else 0.7, top_p, 77 + count, 3, state))
    return out


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
    for name, kind, place, changed, reason in EQUIVALENT:
        if (
            re.fullmatch(name or ".*", mutant.kernel)
            and re.search(kind, mutant.kind)
            and re.search(place, source)
            and re.search(changed, mutant.after.strip())
        ):
            return reason
    return ""


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


WORK = {
    "transduce": transduce_work,
    "sample": sample_work,
    "penalize": partial(
        around_work, "penalize", [(2, 16, 4500), *((1, 16, 100 + 257 * k) for k in range(8))]
    ),
    "feedback": partial(around_work, "feedback", [(1, 964 - 129 * k, 60) for k in range(8)]),
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


def run_mutants(name: str, count: int, seed: int, tell: Callable[[str], None] = print) -> Tally:
    """Damage a kernel ``count`` times and say what catches it."""
    work = WORK[name]()
    clean = work(module(name))
    assert clean.ok, (clean.difference, clean.fault, clean.races)
    tally = Tally()
    for number, mutant in enumerate(chosen(name, count, seed)):
        if number and number % 5 == 0:
            tell(f"{name}: {number} mutants, {sum(tally.caught.values())} of {tally.total} caught")
        reason = why_equivalent(mutant)
        how = "" if reason else caught_by(mutant, work)
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
    parser.add_argument("--kernel", action="append", choices=list(WORK))
    options = parser.parse_args()
    for name in options.kernel or WORK:
        tally = run_mutants(name, options.count, options.seed, partial(print, flush=True))
        good = tally.total - len(tally.survivors)
        print(f"{name}: caught {good} of {tally.total} ({100 * good / tally.total:.1f} %): {tally.caught}")
        for reason, count in sorted(tally.equivalent.items()):
            print(f"  {count} equivalent: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
