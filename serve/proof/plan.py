"""Which golden records are asked, and when: few at first, all of them where few do not decide.

The order is drawn by a seed, stratified by the prompts' lengths: the shortest and the longest
prompts show different faults, so that every beginning of the order holds some of each.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from octet.artifacts.golden import POSITIONS, GoldenSet
from octet.artifacts.scenarios import HypothesisSet

__all__ = ["FIRST_LOOK", "Slices", "cost", "looks", "order", "simulated"]

FIRST_LOOK = 24  # records
_MORE = 20  # of each further look
_STRATA = 8  # of equal numbers of records


def cost(golden: GoldenSet, record: int) -> int:
    """Tokens that asking it takes: its prompt's, and the answer's."""
    return len(golden.records[record].prompt_token_ids) + POSITIONS


def simulated(hypotheses: HypothesisSet | None) -> list[int]:
    """The records that every hypothesis was simulated on: those that can tell faults apart."""
    if hypotheses is None or not hypotheses.logprobs:
        return []
    known = [~np.isnan(x).all(axis=(0, 2, 3)) for x in hypotheses.logprobs.values()]
    return np.flatnonzero(np.logical_and.reduce(known)).tolist()


def order(
    golden: GoldenSet, *seed: int, context: int | None = None, first: Collection[int] = ()
) -> list[int]:
    """All records but those that do not fit into `context`; the same for the same seed.

    Those in `first` come before all others. Of either, any `_STRATA` that follow each other, from a
    multiple of that, are one of each length.
    """
    lengths = [len(record.prompt_token_ids) for record in golden.records]
    fitting = [n for n, length in enumerate(lengths) if context is None or length < context]
    fitting.sort(key=lambda n: (lengths[n], n))
    random = np.random.Generator(np.random.PCG64(seed))
    early = [n for n in fitting if n in first]
    return _mixed(early, random) + _mixed([n for n in fitting if n not in first], random)


def _mixed(by_length: Sequence[int], random: np.random.Generator) -> list[int]:
    parts = np.array_split(np.array(by_length, int), _STRATA)
    strata = [random.permutation(part).tolist() for part in parts]
    found: list[int] = []
    while len(found) < len(by_length):
        turn = random.permutation(_STRATA).tolist()
        found += [strata[which].pop() for which in turn if strata[which]]
    return found


def looks(records: Sequence[int], first: int = FIRST_LOOK) -> Iterator[tuple[int, ...]]:
    """`records` in the parts in which they are asked: each look adds one to those before."""
    start, stop = 0, first
    while start < len(records):
        yield tuple(records[start:stop])
        start, stop = stop, stop + _MORE


class Slices:
    """Records for probes of a backend that serves: a few at a time, each as often as any other."""

    def __init__(self, golden: GoldenSet, seed: int, *, context: int | None = None) -> None:
        self._golden = golden
        self._seed = seed
        self._context = context
        self._rounds = 0
        self._left: list[int] = []

    def next(self, allowance: int, most: int = FIRST_LOOK) -> tuple[int, ...]:
        """The next records, `most` at most, that take `allowance` tokens at most; () if none does.

        One that does not fit waits for a larger allowance, and those behind it with it: else the
        longest prompts would never be asked.
        """
        found: list[int] = []
        while len(found) < most:
            if not self._left:
                self._left = order(self._golden, self._seed, self._rounds, context=self._context)
                self._rounds += 1
            if not self._left or self._left[0] in found:
                break
            price = cost(self._golden, self._left[0])
            if price > allowance:
                break
            allowance -= price
            found.append(self._left.pop(0))
        return tuple(found)
