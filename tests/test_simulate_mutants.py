"""A small, fixed share of the mutants of `simulate_mutants.py`: what is damaged is noticed."""

from __future__ import annotations

import pytest
import simulate_mutants


@pytest.mark.parametrize(("name", "count"), [("penalize", 10), ("feedback", 20)])
def test_small_damage_to_a_built_in_kernel_is_noticed(name: str, count: int) -> None:
    """`transduce` and `sample` need more time than a test has: docs/simulate.md says how many are caught."""
    survivors: list[str] = []
    tally = simulate_mutants.run_mutants(name, count, 1, survivors.append)
    assert tally.total >= count - 4, "most mutants are not equivalent"
    assert not tally.survivors, survivors
