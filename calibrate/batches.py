"""Samples become deterministic batches of token ids, padded on the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from calibrate.samples import Sample
from octet.errors import CheckpointError, SampleError

__all__ = ["Batch", "make_batches", "tokenize"]


@dataclass(frozen=True)
class Batch:
    """Token ids int64 [B, T]; row b holds `lengths[b]` tokens, then padding.

    There is no attention mask: a causal model's real tokens come before the padding and never see
    it, and what the model computes at padding is not observed.
    """

    token_ids: torch.Tensor
    lengths: tuple[int, ...]
    origins: tuple[str, ...]  # where each row came from, for error messages

    @property
    def tokens(self) -> int:
        """Real tokens, without padding."""
        return sum(self.lengths)


def tokenize(
    samples: Sequence[Sample], tokenizer: Any, *, max_length: int, vocab_size: int
) -> list[list[int]]:
    """Token ids of each sample, cut at `max_length`, with the tokenizer's own special tokens."""
    encoded: list[list[int]] = tokenizer(
        [sample.text for sample in samples],
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
    )["input_ids"]
    for sample, ids in zip(samples, encoded, strict=True):
        if not ids:
            raise SampleError(f"{sample.origin}: the tokenizer makes no token of its text")
        if max(ids) >= vocab_size:
            raise CheckpointError(
                f"the tokenizer gives token {max(ids)}, the model has {vocab_size}:"
                " they do not belong together"
            )
    return encoded


def make_batches(
    sequences: Sequence[Sequence[int]], origins: Sequence[str], *, batch_size: int, pad_id: int = 0
) -> list[Batch]:
    """Longest first, so that padding is little and memory is at its peak at once.

    The order depends on the lengths alone (ties keep the order of the file), and so do the batches.
    """
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    batches = []
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        lengths = tuple(len(sequences[row]) for row in rows)
        token_ids = np.full((len(rows), max(lengths)), pad_id, np.int64)
        for index, row in enumerate(rows):
            token_ids[index, : lengths[index]] = sequences[row]
        names = tuple(origins[row] for row in rows)
        batches.append(Batch(torch.from_numpy(token_ids), lengths, names))
    return batches
