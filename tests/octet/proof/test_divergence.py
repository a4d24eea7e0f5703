"""The figures, beside their definitions."""

import math

import numpy as np
import pytest

from octet.artifacts.golden import GoldenRecord, GoldenSet, Top
from octet.proof.divergence import measure
from octet.proof.responses import Response
from tests.plain_divergence import plain_divergence

TOP = Top(token_ids=(1, 2), logprobs=(math.log(0.7), math.log(0.2)))


def golden(records: int = 3, prompt_nll: float | None = None) -> GoldenSet:
    record = GoldenRecord(
        prompt="a b c",
        prompt_token_ids=(5, 6, 7),
        continuation_token_ids=(1, 1),
        tops=(TOP, TOP),
        prompt_nll=prompt_nll,
    )
    return GoldenSet(
        weights_sha256="w", compute_dtype="float32", software={}, records=(record,) * records
    )


def told(p: float) -> dict[int, float]:
    return {1: math.log(p), 2: math.log(0.9 - p)}


def test_means_are_of_prompts_and_the_interval_is_over_them() -> None:
    served = [told(0.6), told(0.5), told(0.4)]
    responses = [Response(n, (1, 1), (served[n], told(0.7))) for n in range(3)]
    values = [plain_divergence(TOP.mapping, x) for x in served]
    means = np.array(values) / 2  # the second position of each is exact
    found = measure(golden(), responses)
    assert found.kl_mean == pytest.approx(means.mean())
    spread = 4.302653 * means.std(ddof=1) / math.sqrt(3)  # t of 97.5 % with 2 degrees of freedom
    assert found.kl_high == pytest.approx(means.mean() + spread)
    assert found.kl_low == 0.0  # divergence is not negative
    assert found.kl_max == pytest.approx(max(values))
    assert found.kl_p90 == pytest.approx(np.quantile([*values, 0, 0, 0], 0.9))
    assert (found.prompts, found.positions, found.agreement) == (3, 6, 1.0)


def test_the_interval_is_further_out_where_the_tail_is() -> None:
    """One prompt of twelve has most of it, as is usual: Student's end would be too low."""
    served = [told(0.69 - 0.002 * n) for n in range(11)] + [told(0.2)]
    means = np.array([plain_divergence(TOP.mapping, x) for x in served])
    found = measure(golden(12), [Response(n, (1,), (x,)) for n, x in enumerate(served)])
    spread = 2.200985 * means.std(ddof=1) / math.sqrt(12)  # t of 97.5 % with 11 degrees
    assert found.kl_mean == pytest.approx(means.mean())
    assert found.kl_high > means.mean() + 1.5 * spread


def test_agreement_is_of_the_tokens_before_the_first_other_one() -> None:
    responses = [Response(0, (1, 9), (told(0.7),) * 2), Response(1, (9, 1), (told(0.7),) * 2)]
    found = measure(golden(), responses)
    assert found.agreement == pytest.approx(1 / 4)
    assert found.positions == 3


def test_no_mass_at_all_is_a_finite_figure() -> None:
    """A server whose two tokens have all mass gives the reference's rest none."""
    found = measure(golden(), [Response(0, (1,), ({1: math.log(0.7), 2: math.log(0.3)},))])
    assert found.kl_mean == 88.0 and math.isinf(found.kl_high)


def test_perplexity_of_the_prompts_needs_both_sides() -> None:
    responses = [Response(0, (1,), (told(0.7),), (None, -1.0, -2.5))]
    assert measure(golden(), responses).perplexity_change is None
    found = measure(golden(prompt_nll=3.0), responses).perplexity_change
    assert found == pytest.approx(math.exp(0.5 / 2) - 1)
    cut = [Response(0, (1,), (told(0.7),), (None, -1.0))]
    assert measure(golden(prompt_nll=3.0), cut).perplexity_change is None


def test_nothing_to_compare() -> None:
    found = measure(golden(), [Response(0, (), ())])
    assert found.prompts == 0 and math.isnan(found.kl_mean) and math.isnan(found.agreement)
