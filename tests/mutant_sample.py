"""Rows of logits that bring out small damage to the `sample` kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from mutant_transduce import Stage, edge_table
from simulate_support import kernel, shared_bytes
from test_kernels_sample import ban_automaton

from ralbuild.contract.bans import BanTable
from ralbuild.contract.vocab import read_vocab, write_vocab
from ralbuild.simulate.buffers import Tables
from ralbuild.simulate.cases import random_draws
from ralbuild.simulate.compare_draws import DrawCase, compare_sample
from ralbuild.simulate.draws import CANDIDATES
from ralbuild.simulate.session import Options


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


def edge_draws(columns: int, size: int) -> list[DrawCase]:
    """Rows whose second largest logit is just what the search for the edge tries, in every part of a pass.

    One lane has only eights, so the search for two tokens begins between 8 and the largest logit, 16: it tries
    10, 12 and 14. Were the token there not counted, the others, next below it, would be kept, and one drawn.
    """
    parts = range(0, size, 256)
    draws = []
    for part in parts:
        for tried in (10.0, 12.0, 14.0):
            row = np.full(columns, np.nextafter(np.float32(tried), np.float32(0)), np.float32)
            row[[100, 2148]] = 8.0
            row[part], row[(part + 768) % (256 * len(parts))] = tried, 16.0
            row[size:] = 50.0
            draws += [DrawCase(row, 20.0, 1.0, 77 * part + k, k, 1, 0, 2) for k in range(2)]
    return draws


def lane_draws(columns: int, size: int) -> list[DrawCase]:
    """Rows of two values by one bit of the id, all of which are kept: `top_k` is the number of lanes."""
    ids = np.arange(columns)
    draws = []
    for bit, part in itertools.product(range(11), range(2)):
        row = np.where(ids >> bit & 1 == part, np.float32(1), np.float32(2))
        row[2048:] = -5.0
        row[size:] = 50.0
        draws += [DrawCase(row, 20.0, 1.0, 99 * bit + k, k, 1, 0, 2048) for k in range(3)]
    return draws


def near(p: np.float32) -> Iterator[np.float32]:
    """Numbers around ``p``, the nearest first."""
    below = above = p
    for _ in range(40):
        yield above
        yield below
        below, above = np.nextafter(below, np.float32(0)), np.nextafter(above, np.float32(1))


def sample_stages() -> list[Stage]:
    """Return what a module must pass, roughly the cheapest first."""
    bans, no_bans = ban_automaton([b"ab", b"cac"]), ban_automaton([b"zzzz"])
    words = random_words()
    options = Options(shared=shared_bytes("sample"), races=True, step_limit=40_000)
    quiet = replace(options, races=False)
    few, some = tables_of(bans, words[:90]), tables_of(bans, words[:1104])
    hard = [b"b" + word for word in words[:1000]] + words[:20]
    wall, refused = tables_of(bans, hard, 1019), walls(bans, hard)
    wide = tables_of(bans, [*words, *(word + b" " for word in words), *words[:300]], 3, 7)
    stages = [
        stage_of(few, [replace(draw, ban_strict=1) for draw in random_draws(few, 4, 6)], quiet, 4),
        stage_of(some, mixed_draws(some), options, 32),
        stage_of(wall, refused, quiet, 8),
        stage_of(wall, refused[-1:], options, 1),
        stage_of(wide, cut_draws(len(wide.vocab)), quiet),
        stage_of(
            tables_of(no_bans, [b"a"] * 2644), [*edge_draws(2681, 2644), *lane_draws(2681, 2644)], quiet
        ),
    ]
    for size in (204, 424, 624, 924, 1324, 1624, 2044, 1104):
        edges = [(size - 1) // 256 * 256, size - 1]
        if size == 1104:
            edges += range(0, size - 256, 256)
        same = tables_of(no_bans, words[:size])
        stages.append(stage_of(same, decisive_draws(size + 37, size, edges), quiet))
    stages += [
        stage_of(tables_of(no_bans, words[:1104]), fine_draws(1141, 1104), quiet),
        stage_of(tables_of(no_bans, words[:2044]), tied_draws(2081, 2044), quiet),
        *(stage_of(*long_token(bans, k), quiet) for k in range(8)),
    ]
    even = DrawCase(np.zeros(66_000, np.float32), 1.0, 0.6, 3, 1, 1)
    return [*stages, stage_of(tables_of(no_bans, [b"a"] * 66_000), [even], quiet)]


def random_words() -> list[bytes]:
    """Tokens of up to four letters, few of which are banned."""
    rng, letters = np.random.default_rng(4), list(b"abc ")
    words = [bytes([letter]) for letter in letters]
    return words + [bytes(rng.choice(letters, int(rng.integers(0, 5))).tolist()) for _ in range(2044)]


def tables_of(bans: BanTable, words: Sequence[bytes], *eos_ids: int) -> Tables:
    """Bind a vocabulary; id 3 ends a text where nothing else is said."""
    return Tables(edge_table(), bans, read_vocab(write_vocab(words), "mutants"), eos_ids or (3,))


def mixed_draws(tables: Tables) -> list[DrawCase]:
    """Random rows, near ties, and rows that are refused to the end."""
    draws = random_draws(tables, 12, 5)
    for k in range(8):
        logits = np.full(len(draws[0].logits), -np.inf, np.float32)
        logits[4 + 7 * k : 4 + 7 * k + 300] = 1.0 + (k % 2)
        top_p = [1.0, 0.5][k % 2]
        draws.append(replace(draws[0], logits=logits, temperature=float(k % 3), top_p=top_p))
    return draws


def long_token(bans: BanTable, part: int) -> tuple[Tables, list[DrawCase]]:
    """One token of part ``part`` of a pass is longer than all others, and its end decides."""
    words = [b"b"] * 2044
    words[256 * part + 9] = b"bcccab"
    row = np.where(np.arange(2081) < 2044, np.float32(0), np.float32(50))
    return tables_of(bans, words), [DrawCase(row, 1.0, 1.0, part, part, 1, ban_strict=1)]


def stage_of(tables: Tables, draws: Sequence[DrawCase], options: Options, slots: int = 64) -> Stage:
    """Make a stage of draws, ``slots`` of them at a time."""
    return lambda parsed: compare_sample(parsed, kernel("sample"), tables, draws, options, slots)


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
