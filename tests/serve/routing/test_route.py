"""Public names: aliases, canaries, fallbacks and shadows."""

import random
from collections import Counter
from typing import Any

import pytest

from octet.errors import ConfigError, RequestError
from serve.config import ModelConfig
from serve.routing import Pool, Routes
from tests.serve.routing.stand_ins import Server

POOLS = {
    name: Pool.of(name, [Server(name, context_length=length)])
    for name, length in (("fp8", 100), ("bf16", 200), ("new", 50), ("spare", None))
}


def routes(**model: Any) -> Routes:
    return Routes(
        {"m": ModelConfig.model_validate({"pool": "fp8"} | model)}, POOLS, rng=random.Random(3)
    )


def orders(it: Routes, times: int = 2000) -> Counter[tuple[str, ...]]:
    route = it.resolve("m")
    return Counter(tuple(pool.name for pool in route.pools()) for _ in range(times))


def test_a_model_is_found_by_its_name_and_its_aliases() -> None:
    it = routes(aliases=["gpt-4", "m:latest"])
    assert it.resolve("m") is it.resolve("gpt-4") is it.resolve("m:latest")
    assert it.names == ("m",) and [route.name for route in it] == ["m"]
    assert it.resolve("m").aliases == ("gpt-4", "m:latest")


def test_an_unknown_name_is_a_404_that_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'gpt-4'") as refused:
        routes(aliases=["gpt-4"]).resolve("gpt-4o")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    with pytest.raises(RequestError) as refused:
        routes().resolve("x" * 100_000)
    assert len(str(refused.value)) < 200


def test_a_canary_gets_its_part_and_falls_back_to_the_main_pool() -> None:
    it = routes(
        canary=[{"pool": "new", "fraction": 0.1}, {"pool": "spare", "fraction": 0.3}],
        fallback=["bf16", "spare"],
    )
    counts = orders(it, 10_000)
    assert counts["new", "fp8", "bf16", "spare"] == pytest.approx(1000, rel=0.1)
    assert counts["spare", "fp8", "bf16"] == pytest.approx(3000, rel=0.1)  # no pool twice
    assert counts["fp8", "bf16", "spare"] == pytest.approx(6000, rel=0.1)


@pytest.mark.parametrize(("fraction", "drawn"), [(0.0, 0), (1.0, 2000)])
def test_none_and_all_are_exact(fraction: float, drawn: int) -> None:
    it = routes(
        canary=[{"pool": "new", "fraction": fraction}],
        shadow={"pool": "bf16", "fraction": fraction},
    )
    assert orders(it)["new", "fp8"] == drawn
    shadows = [it.resolve("m").shadow() for _ in range(2000)]
    assert shadows.count(POOLS["bf16"]) == drawn and shadows.count(None) == 2000 - drawn


def test_a_part_of_the_requests_is_shadowed() -> None:
    route = routes(shadow={"pool": "bf16", "fraction": 0.25}).resolve("m")
    drawn = sum(route.shadow() is POOLS["bf16"] for _ in range(10_000))
    assert drawn == pytest.approx(2500, rel=0.1)
    assert routes().resolve("m").shadow() is None


def test_the_context_is_that_of_the_shortest_pool_that_may_answer() -> None:
    assert routes(fallback=["bf16", "spare"]).resolve("m").context_length == 100
    it = routes(canary=[{"pool": "new", "fraction": 0.1}])
    assert it.resolve("m").context_length == 50
    assert routes(pool="spare").resolve("m").context_length is None


def test_pools_and_names_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"models.m: no pool 'fp9'; did you mean 'fp8'\?"):
        routes(pool="fp9")
    model = ModelConfig.model_validate({"pool": "fp8", "aliases": ["a"]})
    with pytest.raises(ConfigError, match=r"models.n: the alias 'a' is taken"):
        Routes({"m": model, "n": model}, POOLS)
