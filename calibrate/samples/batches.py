"""Makes batches of token ids, padded on the right, and the chunks that they come in.

Between chunks, after 32 samples, 64, 128, and so on, the report checks whether more samples still
change anything.

Golden records also become batches: prompts with the tokens that the reference generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from calibrate.samples.tokens import tokenize
from octet.artifacts.golden import GoldenSet

__all__ = [
    "Batch",
    "chunk_ends",
    "golden_batches",
    "make_batches",
    "real",
    "real_tokens",
    "tokenize",
]

_FIRST_END = 32  # samples


@dataclass(frozen=True)
class Batch:
    """Token ids int64 [B, T]; row b holds `lengths[b]` tokens, then padding.

    There is no attention mask: a causal model's real tokens come before the padding and never see
    it, and what the model computes at padding is not observed.
    """

    token_ids: torch.Tensor
    lengths: tuple[int, ...]
    origins: tuple[str, ...]  # where each row came from, for error messages
    chunk: int = 0

    @property
    def tokens(self) -> int:
        """Number of real tokens, without padding."""
        return sum(self.lengths)


def chunk_ends(count: int) -> tuple[int, ...]:
    """Returns 32, 64, 128, ... samples, and `count`; the last step adds a third or more.

    A last step of a few samples would not show whether more are needed.
    """
    ends = []
    end = _FIRST_END
    while end * 4 <= count * 3:
        ends.append(end)
        end *= 2
    return (*ends, count)


def make_batches(
    sequences: Sequence[Sequence[int]],
    origins: Sequence[str],
    *,
    batch_size: int,
    chunk: int = 0,
) -> list[Batch]:
    """Batches the longest sequences first: padding is small, and memory peaks at the start.

    The order depends on the lengths alone (ties keep the order of the file), and so do the batches.
    """
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    batches = []
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        lengths = tuple(len(sequences[row]) for row in rows)
        token_ids = np.zeros((len(rows), max(lengths)), np.int64)
        for index, row in enumerate(rows):
            token_ids[index, : lengths[index]] = sequences[row]
        names = tuple(origins[row] for row in rows)
        batches.append(Batch(torch.from_numpy(token_ids), lengths, names, chunk))
    return batches


def real(x: Tensor, batch: Batch) -> Tensor:
    """Removes padding: [B, T, ...] → [tokens, ...]."""
    if min(batch.lengths) == x.shape[1]:
        return x.flatten(0, 1)
    return x[real_tokens(batch).to(x.device)]


def real_tokens(batch: Batch) -> Tensor:
    """Returns bool [B, T]: False at padding."""
    lengths = torch.tensor(batch.lengths)
    return torch.arange(batch.token_ids.shape[1]) < lengths[:, None]


def golden_batches(golden: GoldenSet, records: Sequence[int], most: int) -> list[Batch]:
    """Batches golden records of similar lengths, at most `most` tokens per batch.

    The origin of a row is the number of its record.
    """
    sequences = {n: _sequence(golden, n) for n in records}
    found: list[Batch] = []
    part: list[int] = []
    for number in [*sorted(records, key=lambda n: len(sequences[n])), None]:
        if part and (number is None or len(sequences[number]) * (len(part) + 1) > most):
            rows = [sequences[n] for n in part]
            found += make_batches(rows, [str(n) for n in part], batch_size=len(part))
            part = []
        if number is not None:
            part.append(number)
    return found


def _sequence(golden: GoldenSet, number: int) -> list[int]:
    """Returns the prompt, and the continuation up to the last position but one."""
    record = golden.records[number]
    return [*record.prompt_token_ids, *record.continuation_token_ids[: len(record.tops) - 1]]
