"""Holds a server's answers to golden prompts, and finds the comparable positions.

Position j of an answer follows the prompt and the first j generated tokens. While those equal the
golden continuation, position j is the golden record's position j. The first token that differs ends
the comparison; the distribution that it was chosen from is still comparable.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octet.artifacts.golden import POSITIONS, GoldenRecord

__all__ = ["Response", "agreement", "comparable", "complete", "improper"]

# Rounding may put a log-probability above 0, or a sum of probabilities above 1, by this much.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Response:
    """One answer, decoded greedily."""

    record: int  # index into GoldenSet.records
    tokens: tuple[int, ...]  # generated; -1 where unknown
    tops: tuple[Mapping[int, float], ...]  # by position: token id -> ln p of the full softmax
    prompt_logprobs: tuple[float | None, ...] | None = None  # of the prompt's tokens, first None


def agreement(record: GoldenRecord, response: Response) -> int:
    """Counts the tokens that agree with the golden continuation before the first difference."""
    pairs = list(zip(record.continuation_token_ids, response.tokens, strict=False))
    return next((n for n, (golden, returned) in enumerate(pairs) if golden != returned), len(pairs))


def comparable(record: GoldenRecord, response: Response) -> list[int]:
    """Returns the positions where both distributions are known and follow the same tokens."""
    count = min(agreement(record, response) + 1, len(record.tops), len(response.tops))
    tops = response.tops[:count]
    return [n for n, top in enumerate(tops) if top and not _improper(tuple(top.values()))]


def complete(record: GoldenRecord, response: Response) -> bool:
    """Returns whether the response has a distribution at each position it should.

    Those are all positions up to the first token that differs. A response that ends before, or
    leaves some out, is not complete. A server need not return the end token's distribution.
    """
    agree = agreement(record, response)
    wanted = min(agree + 1, len(record.tops))
    if agree == len(response.tokens) and agree + 1 == len(record.tops) < POSITIONS:
        wanted -= 1
    return len(comparable(record, response)) >= max(wanted, 1)


def improper(response: Response) -> str | None:
    """Returns why some values cannot be log-probabilities; None if all can."""
    prompt = tuple(x for x in response.prompt_logprobs or () if x is not None)
    found = (_improper(tuple(top.values())) for top in response.tops if top)
    return _impossible(prompt) or next((defect for defect in found if defect), None)


def _improper(values: Sequence[float]) -> str | None:
    """Returns why `values` cannot be part of one distribution; None if they can.

    The likeliest tokens cannot all have probability 0.
    """
    if defect := _impossible(values):
        return defect
    total = math.fsum(map(math.exp, values))
    if total == 0:
        return "-9999 or less for every token, which some servers send in place of NaN"
    return "their probabilities sum to more than 1" if total > 1 + _ROUNDING else None


def _impossible(values: Sequence[float]) -> str | None:
    """Returns why one of `values` cannot be a log-probability; None if each can."""
    if any(map(math.isnan, values)):
        return "NaN"
    if math.inf in values:
        return "infinite"
    return "above 0" if any(x > _ROUNDING for x in values) else None
