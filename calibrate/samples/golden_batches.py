"""Golden records as batches: prompts with the tokens that the reference answered."""

from collections.abc import Sequence

from calibrate.samples.batches import Batch, make_batches
from octet.artifacts.golden import GoldenSet

__all__ = ["golden_batches"]


def golden_batches(golden: GoldenSet, records: Sequence[int], most: int) -> list[Batch]:
    """Of similar lengths, at most so many tokens together; the origin of a row is its record."""
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
    """The prompt, and the continuation up to the last position but one."""
    record = golden.records[number]
    return [*record.prompt_token_ids, *record.continuation_token_ids[: len(record.tops) - 1]]
