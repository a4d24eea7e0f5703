"""Tests a key's limits: refusals with a time, settled counts, refunds of refused requests."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from octet.errors import RequestError
from serve.access.rates import Rates
from serve.access.usage import Usage
from serve.config import KeyConfig
from tests.serve.clock import Clock

NOON = datetime(2027, 3, 1, 12, tzinfo=UTC).timestamp()


def key(**limits: Any) -> KeyConfig:
    return KeyConfig(name="team", sha256="0" * 64, **limits)


def refused(ask: Callable[[], Any], status: int = 429) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ask()
    assert caught.value.status == status
    assert "API key 'team': " in str(caught.value)
    return caught.value


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def usage() -> Usage:
    return Usage(wall=Clock(NOON))


def test_requests_per_minute(clock: Clock, usage: Usage) -> None:
    rates, limited = Rates(clock), key(requests_per_minute=2)
    for _ in range(2):
        rates.charge(limited, usage, 10).release()
    error = refused(lambda: rates.charge(limited, usage, 10))
    assert (error.code, error.retry_after_s) == ("rate_limit_exceeded", 61)
    clock.now += 61
    rates.charge(limited, usage, 10)


def test_tokens_per_minute_are_those_that_were_used(clock: Clock, usage: Usage) -> None:
    rates, limited = Rates(clock), key(tokens_per_minute=1000)
    charge = rates.charge(limited, usage, 900)
    error = refused(lambda: rates.charge(limited, usage, 200))
    assert "900 are used, this request may take 200" in str(error)
    charge.settle(300)  # much less than was estimated
    charge.release()
    rates.charge(limited, usage, 700)
    refused(lambda: rates.charge(limited, usage, 1))


@pytest.mark.parametrize("per", ["minute", "day"])
def test_a_request_that_never_fits_is_the_requests_fault(
    per: str, clock: Clock, usage: Usage
) -> None:
    rates = Rates(clock)
    limits = key(**{f"tokens_per_{per}": 1000})
    # No 429: official clients would try it again, and again in vain.
    error = refused(lambda: rates.charge(limits, usage, 1001), status=400)
    assert error.code == "rate_limit_impossible" and error.retry_after_s is None
    assert f"1001 tokens, more than the whole limit of 1000 per {per}" in str(error)
    rates.charge(limits, usage, 1000)


def test_a_quota_counts_what_is_under_way_and_names_midnight(clock: Clock, usage: Usage) -> None:
    rates, limited = Rates(clock), key(tokens_per_day=1000)
    charge = rates.charge(limited, usage, 600)
    error = refused(lambda: rates.charge(limited, usage, 500))
    assert (error.code, error.retry_after_s) == ("insufficient_quota", 12 * 3600)
    assert "400 of today's 1000 tokens are left" in str(error)
    charge.settle(450)
    charge.release()
    assert usage.spent("team") == 450
    rates.charge(limited, usage, 550)


def test_without_true_counts_the_estimate_stands(clock: Clock, usage: Usage) -> None:
    rates, limited = Rates(clock), key(tokens_per_minute=1000, tokens_per_day=10_000)
    rates.charge(limited, usage, 600).release()
    assert usage.spent("team") == 600
    refused(lambda: rates.charge(limited, usage, 500))


def test_a_key_has_so_many_requests_under_way(clock: Clock, usage: Usage) -> None:
    rates, limited = Rates(clock), key(max_in_flight=2)
    charges = [rates.charge(limited, usage, 1) for _ in range(2)]
    error = refused(lambda: rates.charge(limited, usage, 1))
    assert "2 requests are under way" in str(error)
    assert error.retry_after_s == 1  # nothing is known about durations
    clock.now += 100
    for charge in charges:
        charge.release()
    for _ in range(2):
        rates.charge(limited, usage, 1)
    later = refused(lambda: rates.charge(limited, usage, 1)).retry_after_s
    assert later == 50  # two at a time, of 100 s each


@pytest.mark.parametrize("keep", [True, False])
def test_a_refund_gives_back_tokens(keep: bool, clock: Clock, usage: Usage) -> None:
    limits = key(requests_per_minute=1, tokens_per_minute=10, tokens_per_day=10, max_in_flight=1)
    rates = Rates(clock)
    rates.charge(limits, usage, 10).refund(keep_request=keep)
    assert (rates.in_flight, rates.reserved, rates.tokens.used) == (0, 0, 0)
    assert usage.spent("team") == 0
    if keep:
        assert "1 requests per minute" in str(refused(lambda: rates.charge(limits, usage, 10)))
    else:
        rates.charge(limits, usage, 10)


def test_headers_are_openais(clock: Clock, usage: Usage) -> None:
    rates = Rates(clock)
    limits = key(requests_per_minute=60, tokens_per_minute=5000)
    rates.charge(limits, usage, 1200)
    clock.now += 10
    assert rates.headers(limits) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "51s",
        "x-ratelimit-limit-tokens": "5000",
        "x-ratelimit-remaining-tokens": "3800",
        "x-ratelimit-reset-tokens": "51s",
    }
    assert rates.headers(key(tokens_per_day=5)) == {}
