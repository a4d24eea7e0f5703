"""The stated power is that of the judge, which refuses about half of the faults of that size."""

from dataclasses import replace

import numpy as np
import pytest

from octet.artifacts.scenarios import ScenarioSet
from octet.artifacts.serving_path import Power, power_text
from octet.proof.declared import declared_paths
from octet.proof.judge import judge
from octet.proof.power import LOOKS, power
from octet.recipe import PRESETS
from tests.octet.proof.worlds import BARE, HONEST, SIZES, World, log_softmax, make_world

KNOWN = tuple(h for h in SIZES if h != BARE)
SEEDS = range(24)


def scenarios(world: World, seed: int) -> ScenarioSet:
    return world.scenarios(seed, known=KNOWN, fault_records=24)


def limit(world: World, seed: int, prompts: int = 24) -> float:
    found = power(world.golden, scenarios(world, seed), HONEST.path, prompts)
    assert found is not None and 0 < found.low <= found.middle <= found.high
    return found.middle


def refused(times: float, prompts: int) -> int:
    """Counts the servers with a fault of `times` the stated size that are refused, of 24.

    Each has another fault, which was not simulated, and is judged as in an admission.
    """
    count = 0
    for seed in SEEDS:
        world = make_world(seed)
        known = scenarios(world, seed)
        server = of_effect(world, seed, times * limit(world, seed, prompts))
        found = judge(
            world.golden,
            known,
            declared_paths(known, PRESETS["fp8"], "e5m2"),
            server.server(HONEST, seed, records=range(prompts)),
            looks=LOOKS,
        )
        count += found.outcome in ("better", "worse")
    return count


@pytest.mark.parametrize("prompts", [24, 48])
def test_about_half_of_the_faults_of_the_stated_size_are_refused(prompts: int) -> None:
    assert 6 <= refused(1.0, prompts) <= 18
    assert refused(0.4, prompts) <= 2
    assert refused(2.5, prompts) >= 22


def test_more_prompts_find_smaller_faults() -> None:
    for seed in range(3):
        world = make_world(seed)
        assert limit(world, seed, 64) < limit(world, seed, 24)


def test_simulated_faults_do_not_change_the_power() -> None:
    """They are large: scaled down, they would be easier to find than small faults are."""
    world = make_world(0)
    known = scenarios(world, 0)
    paths = {h: x for h, x in known.logprobs.items() if h.fault is None}
    assert len(paths) < len(known.logprobs)
    found = power(world.golden, known, HONEST.path, 48)
    assert found is not None
    assert power(world.golden, replace(known, logprobs=paths), HONEST.path, 48) == found


def test_without_a_second_path_nothing_is_stated() -> None:
    world = make_world(0)
    alone = world.scenarios(0, known=(HONEST,))
    assert power(world.golden, alone, HONEST.path, 24) is None


def test_it_says_what_happens_to_faults_of_the_stated_size() -> None:
    world = make_world(0)
    found = power(world.golden, scenarios(world, 0), HONEST.path, 24)
    assert found is not None
    size = f"{100 * found.middle:.2g} to {200 * found.middle:.2g} % after 24 prompts"
    text = power_text([found])
    assert text.startswith("about half of the faults that were not simulated are refused if they")
    assert size in text and "most smaller ones pass, and some up to five times" in text


def test_figures_of_an_earlier_version_are_loaded_as_what_they_were() -> None:
    earlier = Power.model_validate({"prompts": 24, "low": 0.003, "middle": 0.0057, "high": 0.01})
    text = power_text([earlier])
    assert "begin to show if they change perplexity by 0.57 % after 24 prompts" in text
    assert "half of them are refused only at about three times as much" in text


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
