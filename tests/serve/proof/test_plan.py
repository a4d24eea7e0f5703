"""Tests which golden records are sent, and when."""

import numpy as np
import pytest

from octet.artifacts.golden import POSITIONS
from octet.artifacts.scenarios import Fault, Scenario, ScenarioSet
from octet.artifacts.serving_path import ServingPath
from octet.proof.power import LOOKS
from serve.proof.plan import FIRST_PART, Slices, cost, order, parts_of, simulated
from tests.serve.proof.fake_proofs import fake_golden

GOLDEN = fake_golden()
LENGTHS = [len(record.prompt_token_ids) for record in GOLDEN.records]


def test_an_order_is_of_all_records_and_of_one_seed() -> None:
    first = order(GOLDEN, 7)
    assert sorted(first) == list(range(64))
    assert first == order(GOLDEN, 7) != order(GOLDEN, 8)


@pytest.mark.parametrize("seed", range(20))
def test_every_look_has_prompts_of_every_length(seed: int) -> None:
    for start in range(0, 64, 8):
        part = order(GOLDEN, seed)[start : start + 8]
        # Eight strata of eight records each, shortest first: one of each.
        assert sorted(n // 8 for n in part) == list(range(8))


def test_prompts_beyond_the_context_are_not_asked() -> None:
    found = order(GOLDEN, 1, context=100)
    assert sorted(found) == [n for n, length in enumerate(LENGTHS) if length < 100]


def test_looks_begin_with_few_and_end_with_all() -> None:
    parts = list(parts_of(order(GOLDEN, 3)))
    assert [len(part) for part in parts] == [FIRST_PART, 20, 20]
    assert [n for part in parts for n in part] == order(GOLDEN, 3)
    assert list(parts_of([])) == [] and list(parts_of([5])) == [(5,)]


def test_the_power_is_stated_for_as_many_looks_as_an_admission_makes() -> None:
    assert len(list(parts_of(range(64)))) == LOOKS


def test_records_that_tell_faults_apart_come_first() -> None:
    path, known = ServingPath(kv_cache="e5m2"), [3, 10, 30, 50]
    whole = np.zeros((2, 64, POSITIONS, 20), np.float32)
    some = np.full((1, 64, POSITIONS, 20), np.nan, np.float32)
    some[:, known] = 0
    fault = Scenario(path=path, fault=Fault(kind="k_scale_dropped"))
    found = simulated(ScenarioSet("", "fp8", {Scenario(path=path): whole, fault: some}))
    assert found == known and simulated(None) == []
    assert sorted(order(GOLDEN, 5, first=found)[:4]) == known
    assert sorted(order(GOLDEN, 5, first=found)) == list(range(64))


def test_slices_keep_to_their_allowance_and_ask_each_record_as_often() -> None:
    slices, asked = Slices(GOLDEN, 2), []
    whole = sum(cost(GOLDEN, n) for n in range(64))
    while len(asked) < 3 * 64:
        part = slices.next(400)
        assert len(part) > 0 and sum(cost(GOLDEN, n) for n in part) <= 400
        assert len(set(part)) == len(part)
        asked += part
    counts = np.bincount(asked, minlength=64)
    assert counts.min() >= 3 and counts.max() <= 4
    assert slices.next(3) == ()  # not even the shortest prompt
    assert len(Slices(GOLDEN, 2).next(10 * whole)) == FIRST_PART
    assert sorted(Slices(GOLDEN, 2).next(10 * whole, most=100)) == list(range(64))
    assert Slices(GOLDEN, 2, context=3).next(10 * whole) == ()


def test_a_record_that_is_too_long_waits_and_is_not_passed_over() -> None:
    slices = Slices(GOLDEN, 4)
    asked = [n for _ in range(200) for n in slices.next(cost(GOLDEN, 63) - 1)]
    assert 63 not in asked and len(asked) < 64
    assert slices.next(cost(GOLDEN, 63))[0] == 63
