"""The order in which a tier asks a model's pools."""

import random
from collections.abc import Iterator

import pytest

from octet.errors import ConfigError
from serve.config import GatewayConfig, ModelConfig
from serve.routing import Pool, Routes
from serve.routing.tiers import ModelTier
from tests.serve.routing.stand_ins import Server
from tests.serve.tiered import TIERS, Figures, figures


@pytest.fixture
def stated() -> Iterator[Figures]:
    with figures() as stated:
        yield stated


def model_tier(
    costs: dict[str, float], name: str = "standard", *, allow_less_exact: bool = False
) -> ModelTier:
    """Over pools in the model's order, the first the main one."""
    main, *fallback = costs
    tiers = TIERS | {name: TIERS[name] | {"allow_less_exact": allow_less_exact}}
    config = GatewayConfig.model_validate(
        {
            "models": {"m": {"pool": main, "fallback": fallback}},
            "pools": {pool: {"cost": cost} for pool, cost in costs.items()},
            "tiers": tiers,
        }
    )
    pools = {pool: Pool.of(pool, [Server(pool)]) for pool in costs}
    return Routes.from_config(config, pools).resolve("m").tiers[name]


def order(tier: ModelTier) -> list[str]:
    return [pool.name for pool in tier.order()]


def test_the_cheapest_that_fits_comes_first_and_of_equals_the_models_first(
    stated: Figures,
) -> None:
    stated.kl = {"a": 0.02, "b": 0.01, "c": 0.03, "d": 0.005}
    assert order(model_tier({"a": 3, "b": 2, "c": 1, "d": 4})) == ["b", "d"]
    assert order(model_tier({"a": 1, "b": 1, "c": 1, "d": 1})) == ["a", "b", "d"]
    assert order(model_tier({"d": 1, "a": 1})) == ["d"]


def test_a_budget_is_kept_to_the_last_digit(stated: Figures) -> None:
    tier = model_tier({"a": 1})
    for kl, fits in ((0.02, True), (0.0200000001, False), (0.0, True), (float("inf"), False)):
        stated.kl = {"a": kl}
        assert order(tier) == (["a"] if fits else [])


def test_what_cannot_be_told_apart_is_as_exact(stated: Figures) -> None:
    """Two pools of one artifact do not measure the same to the last digit."""
    tier = model_tier({"a": 1, "b": 2})
    stated.kl = {"a": 0.0100, "b": 0.0103}
    stated.low = {"a": 0.0080, "b": 0.0082}
    assert order(tier) == ["a", "b"]
    stated.low["b"] = 0.0101
    assert order(tier) == ["a"]


def test_what_a_tier_allows_comes_last_the_most_exact_first(stated: Figures) -> None:
    stated.kl = {"far": 0.5, "near": 0.05, "fit": 0.02, "exact": 0.001, "mid": 0.015}
    costs = {"far": 1.0, "near": 3.0, "fit": 5.0, "exact": 4.0, "unknown": 0.1, "mid": 9.0}
    tier = model_tier(costs, allow_less_exact=True)
    assert order(tier) == ["exact", "fit", "mid", "near", "far"]
    assert order(model_tier(costs)) == ["exact"]


def test_in_any_pool_of_pools_the_promises_hold(stated: Figures) -> None:
    rng = random.Random(7)
    names = "abcde"
    for _ in range(300):
        costs = {name: rng.choice((1.0, 2.0, 3.0)) for name in rng.sample(names, 4)}
        stated.kl = {name: rng.choice((0.0005, 0.005, 0.019, 0.021, 0.2)) for name in names[:4]}
        stated.low = {name: kl * rng.choice((0.2, 0.9)) for name, kl in stated.kl.items()}
        found = order(model_tier(costs))
        fitting = [name for name in costs if stated.kl.get(name, 1.0) <= 0.02]
        assert set(found) <= set(fitting) and bool(found) == bool(fitting)
        if found:
            assert costs[found[0]] == min(costs[name] for name in fitting)
        for i, name in enumerate(found):
            assert all(stated.low[name] <= stated.kl[before] for before in found[:i])
            assert all(costs[before] <= costs[name] for before in found[:i])
        less = order(model_tier(costs, allow_less_exact=True))
        assert less[: len(found)] == found
        assert sorted(less) == sorted(name for name in costs if name in stated.kl)


def test_a_tier_that_is_not_there_is_refused() -> None:
    model = ModelConfig.model_validate({"pool": "fp8", "tier_aliases": {"a": "exat"}})
    pools = {"fp8": Pool.of("fp8", [])}
    tiers = GatewayConfig.model_validate({"models": {"m": {"pool": "p"}}, "tiers": TIERS}).tiers
    with pytest.raises(ConfigError, match=r"models.m: no tier 'exat'; did you mean 'exact'\?"):
        Routes({"m": model}, pools, tiers=tiers)
    model = ModelConfig.model_validate({"pool": "fp8", "tier_aliases": {"n": "exact"}})
    with pytest.raises(ConfigError, match=r"models.m: the alias 'n' is taken"):
        Routes({"m": model, "n": model}, pools, tiers=tiers)
