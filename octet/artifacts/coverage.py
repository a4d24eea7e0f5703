"""Counts what some golden prompts examine: token ids, lengths, and experts of a mixture."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import reduce

from octet.artifacts.golden import GoldenSet

__all__ = ["Coverage", "coverage"]


@dataclass(frozen=True)
class Coverage:
    """How much of the vocabulary, the context and the experts the golden prompts examine."""

    ids: int  # token ids in the prompts
    vocabulary: int
    outside: float  # share of the held-out tokens whose ids are in no prompt, 0 to 1
    longest: int  # tokens of the longest prompt
    context: int  # tokens that the model's context holds
    experts: int  # experts, in all layers, that a token of a prompt was routed to
    all_experts: int  # experts in all layers; 0: not a mixture of experts

    @property
    def text(self) -> str:
        """The figures in words, for a verdict or a report."""
        parts = [
            f"{self.ids:,} of {self.vocabulary:,} token ids ({_percent(self.outside)} of held-out"
            " tokens are others)",
            f"up to {self.longest:,} of {self.context:,} positions",
        ]
        if self.all_experts:
            parts.append(f"{self.experts:,} of {self.all_experts:,} experts")
        return ", ".join(parts)


def coverage(golden: GoldenSet, records: Collection[int]) -> Coverage | None:
    """Returns what `records` examine; None if an earlier release made the golden records."""
    scope, prompts = golden.scope, [golden.records[n] for n in records]
    if scope is None:
        return None
    ids = {token for record in prompts for token in record.prompt_token_ids}
    held_out = sum(scope.counts.get(token, 0) for token in ids)
    reached = reduce(lambda found, x: found | int(x.experts or "0", 16), prompts, 0)
    return Coverage(
        ids=len(ids),
        vocabulary=scope.vocabulary,
        outside=1 - held_out / scope.held_out,
        longest=max((len(record.prompt_token_ids) for record in prompts), default=0),
        context=scope.context,
        experts=reached.bit_count(),
        all_experts=scope.experts,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"  # not 1e+02 %
