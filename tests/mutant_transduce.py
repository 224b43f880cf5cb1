"""Tables and texts that bring out small damage to the `transduce` kernel: compiled rules, and what no rule would give."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from simulate_support import kernel
from test_kernels_sample import ban_automaton
from test_kernels_transduce import RandomMachine

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
from ralbuild.contract.transducer_table import DONE, KEEP, MARK_BITS, NONE, REDACT_BITS, Front
from ralbuild.contract.vocab import read_vocab, write_vocab
from ralbuild.fold.folding import fold
from ralbuild.simulate.buffers import Tables
from ralbuild.simulate.cases import Splitter
from ralbuild.simulate.compare import Case, Comparison, compare_transduce
from ralbuild.simulate.ptx.model import Module
from ralbuild.simulate.session import Options

Stage = Callable[[Module], Comparison]
"""Runs a module over its cases and compares."""
CLASSES, HELD, RULES, PROFILES = 6, 70, 5, 3
STATES = PROFILES + 2 * HELD
LONGEST = 70
SIZES = (0, 1, 31, 32, 33, 34, 63, 64, 65, 66, 1500)
"""Lengths around one and two steps of a warp."""
ROOM = (0, 33, 65)
"""Bytes that are left in an output row."""

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
    data = write_transducer(
        cls=[symbol % classes for symbol in range(512)],
        trans=[entry for row in rows for entry in row],
        final=[(program, program) for program in final],
        programs=programs,
        strings=strings,
        starts=list(range(profiles)),
        front=Front(modes=[(NONE, NONE, state, NONE, 0) for state in range(profiles)]),
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
    redact: [{text: "acct", whole_words: true}, {kind: card, with: "[card]"}, {kind: iban, with: "[iban]"},
             {text: "\U00020000x", with: "[4]"}, {text: "\u00e9ab"}, {text: "\u98ce\u96aax"}, {text: "\uff21\uff22"}, {text: "\U00020001"}]
    append: " ."
routing: {rules: [{match: "a", action: "guard"}]}
postprocessing:
  stop: ["STOP", "TOP SECRET"]
  spans: [{open: "<t>", close: "</t>", do: drop}, {name: raw, open: "<raw>", close: "</raw>", do: exempt}]
  output_transformers:
    - {name: "html_enhancer", config: {bold_terms: ["risk", "\u98ce\u9669"], escape: true}}
"""
GUARDED = 1
"""The profile that has the redactions."""
PIECES = [
    *(text.encode() for text in (
        "risk", " risk ", "\u98ce\u9669", "\u00e9risk", "risk\U0001f642", "\U00020000risk", "acct", "acct\u00e9", "\U00020000", "\U00020000x", "risk\U00020001", "\u00e9a", "\u98ce", "\u98ce\u96aa", "\uff21",
        "<t>", "</t>",
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
    texts = [piece + after for piece in PIECES for after in (b"", b" acct")]
    texts += [b" " + b"".join(rng.choices(PIECES, k=3)) for _ in range(16)]
    profiles = len(tables.transducer.starts)
    for number, text in enumerate(texts):
        tokens = split.greedy(text) if number % 3 else split.any_way(text, rng)
        cases.append(Case(GUARDED, (*tokens[:16], len(words))))
        if number % 3 == 0:
            cases.append(Case(number % profiles, (*tokens[:16], len(words))))
    return tables, cases


CHARACTERS = [
    *"\0\x01 a~\x7f\x80\u00e9\u07ff\u0800\u0fff\ucfff\ud000\ud7ff\ue000\uffff\U00010000\U0003ffff\U00040000",
    *"\U000fffff\U00100000\U0010ffff",
]
BROKEN = [
    b"\xc0\x80", b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80",
    b"\xc3", b"\xe9\xa3", b"\xf1\x80", b"\xf1\x80\x80", b"\xe9\x7f\x80", b"\xe9\xc0\x80", b"\xe9\x80\xc0", b"\xf1\x80\x7f\x80", b"\xf1\x80\x80\xc0",
]  # fmt: skip


NUL_IS_A_WORD = 148
"""A seed whose table takes most of `CHARACTERS`, and byte 0, for word characters, and tells them apart."""


def random_front_work(bans: BanTable, seed: int) -> tuple[Tables, list[Case]]:
    """Markers and redactions that no rule would give, over characters at the edges of UTF-8, whole and broken."""
    rng = random.Random(seed)
    machine = RandomMachine(seed)
    words = [rng.randbytes(rng.randint(0, 11)) for _ in range(30)]
    pieces = [*(character.encode() for character in CHARACTERS), *BROKEN]
    words += [*pieces, *(b"".join(rng.choices(pieces, k=rng.randint(2, 4))) for _ in range(60))]
    last = len(words)
    vocab = read_vocab(write_vocab([*words, b""]), "front")
    tables = Tables(machine.table, bans, vocab, (last,))
    tokens = [[rng.randrange(last) for _ in range(rng.randint(1, 3))] for _ in range(64)]
    ends = range(30, 30 + len(pieces))
    tokens += [[*rng.choices(range(last), k=rng.randint(0, 1)), rng.choice(ends)] for _ in range(96)]
    return tables, [Case(number % 3, (*found, last)) for number, found in enumerate(tokens)]


def long_front_table() -> TransducerTable:
    """Markers of up to 71 bytes that are kept, and redactions and ends that become texts of `SIZES` bytes.

    Bytes 1 are held until a byte 2 makes all of them a marker; byte 10 + k is redacted; profile k ends with
    text k. Bytes 3, 4 and 5 make what decides the text behind them fill the output row but for a few bytes.
    """
    strings = [bytes(33 + (7 * k + n) % 90 for n in range(size)) for k, size in enumerate(SIZES)]
    strings += [b"=" * (4096 - left) for left in ROOM]
    fills = [[(EMIT, len(SIZES) + k)] for k in range(len(ROOM))]
    ends = [[(EMIT, k), (EVENT, 2)] for k in range(len(SIZES))]
    programs: list[Ops] = [[(COPY, 1)], [], *fills, *ends]
    count = len(SIZES)
    mark_next, actions = [], [(0, 0), (0, -1)]
    for held in range(LONGEST + 1):
        actions.append((held + 1, -1))
        more = held + 1 | 1 << MARK_BITS if held < LONGEST else held | 2 << MARK_BITS
        mark_next += [(held + 2) << MARK_BITS, more, 0]
    forms = {10 + k: k + 1 for k in range(count)}
    rules = {3 + k: k + 1 for k in range(len(ROOM))}
    data = write_transducer(
        cls=[rules.get(symbol, 0) for symbol in range(512)],
        trans=[0, *(2 + k for k in range(len(ROOM)))] * (2 + len(ROOM)),
        final=[(1, 1)] * 2 + [(2 + k, 2 + k) for k in range(len(ROOM))],
        programs=programs,
        strings=strings,
        starts=list(range(count)),
        front=Front(
            modes=[(0, 0, 0, 2 + len(ROOM) + k, 0) for k in range(count)],
            mark_class=[byte if byte in (1, 2) else 0 for byte in range(256)],
            mark_next=mark_next,
            mark_actions=actions,
            markers=[(0, KEEP, 0)],
            redact_class=[forms.get(symbol, 0) for symbol in range(512)],
            redact_next=[0, *(DONE | (k + 1) << REDACT_BITS for k in range(count))] * 2,
            redact_final=[0, 0],
            accepts=[(), *((k << 3,) for k in range(count))],
            redactions=[(1, k) for k in range(count)],
        ),
        words=(bytes(4352), bytes(32)),
        max_held=LONGEST + 2,
        rules=3,
    )
    return read_transducer(data, "long front")


def long_front_work(bans: BanTable) -> tuple[Tables, list[Case]]:
    """Every marker, redaction and end behind every row that is filled."""
    fills = [b"", *(bytes([3 + k]) for k in range(len(ROOM)))]
    texts = [b"\1" * (size - 1) + b"\2" for size in SIZES if 0 < size <= LONGEST]
    texts += [bytes([10 + k]) for k in range(len(SIZES))]
    words = [fill + text for fill in fills for text in [*texts, b""]]
    last = len(words)
    tables = Tables(long_front_table(), bans, read_vocab(write_vocab([*words, b""]), "long front"), (last,))
    cases = [Case(0, (number, last)) for number, word in enumerate(words) if word not in fills]
    behind = [words.index(fill) for fill in fills]
    return tables, cases + [Case(k, (token, last)) for k in range(len(SIZES)) for token in behind]


def transduce_stages() -> list[Stage]:
    """Return what a module must pass, the cheapest first."""
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
    front, front_texts = random_front_work(bans, NUL_IS_A_WORD)
    long, long_texts = long_front_work(bans)
    stages = (
        (chain, chain_cases, quiet, len(chain_cases)),
        (edges, edge_cases, options, count),
        (long, long_texts, quiet, len(long_texts)),
        (tables, ends, quiet, 64),
        (folded, texts, quiet, len(texts)),
        (front, front_texts, quiet, len(front_texts)),
        (tables, cases[:3] + cases[4:11], options, 10),
        (one_end, cases[4:10], options, 6),
        (tables, cases, quiet, 32),
    )
    return [stage_of(*stage) for stage in stages]


def stage_of(tables: Tables, cases: Sequence[Case], options: Options, slots: int) -> Stage:
    """Make a stage of cases, ``slots`` of them at a time."""
    return lambda parsed: compare_transduce(parsed, kernel("transduce"), tables, cases, options, slots)
