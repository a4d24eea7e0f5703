"""One key's rates, quota and requests in flight.

A request is charged its estimate on arrival, and settled with the true counts when they are known.
Limits are not kept here, so a reloaded configuration applies to what has been spent already. The
last minute is a sliding window.
"""

import math
import time
from collections.abc import Callable

from octet.errors import RequestError
from serve.access.usage import Usage
from serve.config import KeyConfig

__all__ = [
    "Charge",
    "Minute",
    "Rates",
    "over_quota",
    "over_requests",
    "over_tokens",
    "too_many_in_flight",
]

# One second each. Two moments less than 60 s apart differ by at most 60 whole seconds, so 61 slots
# hold every minute that ends now.
SLOTS = 61


class Minute:
    """Requests or tokens of the last minute, in slots of one second.

    A token bucket that allows a minute's worth at once lets twice the limit through in some minute
    (the burst, and the refill meanwhile). Here the sum over any 60 seconds is at most the limit,
    and a whole minute's worth may still come at once. Times are seconds of one monotonic clock.
    """

    __slots__ = ("_newest", "_slots", "used")

    def __init__(self) -> None:
        self._slots = [0] * SLOTS
        self._newest = 0  # the second of the newest slot
        self.used = 0

    def add(self, amount: int, now: float) -> int:
        """Spends `amount`; returns the slot, for `correct`."""
        self._advance(now)
        self._slots[self._newest % SLOTS] += amount
        self.used += amount
        return self._newest

    def correct(self, slot: int, difference: int, now: float) -> None:
        """Corrects an amount added to `slot`: takes an excess back there, counts a shortfall now.

        An excess that has left the window meanwhile is not taken back.
        """
        self._advance(now)
        if difference > 0:
            self.add(difference, now)
        elif slot > self._newest - SLOTS:
            self._slots[slot % SLOTS] += difference
            self.used += difference

    def wait_s(self, amount: int, limit: int, now: float) -> float:
        """Returns the seconds until `amount` more fits `limit`: 0 if now, infinity if never."""
        self._advance(now)
        excess = self.used + amount - limit
        if excess <= 0:
            return 0.0
        if amount > limit:
            return math.inf
        for second in range(self._newest - SLOTS + 1, self._newest + 1):
            excess -= self._slots[second % SLOTS]
            if excess <= 0:
                return second + SLOTS - now
        raise AssertionError("the slots do not add up to what is used")

    def reset_s(self, now: float) -> float:
        """Returns the seconds until nothing is used."""
        self._advance(now)
        for second in range(self._newest, self._newest - SLOTS, -1):
            if self._slots[second % SLOTS]:
                return second + SLOTS - now
        return 0.0

    def slots(self, now: float) -> dict[int, int]:
        """Returns the use in each second of the last minute, without seconds of no use."""
        self._advance(now)
        seconds = range(self._newest - SLOTS + 1, self._newest + 1)
        return {second: used for second in seconds if (used := self._slots[second % SLOTS])}

    def _advance(self, now: float) -> None:
        """Empties the slots that have left the window."""
        second = int(now)
        if second <= self._newest:
            return
        for passed in range(max(self._newest + 1, second - SLOTS + 1), second + 1):
            self.used -= self._slots[passed % SLOTS]
            self._slots[passed % SLOTS] = 0
        self._newest = second


SMOOTHING = 0.2  # weight of the newest request in the mean duration


class Rates:
    """The spending of one key."""

    __slots__ = ("clock", "duration_s", "in_flight", "requests", "reserved", "tokens")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.requests = Minute()
        self.tokens = Minute()
        self.in_flight = 0
        self.reserved = 0  # estimated tokens of requests in flight, not yet in `usage`
        self.duration_s = 0.0  # of a request, a moving average

    async def take(self, key: KeyConfig, usage: Usage, tokens: int) -> "Charge":
        """Charges as `charge` does. Rates that are shared may have to wait for a lease."""
        return self.charge(key, usage, tokens)

    def charge(self, key: KeyConfig, usage: Usage, tokens: int) -> "Charge":
        """Counts a request of at most `tokens`, by estimate.

        Raises RequestError, and counts nothing, if that is over a limit of `key`. A 429 states when
        to retry. A request that can never fit gets a 400, so that clients do not retry it.
        """
        self.require_possible(key, tokens)
        self.require_left(key, usage, tokens)
        return self.begin(key, usage, tokens)

    def require_possible(self, key: KeyConfig, tokens: int) -> None:
        """Raises RequestError (400) for a request that is larger than a whole limit."""
        for limit, what in ((key.tokens_per_minute, "minute"), (key.tokens_per_day, "day")):
            if limit is not None and tokens > limit:
                raise _impossible(key, tokens, f"{limit} per {what}")

    def require_left(self, key: KeyConfig, usage: Usage, tokens: int) -> None:
        """Raises RequestError (429) if what is left of a limit does not suffice."""
        now = self.clock()
        if key.max_in_flight is not None and self.in_flight >= key.max_in_flight:
            raise too_many_in_flight(key, self.in_flight, self.duration_s)
        if key.requests_per_minute is not None:
            wait_s = self.requests.wait_s(1, key.requests_per_minute, now)
            if wait_s:
                raise over_requests(key, wait_s)
        if key.tokens_per_minute is not None:
            wait_s = self.tokens.wait_s(tokens, key.tokens_per_minute, now)
            if wait_s:
                raise over_tokens(key, self.tokens.used, tokens, wait_s)
        if key.tokens_per_day is not None:
            left = key.tokens_per_day - usage.spent(key.name) - self.reserved
            if tokens > left:
                raise over_quota(key, left, tokens, usage.reset_s())

    def begin(self, key: KeyConfig, usage: Usage, tokens: int) -> "Charge":
        """Counts a request, whatever is left."""
        now = self.clock()
        self.in_flight += 1
        self.reserved += tokens
        self.requests.add(1, now)
        return Charge(self, usage, key.name, tokens, now)

    def changed(self) -> None:
        """Called when a charge is settled or ends: shared rates report it."""

    def headers(self, key: KeyConfig) -> dict[str, str]:
        """Returns OpenAI's `x-ratelimit-*` headers, for the limits that `key` has."""
        now = self.clock()
        found: dict[str, str] = {}
        for what, limit, minute in (
            ("requests", key.requests_per_minute, self.requests),
            ("tokens", key.tokens_per_minute, self.tokens),
        ):
            if limit is not None:
                reset_s = minute.reset_s(now)  # also drops what is older than a minute
                found[f"x-ratelimit-limit-{what}"] = str(limit)
                found[f"x-ratelimit-remaining-{what}"] = str(max(limit - minute.used, 0))
                found[f"x-ratelimit-reset-{what}"] = f"{math.ceil(reset_s)}s"
        return found


class Charge:
    """The charge for one request. Exactly one of `release` and `refund` ends it."""

    __slots__ = ("_actual", "_rates", "_since", "_slot", "_usage", "key", "tokens")

    def __init__(self, rates: Rates, usage: Usage, key: str, tokens: int, now: float) -> None:
        self._rates = rates
        self._usage = usage
        self._since = now
        self._slot = rates.tokens.add(tokens, now)
        self._actual: int | None = None  # tokens, once they are known
        self.key = key
        self.tokens = tokens

    def settle(self, tokens: int) -> None:
        """Replaces the estimate, or an earlier true count, by the true count."""
        before = self.tokens if self._actual is None else self._actual
        self._actual = tokens
        rates = self._rates
        rates.tokens.correct(self._slot, tokens - before, rates.clock())
        rates.changed()

    def release(self) -> None:
        """Ends the charge with its request. Without true counts the estimate stands."""
        rates = self._rates
        duration_s = rates.clock() - self._since
        newest = SMOOTHING if rates.duration_s else 1.0
        rates.duration_s += newest * (duration_s - rates.duration_s)
        self._end(self.tokens if self._actual is None else self._actual)

    def refund(self, *, keep_request: bool) -> None:
        """Ends the charge of a request that never began: its tokens do not count.

        The request itself counts only with `keep_request`.
        """
        rates = self._rates
        self.settle(0)
        if not keep_request:
            rates.requests.correct(self._slot, -1, rates.clock())
        self._end(0)

    def _end(self, tokens: int) -> None:
        rates = self._rates
        rates.in_flight -= 1
        rates.reserved -= self.tokens
        if tokens:
            self._usage.add(self.key, tokens)
        rates.changed()


def too_many_in_flight(key: KeyConfig, in_flight: int, duration_s: float) -> RequestError:
    """Returns the 429 error for a key with `in_flight` requests, which take `duration_s` each."""
    reason = f"{in_flight} requests are under way, which is the limit"
    return _too_many(reason, key, duration_s / (key.max_in_flight or 1))


def over_requests(key: KeyConfig, wait_s: float) -> RequestError:
    """Returns the 429 error for a request too many in a minute."""
    return _too_many(f"the limit is {key.requests_per_minute} requests per minute", key, wait_s)


def over_tokens(key: KeyConfig, used: int, tokens: int, wait_s: float) -> RequestError:
    """Returns the 429 error for a request of `tokens` after `used` in the last minute."""
    return _too_many(
        f"the limit is {key.tokens_per_minute} tokens per minute: {used} are used, this request "
        f"may take {tokens}",
        key,
        wait_s,
    )


def over_quota(key: KeyConfig, left: int, tokens: int, reset_s: float) -> RequestError:
    """Returns the 429 error for a request of `tokens` when `left` are left of the day's quota."""
    return RequestError(
        f"API key '{key.name}': {max(left, 0)} of today's {key.tokens_per_day} tokens are left, "
        f"this request may take {tokens}; the day ends at midnight UTC",
        status=429,
        code="insufficient_quota",
        kind="insufficient_quota",
        retry_after_s=reset_s,
    )


def _too_many(reason: str, key: KeyConfig, wait_s: float) -> RequestError:
    return RequestError(
        f"API key '{key.name}': {reason}",
        status=429,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        retry_after_s=max(wait_s, 1.0),
    )


def _impossible(key: KeyConfig, tokens: int, limit: str) -> RequestError:
    return RequestError(
        f"API key '{key.name}': this request may take {tokens} tokens, more than the whole limit "
        f"of {limit}; shorten the prompt or lower max_tokens",
        code="rate_limit_impossible",
    )
