"""Rounds with a fake load generator: their order, what is kept, and every way to fail."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octet.errors import BackendError, ConfigError
from tests.verify.bench.fake_vllm import install
from verify.bench.figures import summarise
from verify.bench.load import Generator, Load, Place
from verify.bench.rounds import Plan, measure

A, B = "http://a:1", "http://b:2"


@pytest.fixture
def generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator:
    monkeypatch.setenv("FAKE_VLLM_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("FAKE_VLLM_SPEEDS", json.dumps({A: 100.0, B: 150.0}))
    return Generator(str(install(tmp_path)), tmp_path, "secret")


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Returns the calls since it was last called."""

    def read() -> list[dict[str, Any]]:
        path = tmp_path / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]

    return read


def plan(*loads: str, rounds: int = 2, names: tuple[str, ...] = (A, B)) -> Plan:
    places = [Place(name, name, "model", is_vllm=name == B) for name in names]
    matrix = [Load.parse(load) for load in loads or ("1x8x4",)]
    return Plan(places, [{"id": "model"} for _ in names], matrix, rounds, 2)


def test_targets_alternate_after_one_warm_up_each(generator: Generator, calls: Any) -> None:
    measure(plan("1x8x4", "2x16x4"), generator)
    made = calls()
    order = [(call["base-url"], call["random-input-len"]) for call in made]
    assert sorted(order[:4]) == [(A, "16"), (A, "8"), (B, "16"), (B, "8")]
    assert order[4:8] == [(A, "8"), (B, "8"), (A, "16"), (B, "16")]
    assert order[8:] == [(B, "8"), (A, "8"), (B, "16"), (A, "16")]
    assert sorted(call["num-prompts"] for call in made[:4]) == ["1", "1", "2", "2"]
    assert [call["num-prompts"] for call in made[4:8]] == ["2", "2", "4", "4"]
    assert {call["key"] for call in made} == {"secret"}


def test_every_target_gets_the_prompts_of_the_round(generator: Generator, calls: Any) -> None:
    measure(plan("1x8x4", "2x16x4", rounds=3), generator)
    seeds: dict[tuple[str, int], list[str]] = {}
    for call in calls():
        seeds.setdefault((call["base-url"], int(call["max-concurrency"])), []).append(call["seed"])
    assert seeds[A, 1] == seeds[B, 1] and seeds[A, 2] == seeds[B, 2]
    assert len({*seeds[A, 1], *seeds[A, 2]}) == 8  # each warm-up too


def test_three_targets_take_turns_at_each_place() -> None:
    order = [target for _, _, target in plan(rounds=3, names=(A, B, "http://c:3")).order()]
    assert order == [0, 1, 2, 1, 2, 0, 2, 0, 1]


def test_only_vllm_gets_a_salt(generator: Generator, calls: Any) -> None:
    measure(plan(rounds=1), generator)
    salts = {call["base-url"]: call.get("extra-body") for call in calls()}
    assert salts[A] is None and "cache_salt" in salts[B]


def test_a_killed_benchmark_continues(
    generator: Generator, calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("FAKE_VLLM_FAULT", "dies at 5")
    with pytest.raises(BackendError, match=r"http://b:2, load 1x8x4:.*code 1: ValueError: no such"):
        measure(plan(), generator, out=out)
    assert len(calls()) == 5
    monkeypatch.delenv("FAKE_VLLM_FAULT")
    kept = {path.name: path.read_bytes() for path in out.glob("round*")}
    assert len(kept) == 2
    runs = measure(plan(), generator, out=out)
    assert [call["base-url"] for call in calls()] == [B, A, B, A]  # two warm-ups, the second round
    assert len(runs) == 4
    assert {name: (out / name).read_bytes() for name in kept} == kept
    assert measure(plan(), generator, out=out) == runs and calls() == []
    assert len(measure(plan(rounds=3), generator, out=out)) == 6 and len(calls()) == 4


def test_runs_of_another_benchmark_are_not_mixed_in(generator: Generator, tmp_path: Path) -> None:
    measure(plan(), generator, out=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"out: holds runs with other loads .*another directory"):
        measure(plan("2x8x4"), generator, out=tmp_path / "out")
    other = plan()
    other = Plan(other.places, [{"id": "x"}, {"id": "y"}], other.loads, 2, 2)
    with pytest.raises(ConfigError, match="other targets"):
        measure(other, generator, out=tmp_path / "out")
    next((tmp_path / "out").glob("round1*")).write_text("{}")
    with pytest.raises(ConfigError, match="is not a run that `octet bench` wrote: remove it"):
        measure(plan(), generator, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fails", r"load 1x8x4: 1 of 1 requests failed, so there are no figures"),
        ("lacks", r"reports no p99_itl_ms: vLLM 0\.24 or newer does"),
    ],
)
def test_a_run_that_is_not_whole_has_no_figures(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULT", fault)
    with pytest.raises(BackendError, match=message) as caught:
        measure(plan(), generator)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "load", ["", "1x2", "0x8x8", "1x8x0", "1x8x1", "ax8x8", "1x8x8x8", "1X8X8"]
)
def test_a_load_that_is_none_is_refused(load: str) -> None:
    with pytest.raises(ConfigError, match="--load"):
        Load.parse(load)


def test_ratios_pair_the_runs_of_a_round(generator: Generator) -> None:
    wanted = plan(rounds=3)
    bench = summarise(wanted, measure(wanted, generator), [None, 4096])
    first, second = bench.cells[0]
    assert first.ratios is None and second.ratios is not None
    speed, latency = second.ratios["tokens_per_s"], second.ratios["itl_p50_ms"]
    assert speed is not None and latency is not None
    # The rounds differ by up to 20 %, and both targets with them.
    assert (speed.low, speed.median, speed.high) == pytest.approx((1.5, 1.5, 1.5))
    assert latency.median == pytest.approx(1 / 1.5)
    spread = first.figures["tokens_per_s"]
    assert (spread.low, spread.median, spread.high) == pytest.approx((100, 110, 120))
    assert bench.warnings == ()
    data = json.loads(json.dumps(bench.as_json(), allow_nan=False))
    assert data["kv_capacity_tokens"] == [None, 4096] and data["quality"] is None


def test_fewer_tokens_than_the_load_wants_are_a_warning(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULT", "short")
    bench = summarise(plan(), measure(plan(), generator), [None, None])
    assert len(bench.warnings) == 2
    assert "generated 6 tokens in a run instead of 8" in bench.warnings[0]
