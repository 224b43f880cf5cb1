"""The CPU sampler against the reference that the kernel is held to (itself held to Random123 and the softmax)."""

from __future__ import annotations

import kernel_reference
import numpy as np
import pytest

from ralbuild.runtime.sampler import Draw, Sampler, noise, noise_of_all

SIZE, VOCAB = 3000, 3072


def rows(count: int, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(11).normal(0, spread, (count, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 20.0])
@pytest.mark.parametrize(
    ("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.7, 0.9), (2.0, 0.1), (0.05, 1.0)]
)
def test_the_draw_is_the_one_of_the_reference(spread: float, temperature: float, top_p: float) -> None:
    sampler = Sampler(SIZE)
    for step, row in enumerate(rows(12, spread)):
        seed = 0xFFFF_FFFF_0000_0000 + step * 977
        expected, _ = kernel_reference.sample(
            row,
            tokenizer_size=SIZE,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            step=step,
            eos_id=2,
            allows=lambda _: True,
        )
        assert next(sampler.ranked(row, Draw(temperature, top_p, seed), step)) == expected


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.8, 0.7)])
def test_refused_candidates_are_followed_by_those_of_the_reference(temperature: float, top_p: float) -> None:
    allowed = set(range(0, SIZE, 97))
    for step, row in enumerate(rows(6)):
        token, refused = kernel_reference.sample(
            row,
            tokenizer_size=SIZE,
            temperature=temperature,
            top_p=top_p,
            seed=5,
            step=step,
            eos_id=2,
            allows=allowed.__contains__,
        )
        ranked = list(Sampler(SIZE).ranked(row, Draw(temperature, top_p, 5), step))
        assert sorted(ranked) == list(range(SIZE))
        assert ranked[refused] == token or refused == kernel_reference.CANDIDATES
        assert not allowed & set(ranked[: min(refused, kernel_reference.CANDIDATES)])


def test_noise_of_all_ids_is_the_noise_of_each() -> None:
    ids = np.arange(2500)
    assert np.array_equal(noise_of_all(9, 4, 2500), noise(9, 4, ids))
    assert np.array_equal(
        noise(9, 4, ids), kernel_reference.gumbel(kernel_reference.philox_uniform(9, 4, ids))
    )


def test_ids_beyond_the_tokenizer_and_numbers_that_are_none_are_never_drawn() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[SIZE:] = 100
    row[17] = np.nan
    for temperature in (0.0, 1.0):
        ranked = list(Sampler(SIZE).ranked(row, Draw(temperature, 1.0, 1), 0))
        assert max(ranked) < SIZE
        assert 17 not in ranked
    row[:] = np.nan
    assert list(Sampler(SIZE).ranked(row, Draw(), 0)) == []


def test_equal_logits_are_taken_by_rising_id() -> None:
    assert list(Sampler(40).ranked(np.ones(40, np.float32), Draw(), 0)) == list(range(40))


def test_a_draw_depends_on_seed_and_step_and_on_nothing_else() -> None:
    row = rows(1)[0]
    sampler = Sampler(SIZE)
    draws = [
        [next(sampler.ranked(row, Draw(1.0, 1.0, seed), step)) for step in range(50)] for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert len(set(draws[0])) > 10


def test_frequencies_follow_the_softmax() -> None:
    row = np.array([1.0, 0.0, -1.0, 2.0], np.float32)
    sampler, count = Sampler(4), 4_000
    drawn = [next(sampler.ranked(row, Draw(0.8, 1.0, 3), step)) for step in range(count)]
    share = np.bincount(drawn, minlength=4) / count
    exact = np.exp(row / 0.8) / np.exp(row / 0.8).sum()
    assert np.all(abs(share - exact) < 5 * np.sqrt(exact * (1 - exact) / count))
