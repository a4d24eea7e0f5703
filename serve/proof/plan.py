"""Plans which golden records are sent, and when: few at first, all of them if few do not decide.

The order is drawn by a seed and stratified by prompt length. The shortest and the longest prompts
show different faults, so every prefix of the order holds some of each.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from octet.artifacts.golden import FIRST, POSITIONS, GoldenSet
from octet.artifacts.scenarios import ScenarioSet

__all__ = ["FIRST_PART", "Slices", "cost", "fits", "order", "parts_of", "simulated"]

FIRST_PART = FIRST  # records
_MORE = 20  # records of each further interim check
_STRATA = 8  # of equal numbers of records


def cost(golden: GoldenSet, record: int) -> int:
    """Returns the tokens that sending a record takes: its prompt and the answer."""
    return len(golden.records[record].prompt_token_ids) + POSITIONS


def fits(tokens: int, context: int | None) -> bool:
    """Returns whether a prompt of `tokens` tokens and an answer fit; None: no limit."""
    return context is None or tokens < context


def simulated(scenarios: ScenarioSet | None) -> list[int]:
    """Returns the records on which every scenario was simulated: these can tell faults apart."""
    if scenarios is None or not scenarios.logprobs:
        return []
    known = [~np.isnan(x).all(axis=(0, 2, 3)) for x in scenarios.logprobs.values()]
    return np.flatnonzero(np.logical_and.reduce(known)).tolist()


def order(
    golden: GoldenSet, *seed: int, context: int | None = None, first: Collection[int] = ()
) -> list[int]:
    """Returns all records that fit into `context`, in the same order for the same seed.

    Records in `first` come before all others. In either part, each block of `_STRATA` records that
    starts at a multiple of `_STRATA` holds one of each length stratum.
    """
    lengths = [len(record.prompt_token_ids) for record in golden.records]
    fitting = [n for n, length in enumerate(lengths) if fits(length, context)]
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


def parts_of(records: Sequence[int], first: int = FIRST_PART) -> Iterator[tuple[int, ...]]:
    """Splits `records` into the parts in which they are sent: each interim check adds one part."""
    start, stop = 0, first
    while start < len(records):
        yield tuple(records[start:stop])
        start, stop = stop, stop + _MORE


class Slices:
    """Selects records for probes of a serving backend: a few at a time, all equally often."""

    def __init__(self, golden: GoldenSet, seed: int, *, context: int | None = None) -> None:
        self._golden = golden
        self._seed = seed
        self._context = context
        self._rounds = 0
        self._left: list[int] = []

    def next(self, allowance: int, most: int = FIRST_PART) -> tuple[int, ...]:
        """Returns the next records: `most` at most, `allowance` tokens at most; () if none fits.

        A record that does not fit waits for a larger allowance, and those behind it wait too:
        otherwise the longest prompts would never be sent.
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
