"""Points whose distances are divergences, as far as a server told."""

from itertools import pairwise

import numpy as np
import pytest

from octet.proof.divergence import divergences
from octet.proof.hellinger import Answers
from octet.proof.noise import distance
from tests.octet.proof.worlds import HONEST, TOLD, World, log_softmax, make_world

WORLD = make_world(0, records=6, positions=2)


def near(world: World, size: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    return log_softmax(world.logits + size * rng.normal(size=world.logits.shape))


def golden_tokens(world: World, logprobs: np.ndarray) -> np.ndarray:
    """[1, records, positions, TOLD], as a simulation keeps them."""
    index = np.array([[t.token_ids for t in r.tops] for r in world.golden.records])
    return np.take_along_axis(logprobs, index, -1)[None].astype(np.float32)


@pytest.mark.parametrize("told", [1, 3, 5, 20])
@pytest.mark.parametrize("size", [0.1, 1.0, 5.0])
def test_a_server_is_where_its_own_simulation_is(told: int, size: float) -> None:
    """Whatever it left out: its own distribution never contradicts what it told."""
    logprobs = near(WORLD, size)
    answers = Answers.of(WORLD.golden, WORLD.responses(logprobs, told))
    (point,) = answers.points(golden_tokens(WORLD, logprobs))
    assert distance(answers.served, point).max() < 1e-6


def test_small_distances_are_twice_the_divergence() -> None:
    logprobs = near(WORLD, 0.05)
    answers = Answers.of(WORLD.golden, WORLD.responses(logprobs))
    (kl,) = answers.divergences(golden_tokens(WORLD, logprobs))
    squared = distance(answers.served, answers.reference) / answers.compared.sum(1)
    np.testing.assert_allclose(squared, 2 * kl, rtol=0.1)


@pytest.mark.parametrize("told", [1, 3, 5, 20])
@pytest.mark.parametrize("size", [0.1, 1.0, 5.0])
def test_the_expected_divergence_is_what_is_measured(told: int, size: float) -> None:
    """Of a server that answers what was simulated, also where it leaves likely tokens out."""
    logprobs = near(WORLD, size)
    responses = WORLD.responses(logprobs, told)
    (expected,) = Answers.of(WORLD.golden, responses).divergences(golden_tokens(WORLD, logprobs))
    measured = [x.mean() for x in divergences(WORLD.golden, responses)]
    np.testing.assert_allclose(expected, measured, rtol=1e-4, atol=1e-5)


def test_less_told_never_makes_a_distance_longer() -> None:
    logprobs, other = near(WORLD, 0.5), golden_tokens(WORLD, near(make_world(0, 6, 2), 0.1))
    found = []
    for told in (20, 10, 5, 1):
        answers = Answers.of(WORLD.golden, WORLD.responses(logprobs, told))
        found.append(distance(answers.points(other)[0], answers.reference))
    assert all((less <= more + 1e-9).all() for more, less in pairwise(found))
    assert (found[-1] < found[0]).any()


def test_tokens_that_are_left_out_are_a_contradiction_beyond_what_they_can_have() -> None:
    """A server that told tokens of which none is the reference's."""
    logprobs = log_softmax(-WORLD.logits * 3)
    answers = Answers.of(WORLD.golden, WORLD.responses(logprobs, 5))
    assert not answers.shared.any()
    assert (distance(answers.served, answers.reference) > 4).all()


def test_records_without_numbers_are_nan() -> None:
    told = golden_tokens(WORLD, near(WORLD, 0.1))
    told[:, 2] = np.nan
    answers = Answers.of(WORLD.golden, WORLD.server(HONEST, 0))
    assert np.isnan(answers.points(told)[0, 2]).all()
    assert np.isnan(answers.divergences(told)[0]).tolist() == [n == 2 for n in range(6)]


def test_a_record_without_a_comparable_position_is_left_out() -> None:
    responses = WORLD.server(HONEST, 0, told=TOLD, records=(1, 4))
    assert Answers.of(WORLD.golden, responses).records.tolist() == [1, 4]
