"""What a server answered to golden prompts, and how far that can be compared.

Position j of an answer follows the prompt and the first j tokens that the server generated. As long
as those are the golden continuation's, it is at the golden record's own position: the first token
that differs ends what can be compared, and its own distribution still can.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from octet.artifacts.golden import POSITIONS, GoldenRecord

__all__ = ["Response", "agreement", "comparable", "complete", "improper"]

# That a log-probability may be above 0 by, or probabilities together above 1: of rounding.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Response:
    """One answer, generated greedily."""

    record: int  # index into GoldenSet.records
    tokens: tuple[int, ...]  # generated; -1 where unknown
    tops: tuple[Mapping[int, float], ...]  # by position: token id -> ln p of the full softmax
    prompt_logprobs: tuple[float | None, ...] | None = None  # of the prompt's tokens, first None


def agreement(record: GoldenRecord, response: Response) -> int:
    """How many tokens agree with the golden continuation before the first that does not."""
    pairs = list(zip(record.continuation_token_ids, response.tokens, strict=False))
    return next((n for n, (golden, told) in enumerate(pairs) if golden != told), len(pairs))


def comparable(record: GoldenRecord, response: Response) -> list[int]:
    """The positions at which both distributions are known and follow the same tokens."""
    count = min(agreement(record, response) + 1, len(record.tops), len(response.tops))
    return [n for n in range(count) if response.tops[n] and _proper(response.tops[n])]


def complete(record: GoldenRecord, response: Response) -> bool:
    """Whether it tells the distribution of each position up to the first token that differs.

    Not if it ends before, or leaves some out. A server need not tell of the end token.
    """
    agree = agreement(record, response)
    wanted = min(agree + 1, len(record.tops))
    if agree == len(response.tokens) and agree + 1 == len(record.tops) < POSITIONS:
        wanted -= 1
    return len(comparable(record, response)) >= max(wanted, 1)


def improper(response: Response) -> bool:
    """Whether something in it is no log-probability, or too much for one distribution."""
    prompt = (x for x in response.prompt_logprobs or () if x is not None)
    tops = (top for top in response.tops if top)
    return not (all(x <= _ROUNDING for x in prompt) and all(map(_proper, tops)))


def _proper(top: Mapping[int, float]) -> bool:
    """NaN is not at most anything; the likeliest tokens cannot all have nothing."""
    values = top.values()
    return all(x <= _ROUNDING for x in values) and (
        0 < math.fsum(map(math.exp, values)) <= 1 + _ROUNDING
    )
