"""The CPU sampler against the reference that the kernels are held to (itself held to Random123, the softmax
and transformers), and the folded draw with bans, allowed texts and log probabilities."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import kernel_reference
import numpy as np
import pytest
from runtime_fixtures import Rules, make_transducer, token_bytes

from ralbuild.config.regex import parse_class
from ralbuild.contract.bans import BanSlot, read_bans
from ralbuild.contract.routes import read_routes
from ralbuild.contract.transducer import Transducer, read_transducer
from ralbuild.contract.vocab import read_vocab, write_vocab
from ralbuild.fold.bans import Limits, build_bans
from ralbuild.fold.routes import RoutePatterns
from ralbuild.runtime.legal import LegalTokens
from ralbuild.runtime.sampler import Draw, Sampler, cut, noise, noise_of_all
from ralbuild.runtime.steps import FeedbackStep, Patch, PatchSlot, PenalizeStep, SampleStep, Tables

SIZE, VOCAB = 3000, 3072
CUTS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.1},
    {"temperature": 0.05},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.3, "top_k": 300, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 0.2},
]


def rows(count: int, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(11).normal(0, spread, (count, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("spread", [0.1, 4.0, 20.0])
@pytest.mark.parametrize("values", CUTS, ids=str)
def test_the_best_candidates_are_those_of_the_reference(spread: float, values: dict[str, float]) -> None:
    sampler = Sampler(SIZE)
    for step, row in enumerate(rows(6, spread)):
        draw = Draw(**values, seed=0xFFFF_FFFF_0000_0000 + step * 977)
        reference = kernel_reference.Row(row, SIZE, **values, seed=draw.seed, step=step)
        value = sampler.adjusted(row, draw, None)
        refused: list[int] = []
        for token in sampler.ranked(value, draw, step, cut(value, draw), 16):
            drawn = kernel_reference.sample(reference, lambda token, out=tuple(refused): token not in out)
            assert (drawn.token, drawn.refused) == (token, len(refused))
            refused.append(token)
        assert len(set(refused)) == len(refused)


@pytest.mark.parametrize("values", [(1.3, 0.0, 0.0), (1.0, 0.7, -0.4), (0.8, -1.0, 2.0)])
def test_penalties_and_biases_are_those_of_the_reference(values: tuple[float, float, float]) -> None:
    sampler, row = Sampler(SIZE), rows(1)[0]
    bias = {5: 3.5, 2999: -100.0, 17: 1.0}
    draw = Draw(
        repetition_penalty=values[0], presence_penalty=values[1], frequency_penalty=values[2],
        logit_bias=tuple(bias.items()),
    )  # fmt: skip
    counts = sampler.counts([1, 2, 3, 3, 3050])
    slot = PatchSlot(draw, None, None, counts=counts)  # type: ignore[arg-type]
    for token in (3, 4, 4, 17):
        slot.token = token
        FeedbackStep().run(row, [slot])
    wanted = kernel_reference.penalize(
        row, counts, repetition=values[0], presence=values[1], frequency=values[2], bias=bias
    )
    assert counts[[1, 2, 3, 4, 17, 5]].tolist() == [-0x8000, -0x8000, -0x7FFF, 2, 1, 0]
    before = row.copy()
    assert np.array_equal(sampler.adjusted(row, draw, counts), wanted[:SIZE])
    assert np.array_equal(row, before)


def test_noise_of_all_ids_is_the_noise_of_each() -> None:
    ids = np.arange(2500)
    assert np.array_equal(noise_of_all(9, 4, 2500), noise(9, 4, ids))
    assert np.array_equal(
        noise(9, 4, ids), kernel_reference.gumbel(kernel_reference.philox_uniform(9, 4, ids))
    )


def ranked(row: np.ndarray, draw: Draw, step: int = 0, size: int = SIZE) -> list[int]:
    sampler = Sampler(size)
    value = sampler.adjusted(row, draw, None)
    return list(sampler.ranked(value, draw, step, cut(value, draw), size))


def test_ids_beyond_the_tokenizer_and_numbers_that_are_none_are_never_drawn() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[SIZE:] = 100
    row[17] = np.nan
    for temperature in (0.0, 1.0):
        order = ranked(row, Draw(temperature, seed=1))
        assert sorted([*order, 17]) == list(range(SIZE))
    row[:] = np.nan
    assert ranked(row, Draw()) == []
    assert ranked(row, Draw(1.0, top_k=5, top_p=0.5, min_p=0.1)) == []


def test_equal_logits_are_taken_by_rising_id() -> None:
    assert ranked(np.ones(40, np.float32), Draw(), size=40) == list(range(40))


def test_a_draw_depends_on_seed_and_step_and_on_nothing_else() -> None:
    row = rows(1)[0]
    draws = [[ranked(row, Draw(1.0, seed=seed), step)[0] for step in range(20)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert len(set(draws[0])) > 10


def nothing_to_rewrite() -> Transducer:
    return Transducer(read_transducer(make_transducer([Rules()], []), "test"))


class Folded:
    """The steps around a draw, over a vocabulary of one's own; the last token ends a text."""

    def __init__(self, words: Sequence[bytes], limits: Limits) -> None:
        vocab = read_vocab(write_vocab(words), "test")
        self.words, self.eos = words, len(words) - 1
        bans = read_bans(build_bans([limits]), "test")
        routes = read_routes(RoutePatterns([]).table(), "test", 0)
        tables = Tables(nothing_to_rewrite(), bans, vocab, routes)
        sampler = Sampler(len(words))
        self.legal = LegalTokens(tables.bans, vocab, len(words), (self.eos,))
        steps = (
            PenalizeStep(sampler),
            SampleStep(tables, sampler, self.legal, 16, (self.eos,)),
            FeedbackStep(),
        )
        self.patch = Patch(tables, steps, sampler)

    def draw(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[PatchSlot]:
        """Draw one token for each of ``draws`` from the same logits."""
        slots = [self.patch.open(0, draw) for draw in draws]
        self.patch.run(np.repeat(logits[None], len(slots), 0), slots)
        return slots

    def text(self, logits: np.ndarray, draw: Draw, most: int = 30) -> tuple[bytes, PatchSlot]:
        """Draw from the same logits until the text ends."""
        slot, out = self.patch.open(0, draw), b""
        while slot.token != self.eos and slot.step < most:
            self.patch.run(logits[None], [slot])
            out += self.words[slot.token]
        return out, slot


def chi_square_limit(degrees: int) -> float:
    """Return what chi-square exceeds in one of a thousand runs (Wilson and Hilferty 1931)."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + 3.0902 * part**0.5) ** 3)


LETTERS = [bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize(
    ("values", "banned"),
    [
        ({"temperature": 1.0}, "ad"),
        ({"temperature": 1.0}, "abcdefghijklmnopqrst"),
        ({"temperature": 0.8, "top_p": 0.7}, "az"),
        ({"temperature": 1.0, "top_k": 5}, "zyxwv"),
        ({"temperature": 1.0, "top_k": 7}, "zyxw"),
        ({"temperature": 1.2, "top_k": 20, "min_p": 0.05}, "zyxwvutsr"),
    ],
    ids=str,
)
def test_draws_follow_the_renormalised_distribution_of_what_is_not_banned(
    values: dict[str, float], banned: str
) -> None:
    """Chi-square of 2,000 draws against the softmax by transformers' own warpers, banned tokens taken out.

    Where all that the cuts keep is banned, the cuts are made anew among the rest.
    """
    import torch
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = np.linspace(0, 3, 27, dtype=np.float32)
    logits[26] = -1

    def kept(scores: torch.Tensor) -> torch.Tensor:
        scores = scores / values["temperature"]
        if "top_k" in values:
            scores = TopKLogitsWarper(int(values["top_k"]))(None, scores)
        if "top_p" in values:
            scores = TopPLogitsWarper(values["top_p"])(None, scores)
        if "min_p" in values:
            scores = MinPLogitsWarper(values["min_p"])(None, scores)
        return scores

    out = [ord(letter) - 97 for letter in banned]
    scores = kept(torch.from_numpy(logits.copy())[None])
    scores[0, out] = -torch.inf
    if not torch.isfinite(scores).any():
        left = torch.from_numpy(logits.copy())[None]
        left[0, out] = -torch.inf
        scores = kept(left)
    wanted = torch.softmax(scores[0].double(), 0).numpy()
    folded = Folded([*LETTERS, b""], Limits(tuple(letter.encode() for letter in banned)))
    slots = folded.draw(logits, [Draw(**values, seed=seed) for seed in range(2000)])
    counts = np.bincount([slot.token for slot in slots], minlength=27)
    open_ = wanted > 0
    assert counts[~open_].sum() == 0
    statistic = ((counts[open_] - 2000 * wanted[open_]) ** 2 / (2000 * wanted[open_])).sum()
    assert statistic < chi_square_limit(int(open_.sum()) - 1)
    assert all(slot.refused <= 16 for slot in slots)
    assert not any(slot.exhausted for slot in slots)


def test_what_may_be_drawn_does_not_depend_on_the_rest_of_the_batch() -> None:
    folded = Folded([*LETTERS, b""], Limits((b"a", b"zz")))
    logits = np.linspace(0, 1, 27, dtype=np.float32)
    draws = [Draw(1.0, top_k=n % 3 * 9, seed=n, frequency_penalty=n % 2) for n in range(12)]
    together = [slot.token for slot in folded.draw(logits, draws)]
    assert [folded.draw(logits, [draw])[0].token for draw in draws] == together
    assert [slot.token for slot in folded.draw(logits, draws[::-1])] == together[::-1]


def test_when_nothing_is_legal_the_text_ends_and_says_so() -> None:
    folded = Folded([*LETTERS, b""], Limits(tuple(LETTERS)))
    logits = np.linspace(1, 2, 27, dtype=np.float32)
    logits[26] = -np.inf
    for draw in (Draw(), Draw(1.0, top_p=0.5)):
        (slot,) = folded.draw(logits, [draw])
        assert (slot.token, slot.exhausted, slot.masked) == (26, True, 1)
    logits[26] = 0  # the end is legal, but the least likely by far
    (slot,) = folded.draw(logits, [Draw(0.0)])
    assert (slot.token, slot.exhausted) == (26, False)


@pytest.mark.parametrize("values", CUTS, ids=str)
def test_an_answer_is_one_of_the_allowed_texts_whatever_the_settings(values: dict[str, float]) -> None:
    texts = (b"yes", b"yes please", b"no", "né".encode())
    words = [bytes([byte]) for byte in range(256)] + [b"ye", b"s pl", b"no", b"yes!", b"ease", b"", b""]
    folded = Folded(words, Limits((b"no",), texts[:2] + texts[3:]))
    rng = np.random.default_rng(2)
    seen = set()
    for seed in range(60):
        logits = (rng.standard_normal(len(words)) * 6).astype(np.float32)
        logits[-2] = 30  # a special token that ends nothing
        found, slot = folded.text(logits, Draw(**values, seed=seed))
        assert not slot.exhausted
        seen.add(found)
    assert seen <= set(texts[:2] + texts[3:])
    assert len(seen) > 1


def test_characters_and_bans_hold_together_also_inside_a_character() -> None:
    words = [bytes([byte]) for byte in range(256)] + ["é".encode(), "风2".encode(), b"12", b""]
    folded = Folded(words, Limits((b"11", "éé".encode()), (), parse_class("0-9é风")))
    rng = np.random.default_rng(3)
    for seed in range(40):
        logits = rng.standard_normal(len(words)).astype(np.float32)
        logits[-1] = -1
        found, slot = folded.text(logits, Draw(1.5, seed=seed))
        if slot.token == folded.eos:
            text = found.decode()
            assert set(text) <= set("0123456789é风")
            assert "11" not in text
            assert "éé" not in text


def test_log_probabilities_are_those_of_what_the_rules_leave() -> None:
    import torch

    logits = np.linspace(0, 3, 27, dtype=np.float32)
    folded = Folded([*LETTERS, b""], Limits((b"z", b"y")))
    draws = [
        Draw(logprobs=3),
        Draw(1.0, seed=4, top_k=2, logprobs=0),
        Draw(logit_bias=((0, 9.0),), logprobs=1),
    ]
    slots = folded.draw(logits, draws)
    open_ = torch.from_numpy(logits.copy()).double()
    open_[[24, 25]] = -torch.inf
    wanted = torch.log_softmax(open_, 0).tolist()
    first, second, third = (slot.logprob for slot in slots)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.data, [item.data for item in first.top]) == (b"", [b"", b"x", b"w"])
    assert [item.logprob for item in first.top] == pytest.approx(
        [wanted[26], wanted[23], wanted[22]], abs=1e-6
    )
    assert first.logprob == first.top[0].logprob
    assert second.top == ()
    assert second.logprob == pytest.approx(wanted[slots[1].token], abs=1e-6)
    open_[0] += 9
    assert third.data == b"a"
    assert third.logprob == pytest.approx(torch.log_softmax(open_, 0)[0].item(), abs=1e-6)


@pytest.fixture(scope="module")
def smollm2() -> list[bytes]:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return token_bytes(Path(cache) / "ralbuild" / "models" / "smollm2-135m-instruct")


@pytest.mark.parametrize("phrase", [b"risk-free", b"sure profit", "风险投资".encode()])
def test_every_segmentation_of_a_banned_phrase_over_the_real_vocabulary_is_blocked(
    smollm2: list[bytes], phrase: bytes
) -> None:
    """All ways to write it, with what may stand before it in its first token and after it in its last one."""
    table = read_bans(build_bans([Limits((phrase,))]), "test")
    starts = {token for token in smollm2 if any(token.endswith(phrase[:n]) for n in range(1, len(token) + 1))}
    by_first: dict[int, list[bytes]] = {}
    for token in set(smollm2) - {b""}:
        by_first.setdefault(token[0], []).append(token)
    ways = 0

    def go(slot: BanSlot, token: bytes, left: bytes) -> None:
        """Draw ``token``, after which ``left`` of the phrase is still to be written."""
        nonlocal ways
        if not slot.allows(token):
            assert not left, (token, left)
            ways += 1
            return
        assert left, "the phrase was written"
        after = BanSlot(table, 0)
        after.state = slot.step(token)
        for following in by_first.get(left[0], ()):
            if left.startswith(following):
                go(after, following, left[len(following) :])
            elif following.startswith(left):
                go(after, following, b"")

    for token in starts - {b""}:
        overlap = max(n for n in range(1, len(token) + 1) if token.endswith(phrase[:n]))
        if token == phrase[:overlap] or token == b" " + phrase[:overlap]:
            go(BanSlot(table, 0), token, phrase[overlap:])
    assert ways >= (100 if phrase.isascii() else 8)


def test_the_mask_of_a_state_says_what_the_executor_says_of_each_token(smollm2: list[bytes]) -> None:
    limits = [
        Limits((b"guaranteed return", b" a")),
        Limits(texts=(b"yes", b"no")),
        Limits(characters=parse_class("0-9.")),
    ]
    table = read_bans(build_bans(limits), "test")
    vocab = read_vocab(write_vocab(smollm2), "test")
    legal = LegalTokens(table, vocab, len(smollm2), (2,))
    for profile, before in ((0, b""), (0, b"guaranteed retur"), (1, b""), (1, b"ye"), (2, b"1"), (1, b"no")):
        slot = BanSlot(table, profile)
        slot.advance(before)
        wanted = [slot.allows(token) for token in smollm2]
        wanted[2] = slot.may_end
        assert legal.mask(slot).tolist() == wanted
        assert legal.mask(slot) is legal.mask(slot)
