"""Fuzzed requests over real sockets: a client's fault is never a 5xx, a crash or a hang."""

from collections import Counter

from tests.serve.fuzz import fuzz
from tests.serve.fuzz_cases import cases


async def test_nothing_that_is_sent_breaks_the_gateway() -> None:
    """100,000 of them: python tests/serve/fuzz.py --count 100000"""
    report = await fuzz(3000, seed=5)
    assert not report.failures, "\n".join(report.failures[:5])
    assert report.count == 3000
    assert report.statuses["200"] > 150  # some mutations leave a request in order
    refusals = {"400", "401", "404", "405", "408", "413", "431"}
    assert report.statuses.keys() >= {"200", "400", "404", "405", "413", "431"}
    assert report.statuses.keys() <= refusals | {"200", "hung up"}


def test_a_seed_gives_the_same_cases() -> None:
    first = list(cases(1, 300))
    assert first == list(cases(1, 400))[:300] and first != list(cases(2, 300))
    assert min(Counter(case.kind for case in first).values()) >= 5
