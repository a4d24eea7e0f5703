"""Tests the outlier test: prompts that are far off, against samples of the path's noise."""

import math

import numpy as np
import pytest

from octet.proof.outliers import exceeded, find_outliers, heaviness, rank_tails

NONE = [1] * 64  # no prompt is longer than another


def ratios(a: int, *shape: int, seed: int = 0) -> np.ndarray:
    """ln F(2a, 2a)."""
    rng = np.random.default_rng(seed)
    return np.log(rng.chisquare(2 * a, shape) / rng.chisquare(2 * a, shape))


@pytest.mark.parametrize("a", [1, 4, 7])
def test_the_upper_tail_is_that_of_f(a: int) -> None:
    sample = ratios(a, 200_000)
    for r in (0.0, 0.5, 1.0, 2.0):
        assert (sample > r).mean() == pytest.approx(exceeded(r, a), rel=0.05, abs=5e-4)
    assert exceeded(-800.0, a) == 1.0 and exceeded(800.0, a) == 0.0


@pytest.mark.parametrize("a", [2, 4, 6])
def test_what_is_taken_for_the_tail_is_never_much_lighter_than_it_is(a: int) -> None:
    found = [heaviness(ratios(a, 1000, seed=seed)) for seed in range(50)]
    assert a - 2 < np.mean(found) <= a
    assert max(found) <= a + 1


def test_without_repeats_the_tail_is_the_heaviest() -> None:
    assert heaviness(np.empty(0)) == 1
    assert heaviness(np.full(10, 50.0)) == 1
    assert heaviness(np.zeros(10)) == 7


def test_the_level_is_kept() -> None:
    """Of 2,000 honest servers at most 5 % have a chance of 5 %: Bonferroni makes it fewer."""
    found = [find_outliers(x, range(64), 5).chance < 0.05 for x in ratios(5, 2000, 64)]
    assert 0 < np.mean(found) <= 0.05


def test_few_that_are_far_off_and_many_that_are_a_little() -> None:
    honest = ratios(5, 64)
    far = honest.copy()
    far[7] = 6.0
    found = find_outliers(far, NONE, 5)
    assert found.chance < 1e-6 and found.prompts == (7,)
    moved = find_outliers(honest + 1.0, NONE, 5)
    assert moved.chance < 1e-6 and len(moved.prompts) > 16


def test_the_longest_prompts_alone() -> None:
    """By 1.7 above the others, which would not be found among all of them."""
    rng = np.random.default_rng(3)
    lengths = rng.permutation(64)
    values = np.clip(ratios(5, 64), None, 1.0)
    values[lengths >= 48] = 1.7
    found = find_outliers(values, lengths.tolist(), 5)
    assert found.chance < 1e-6
    assert found.chance < find_outliers(values, NONE, 5).chance / 10
    assert {int(lengths[n]) for n in found.prompts} == set(range(48, 64))


def test_one_prompt_and_none() -> None:
    assert find_outliers(np.array([9.0]), [3], 5).chance < 1e-4
    assert find_outliers(np.array([]), [], 5).chance == 1.0
    assert math.isclose(find_outliers(np.array([-9.0]), [3], 5).chance, 1.0)


def test_ranks_have_their_exact_tails() -> None:
    lengths = [5, 9, 9, 20]
    assert rank_tails(lengths, [3]) == (1.0, 0.25)
    assert rank_tails(lengths, [1]) == (0.75, 0.75)  # as low: 5, 9, 9; as high: 9, 9, 20
    assert rank_tails(lengths, [0, 1]) == pytest.approx((2 / 6, 1.0))
    assert rank_tails([7] * 4, [0, 2]) == (1.0, 1.0)
    low, high = rank_tails(range(64), range(32, 64))
    assert low == 1.0 and high == pytest.approx(1 / math.comb(64, 32))
