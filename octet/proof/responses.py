"""What a server answered to golden prompts, and how far that can be compared.

Position j of an answer follows the prompt and the first j tokens that the server generated. As long
as those are the golden continuation's, it is at the golden record's own position: the first token
that differs ends what can be compared, and its own distribution still can.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octet.golden import GoldenRecord

__all__ = ["Response", "agreement", "comparable"]


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
    return [position for position in range(count) if response.tops[position]]
