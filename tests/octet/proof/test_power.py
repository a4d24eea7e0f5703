"""The stated power is that of the judge: smaller faults pass, larger ones do not."""

from dataclasses import replace

import numpy as np
import pytest

from octet.artifacts.scenarios import ScenarioSet
from octet.proof.declared import declared_paths
from octet.proof.judge import judge
from octet.proof.power import power
from octet.recipe import PRESETS
from tests.octet.proof.worlds import BARE, HONEST, SIZES, World, log_softmax, make_world

KNOWN = tuple(h for h in SIZES if h != BARE)
SEEDS = range(12)


def scenarios(world: World, seed: int) -> ScenarioSet:
    return world.scenarios(seed, known=KNOWN, fault_records=24)


def limit(world: World, seed: int, prompts: int = 24) -> float:
    found = power(world.golden, scenarios(world, seed), HONEST.path, prompts)
    assert found is not None and 0 < found.low <= found.middle <= found.high
    return found.middle


@pytest.mark.parametrize(("times", "passing"), [(0.5, True), (3.0, False)])
def test_faults_that_were_not_simulated_pass_below_the_limit(times: float, passing: bool) -> None:
    passed = 0
    for seed in SEEDS:
        world = make_world(seed)
        server = of_effect(world, seed, times * limit(world, seed))
        found = judge(
            world.golden,
            scenarios(world, seed),
            declared_paths(scenarios(world, seed), PRESETS["fp8"], "e5m2"),
            server.server(HONEST, seed, records=range(24)),
        )
        passed += found.outcome == "as_expected"
    assert passed >= 11 if passing else passed <= 1, passed


def test_more_prompts_find_smaller_faults() -> None:
    for seed in range(3):
        world = make_world(seed)
        assert limit(world, seed, 64) < limit(world, seed, 24)


def of_effect(world: World, seed: int, effect: float) -> World:
    """The world with an error of its own in the honest path, of that change of perplexity."""
    rng = np.random.default_rng([seed, 9])
    shape = world.errors[HONEST].shape
    own = rng.normal(size=shape) * world.sensitivity[:, None, None]
    low, high = 0.0, 10.0
    for _ in range(40):
        size = (low + high) / 2
        faulty = world.errors[HONEST] + size * own
        more = divergence(world, faulty) - divergence(world, world.errors[HONEST])
        low, high = (size, high) if np.expm1(more) < effect else (low, size)
    return replace(world, errors={**world.errors, HONEST: faulty})


def divergence(world: World, error: np.ndarray) -> float:
    before, now = log_softmax(world.logits), log_softmax(world.logits + error)
    return float((np.exp(before) * (before - now)).sum(-1).mean())
