"""Servers whose truth is known: honest ones are admitted, others refused and named."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from octet.artifacts.scenarios import Fault, Scenario, ScenarioSet
from octet.artifacts.serving_path import ServingPath
from octet.proof.declared import Declared, declared_paths
from octet.proof.judge import judge, unprovable
from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from octet.recipe import PRESETS
from tests.octet.proof.worlds import (
    BARE,
    E4M3,
    FLOAT32,
    HALVED,
    HONEST,
    NO_K_SCALE,
    NO_V_SCALE,
    SIZES,
    TOLD,
    World,
    log_softmax,
    make_flat_world,
    make_world,
)

RECIPE = PRESETS["fp8"]
FAULT_RECORDS = 24


def verdict(
    world: World, seed: int, responses: list[Response], known: tuple[Scenario, ...] | None = None
) -> Verdict:
    known = tuple(SIZES) if known is None else known
    scenarios = world.scenarios(seed, known=known, fault_records=FAULT_RECORDS)
    declared = declared_paths(scenarios, RECIPE, "e5m2")
    return judge(world.golden, scenarios, declared, responses)


@pytest.mark.parametrize("truth", [HONEST, FLOAT32], ids=lambda h: h.path.compute)
def test_honest_servers_are_as_expected(truth: Scenario) -> None:
    """20 of 20: with 95 % confidence, at most 14 % are not (Clopper and Pearson)."""
    for seed in range(20):
        world = make_world(seed)
        found = verdict(world, seed, world.server(truth, seed))
        assert found.outcome == "as_expected", (seed, found.reason)
        assert found.cause is None and found.expected is not None
        assert 0.3 < found.measure.kl_mean / found.expected.mean < 3


def test_scales_that_the_engine_rounds_are_told() -> None:
    rounded = Scenario(path=ServingPath(kv_cache="e5m2", power_scales=True))
    for seed in range(10):
        world = make_world(seed)
        known = world.scenarios(seed, known=tuple(SIZES), fault_records=FAULT_RECORDS)
        paths = {rounded if h == E4M3 else h: x for h, x in known.logprobs.items()}
        scenarios = replace(known, logprobs=paths)
        declared = declared_paths(scenarios, PRESETS["fp8-block"], "e5m2")
        for truth, told in ((E4M3, True), (HONEST, False)):
            found = judge(world.golden, scenarios, declared, world.server(truth, seed))
            assert found.outcome == "as_expected", (seed, found.reason)
            assert ("rounded up to powers of two" in found.reason) == told, (seed, found.reason)


@pytest.mark.parametrize("noisier", [0.5, 1.3])
def test_kernels_of_another_noise_are_honest_too(noisier: float) -> None:
    for seed in range(10):
        world = make_world(seed)
        found = verdict(world, seed, world.server(HONEST, seed, noisier=noisier))
        assert found.outcome == "as_expected", (seed, found.reason)


@pytest.mark.parametrize(
    ("truth", "outcome", "cause"),
    [
        (BARE, "better", "unquantized"),
        (E4M3, "better", "kv_cache_e4m3"),
        (NO_K_SCALE, "worse", "k_scale_dropped"),
        (HALVED, "worse", "weight_scales_scaled, layer 3, x0.5"),
    ],
    ids=["unquantized", "e4m3", "k_scale", "halved"],
)
def test_others_are_refused_and_named(truth: Scenario, outcome: str, cause: str) -> None:
    for seed in range(10):
        world = make_world(seed)
        found = verdict(world, seed, world.server(truth, seed))
        assert found.cause is not None, (seed, found.reason)
        assert (found.outcome, found.cause.name) == (outcome, cause), seed
        assert found.cause.sentence in found.reason and found.cause.remedy in found.reason
        assert found.ranking[0].label == truth.label
        assert found.ranking[0].z > 3


def test_of_two_faults_that_answer_alike_neither_is_claimed() -> None:
    """The verdict names both and what it is not; by chance one seems nearer, once in 20 times."""
    twin = Scenario(path=HONEST.path, fault=Fault(kind="kv_bytes_reread"))
    claimed = 0
    for seed in range(10):
        world = make_world(seed)
        made = world.scenarios(seed, fault_records=FAULT_RECORDS)
        alike = world.scenarios(seed + 100, fault_records=FAULT_RECORDS).logprobs[NO_K_SCALE]
        scenarios = replace(made, logprobs={**made.logprobs, twin: alike})
        declared = declared_paths(scenarios, RECIPE, "e5m2")
        found = judge(world.golden, scenarios, declared, world.server(NO_K_SCALE, seed))
        assert found.outcome == "worse" and found.cause is not None
        if found.cause.name != "undecided":
            claimed += 1
            continue
        told, _, excluded = found.cause.sentence.partition("; not: ")
        assert "without their k_scale" in told and "E5M2 bytes read as E4M3" in told
        others = ["kv cache e4m3", "unquantized", "v_scale dropped", "weight scales scaled"]
        assert sorted(excluded.split(", ")) == others
    assert claimed <= 2


def test_what_the_numbers_cannot_show_is_listed_and_never_named() -> None:
    for seed in range(5):
        world = make_world(seed)
        for truth in (HONEST, NO_V_SCALE):
            found = verdict(world, seed, world.server(truth, seed))
            assert found.hidden == (NO_V_SCALE.label,)
            assert found.outcome == "as_expected"


def test_another_model_is_not_taken_for_a_fault() -> None:
    for seed in range(10):
        world = make_world(seed)
        other = world.responses(log_softmax(make_world(seed + 1000).logits))
        found = verdict(world, seed, other)
        assert found.outcome == "worse"
        assert found.cause is not None and found.cause.name == "another_model"


def test_a_fine_tuned_model_is_another_one() -> None:
    rng = np.random.default_rng(0)
    world = make_world(0)
    moved = log_softmax(world.logits + rng.normal(size=world.logits.shape) * 0.5)
    found = verdict(world, 0, world.responses(moved))
    assert found.cause is not None and found.cause.name == "another_model"


@pytest.fixture
def garbled(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """A simulated fault that moves nearly all probability to tokens the reference never names.

    Other models do so too: in 600 tokens they are nearer to it than to any conforming path.
    """
    fault = Scenario(path=HONEST.path, fault=Fault(kind="nibbles_swapped"))
    monkeypatch.setitem(cast(dict[Scenario, tuple[float, float]], SIZES), fault, (6.0, 0.15))
    monkeypatch.setattr("tests.octet.proof.worlds.TOKENS", 600)
    return fault


Logits = NDArray[np.float64]
RUBBISH: dict[str, Callable[[Logits, np.random.Generator], Logits]] = {
    "constant logits": lambda x, rng: np.zeros_like(x),
    "one token": lambda x, rng: np.zeros_like(x) + 12.0 * (np.arange(x.shape[-1]) == 7),
    "one distribution": lambda x, rng: np.zeros_like(x) + 3 * rng.normal(size=x.shape[-1]),
    "noise": lambda x, rng: 3 * rng.normal(size=x.shape),
    "sharp noise": lambda x, rng: 8 * rng.normal(size=x.shape),
    "answers to other prompts": lambda x, rng: np.roll(x, 1, axis=0),
    "logits divided by 10": lambda x, rng: x / 10,
}


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_rubbish_is_not_taken_for_a_fault_that_answers_rubbish(
    rubbish: str, garbled: Scenario
) -> None:
    for seed in range(2):
        world = make_world(seed)
        made = RUBBISH[rubbish](world.logits, np.random.default_rng([seed, 3]))
        found = verdict(world, seed, world.responses(log_softmax(made)))
        assert found.outcome == "worse"
        assert found.cause is not None and found.cause.name == "another_model", found.reason
        assert found.ranking[0].label == garbled.label  # it is the likeliest, and explains nothing


def test_a_fault_that_answers_rubbish_is_named(garbled: Scenario) -> None:
    for seed in range(2):
        world = make_world(seed)
        found = verdict(world, seed, world.server(garbled, seed))
        assert found.outcome == "worse"
        assert found.cause is not None and found.cause.name == "nibbles_swapped", found.reason


@pytest.mark.parametrize(("showing", "cause"), [(4, "nibbles_swapped"), (2, "another_model")])
def test_prompts_that_show_nothing_do_not_count_against_a_cause(
    showing: int, cause: str, garbled: Scenario
) -> None:
    """After the others the fault gives the reference's tokens no probability, as rubbish may."""
    for seed in range(2):
        world = make_world(seed)
        errors = world.errors[garbled] * 0.3
        told = world.logits >= np.sort(world.logits)[..., [-TOLD]]
        errors[showing:] = np.where(told, -60.0 - world.logits, errors)[showing:]
        world = replace(world, errors={**world.errors, garbled: errors})
        found = verdict(world, seed, world.server(garbled, seed))
        assert found.outcome == "worse"
        assert found.cause is not None and found.cause.name == cause, found.reason


def test_a_fallback_is_refused_though_nobody_simulated_it() -> None:
    """The reference itself is always a scenario: what computes in full precision is near it."""
    known = (HONEST, FLOAT32, NO_K_SCALE)
    for seed in range(5):
        world = make_world(seed)
        found = verdict(world, seed, world.responses(log_softmax(world.logits)), known)
        assert found.outcome == "better"
        assert found.cause is not None and found.cause.name == "unquantized"


@pytest.mark.parametrize("told", [5, 10])
def test_few_logprobs_are_enough(told: int) -> None:
    found = Counter()
    for seed in range(5):
        world = make_world(seed)
        for truth in (HONEST, NO_K_SCALE, BARE):
            answer = verdict(world, seed, world.server(truth, seed, told=told))
            found[truth, answer.cause.name if answer.cause else answer.outcome] += 1
    assert found == {
        (HONEST, "as_expected"): 5,
        (NO_K_SCALE, "k_scale_dropped"): 5,
        (BARE, "unquantized"): 5,
    }


def test_few_prompts_decide_nothing_unless_they_are_clear() -> None:
    world = make_world(0)
    few = verdict(world, 0, world.server(HONEST, 0, records=range(3)))
    assert few.outcome == "inconclusive" and few.cause is None
    assert "do not yet exclude" in few.reason
    clear = verdict(world, 0, world.server(HALVED, 0, records=range(12)))
    assert clear.outcome == "worse"


def test_no_answer_is_inconclusive() -> None:
    world = make_world(0)
    found = verdict(world, 0, [])
    assert found.outcome == "inconclusive" and found.measure.prompts == 0
    assert found.as_json()["measure"]["kl_mean"] is None


def test_the_last_answer_to_a_record_counts() -> None:
    world = make_world(0)
    broken, whole = world.server(HALVED, 0), world.server(HONEST, 0)
    assert verdict(world, 0, broken + whole).as_json() == verdict(world, 0, whole).as_json()


def test_an_unquantized_pool_is_held_to_the_unquantized_path() -> None:
    for seed in range(5):
        world = make_world(seed)
        scenarios = world.scenarios(seed)
        declared = declared_paths(scenarios, RECIPE, "e5m2", weights="original")
        assert declared.paths == (BARE.path,)
        honest = judge(world.golden, scenarios, declared, world.server(BARE, seed))
        assert honest.outcome == "as_expected", honest.reason
        other = judge(world.golden, scenarios, declared, world.server(HONEST, seed))
        assert other.outcome == "worse" and other.cause is not None
        assert other.cause.name == "quantized"


def test_an_unquantized_server_in_16_bits_is_not_held_to_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32 it computes the reference, from which the noise of 16 bits is far away."""
    exact = Scenario(path=BARE.path.model_copy(update={"compute": "float32"}))
    sizes = {BARE: (0.0, 0.05), exact: (0.0, 1e-5)}
    for scenario, size in sizes.items():
        monkeypatch.setitem(cast(dict[Scenario, tuple[float, float]], SIZES), scenario, size)
    for seed in range(5):
        world = make_world(seed)
        errors = {**world.errors, **{each: np.zeros_like(world.logits) for each in sizes}}
        world = replace(world, errors=errors)
        scenarios = world.scenarios(seed, known=tuple(SIZES))
        declared = declared_paths(scenarios, RECIPE, "e5m2", weights="original")
        assert set(declared.paths) == {BARE.path, exact.path}
        for truth in sizes:
            found = judge(world.golden, scenarios, declared, world.server(truth, seed))
            assert found.outcome == "as_expected", (truth, found.reason)


def test_more_looks_ask_for_more_evidence() -> None:
    """Between honesty and a fault: what one look refuses, a thousand do not."""
    world = make_world(0)
    scenarios = world.scenarios(0)
    declared = declared_paths(scenarios, RECIPE, "e5m2")
    responses = world.server(HALVED, 0, records=range(8))
    once = judge(world.golden, scenarios, declared, responses)
    often = judge(world.golden, scenarios, declared, responses, looks=10**9)
    assert once.outcome == "worse" and often.outcome == "inconclusive"


class TestWithoutSimulation:
    """Only the divergence is known, and a bound for it."""

    DECLARED = Declared((), "fp8 weights, e5m2 cache")

    def judged(self, truth: Scenario, bound: float | None, records: range) -> Verdict:
        world = make_world(0)
        responses = world.server(truth, 0, records=records)
        return judge(world.golden, None, self.DECLARED, responses, bound=bound)

    def test_it_is_held_against_the_bound(self) -> None:
        honest = self.judged(HONEST, 0.1, range(48))
        assert honest.outcome == "as_expected" and honest.expected is None
        assert "without a simulation" in honest.reason
        assert self.judged(HALVED, 0.1, range(48)).outcome == "worse"

    def test_few_prompts_near_the_bound_are_inconclusive(self) -> None:
        mean = self.judged(HONEST, 0.1, range(6)).measure.kl_mean
        assert self.judged(HONEST, mean, range(6)).outcome == "inconclusive"

    def test_without_a_bound_nothing_is_said(self) -> None:
        assert self.judged(HONEST, None, range(48)).outcome == "inconclusive"

    def test_a_declaration_that_nobody_simulated_says_so(self) -> None:
        world = make_world(0)
        scenarios = world.scenarios(0)
        declared = declared_paths(scenarios, RECIPE, "float16")
        found = judge(world.golden, scenarios, declared, world.server(HONEST, 0), bound=0.1)
        assert declared.paths == () and "without a simulation" in found.reason


def test_a_verdict_is_json_with_every_figure() -> None:
    world = make_world(0)
    told = verdict(world, 0, world.server(NO_K_SCALE, 0)).as_json()
    assert told["path"] == HONEST.path.label or told["path"] == FLOAT32.path.label
    assert told["cause"]["name"] == "k_scale_dropped"
    assert told["measure"]["prompts"] == 48
    assert len(told["ranking"]) == len(SIZES) + 1  # and the reference


def test_a_hypothesis_without_numbers_is_no_candidate() -> None:
    world = make_world(0)
    whole = world.scenarios(0)
    nan = {h: np.full_like(x, np.nan) if h == E4M3 else x for h, x in whole.logprobs.items()}
    scenarios = ScenarioSet(whole.weights_sha256, whole.recipe, nan)
    declared = Declared((HONEST.path,), "")
    found = judge(world.golden, scenarios, declared, world.server(HONEST, 0))
    assert E4M3.label not in [score.label for score in found.ranking]
    assert ServingPath(kv_cache="e4m3").label == E4M3.label


@pytest.mark.parametrize("truth", [BARE, E4M3, NO_K_SCALE, HALVED], ids=lambda h: h.label)
def test_nothing_visible_is_admitted_however_few_prompts_were_asked(truth: Scenario) -> None:
    for seed in range(4):
        world = make_world(seed)
        scenarios = world.scenarios(seed)
        declared = declared_paths(scenarios, RECIPE, "e5m2")
        answers = world.server(truth, seed)
        for count in (4, 8, 16):
            found = judge(world.golden, scenarios, declared, answers[:count], looks=3)
            assert found.outcome != "as_expected", (seed, count, found.reason)


@pytest.mark.parametrize("rounding", [1.0, 4.0])
def test_the_expected_range_is_that_of_answers_that_leave_likely_tokens_out(
    rounding: float,
) -> None:
    """In a flat distribution rounding decides which 20 of many tokens are the likeliest."""
    found = []
    for seed in range(6):
        world = make_flat_world(seed, rounding)
        answers = world.server(HONEST, seed)
        told = verdict(world, seed, answers)
        assert told.outcome == "as_expected" and told.expected is not None, told.reason
        found.append(told.measure.kl_mean / told.expected.mean)
    assert 0.8 < np.mean(found) < 1.25, found


def test_a_distribution_too_flat_to_show_faults_is_named() -> None:
    """Nobody is proven or refused there, right or wrong, after however many prompts."""
    for truth in (HONEST, BARE, HALVED):
        world = make_flat_world(0, rounding=30.0)
        found = verdict(world, 0, world.server(truth, 0))
        assert found.outcome == "inconclusive" and found.cause is None
        assert (
            "distribution is nearly uniform, as with random weights: its likeliest 20"
            in found.reason
        )
        assert "cannot tell 3 of 3 simulated faults from rounding; use a trained" in found.reason


def test_what_cannot_be_proven_is_known_before_a_server_answers() -> None:
    for world, known in ((make_world(0), False), (make_flat_world(0, rounding=30.0), True)):
        scenarios = world.scenarios(0, fault_records=FAULT_RECORDS)
        declared = declared_paths(scenarios, RECIPE, "e5m2")
        why = unprovable(world.golden, scenarios, declared, looks=3)
        assert (why is not None) == known
        assert unprovable(world.golden, scenarios, replace(declared, paths=())) is None
