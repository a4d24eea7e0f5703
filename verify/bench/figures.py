"""Summarises runs: the median and range over rounds, and ratios to the first target.

A ratio compares two runs of the same round and load, which ran one after the other; its median and
range are over rounds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from octet.statistics import Interval
from verify.bench.load import FIGURES, Served
from verify.bench.rounds import Plan, Run
from verify.evaluation.comparison import Comparison, plain

__all__ = ["Bench", "Cell", "Quality", "Spread", "summarise"]


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Cell:
    """One target under one load. `ratios` to the first target is None for that target itself.

    `gpu_memory_bytes` and `gpu_power_w` add up the GPUs of this machine; None if not measured.
    """

    figures: dict[str, Spread]
    ratios: dict[str, Spread | None] | None
    gpu_memory_bytes: Spread | None
    gpu_power_w: Spread | None
    rounds: int


@dataclass(frozen=True)
class Quality:
    """The values of a quality plot: KL in nats, or the perplexity without a reference."""

    name: str
    values: tuple[Interval, ...]


@dataclass(frozen=True)
class Bench:
    """All results. `cells` is by load, then by target; `comparison` is None without samples.

    `proofs` has a sentence for each target about its proof; () if none was requested. An element of
    `served` is None for a server that was running already; `gpu` is None if unknown.
    """

    targets: tuple[str, ...]
    loads: tuple[str, ...]
    rounds: int
    requests: int
    cells: tuple[tuple[Cell, ...], ...]
    kv_capacity_tokens: tuple[int | None, ...]
    comparison: Comparison | None
    warnings: tuple[str, ...]
    proofs: tuple[str, ...] = ()
    served: tuple[Served | None, ...] = ()
    gpu: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns plain data; what was not measured is null."""
        data = asdict(self)
        data["quality"] = None if self.comparison is None else self.comparison.as_json()
        del data["comparison"]
        found: dict[str, Any] = plain(data)
        return found

    def quality(self) -> Quality | None:
        if self.comparison is None:
            return None
        rows = self.comparison.rows
        kl = [row.kl for row in rows if row.kl is not None]
        if len(kl) == len(rows):
            return Quality("KL from the reference, nats", tuple(kl))
        return Quality("perplexity", tuple(row.perplexity for row in rows))


def summarise(
    plan: Plan,
    runs: Sequence[Run],
    capacities: Sequence[int | None],
    comparison: Comparison | None = None,
    *,
    proofs: Sequence[str] = (),
    gpu: str | None = None,
) -> Bench:
    """Builds the results of all `runs` of `plan`, on a `gpu` of that name."""
    found = {(run.round, run.load, run.target): run for run in runs}
    cells = tuple(
        tuple(_cell(plan, found, load, target) for target in range(len(plan.places)))
        for load in range(len(plan.loads))
    )
    return Bench(
        targets=tuple(place.name for place in plan.places),
        served=tuple(place.served for place in plan.places),
        gpu=gpu,
        loads=tuple(map(str, plan.loads)),
        rounds=plan.rounds,
        requests=plan.requests,
        cells=cells,
        kv_capacity_tokens=tuple(capacities),
        comparison=comparison,
        warnings=(*_lengths(plan, runs), *(() if comparison is None else comparison.warnings)),
        proofs=tuple(proofs),
    )


def _cell(plan: Plan, found: dict[tuple[int, int, int], Run], load: int, target: int) -> Cell:
    own = [found[turn, load, target] for turn in range(plan.rounds)]
    first = [found[turn, load, 0] for turn in range(plan.rounds)]
    ratios = None
    if target:
        pairs = [(run.figures(), base.figures()) for run, base in zip(own, first, strict=True)]
        ratios = {
            # A latency of 0 has no ratio: the server sent all its tokens at once.
            name: Spread.of([a[name] / b[name] for a, b in pairs])
            if all(b[name] > 0 for _, b in pairs)
            else None
            for name in FIGURES
        }
    return Cell(
        figures={name: Spread.of([run.figures()[name] for run in own]) for name in FIGURES},
        ratios=ratios,
        gpu_memory_bytes=_gpus(own, "memory_bytes"),
        gpu_power_w=_gpus(own, "power_w"),
        rounds=len(own),
    )


def _gpus(runs: Sequence[Run], key: str) -> Spread | None:
    """Adds up a figure over the GPUs of each run; None if any is unknown."""
    sums = []
    for run in runs:
        values = [gpu.get(key) for gpu in run.gpus or ()]
        if not values or None in values:
            return None
        sums.append(float(sum(value for value in values if value is not None)))
    return Spread.of(sums)


def _lengths(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """Warns of targets that generated fewer or more tokens than the load requests."""
    lines = []
    for target, place in enumerate(plan.places):
        for index, load in enumerate(plan.loads):
            wanted = load.output * load.clients * plan.requests
            own = [run for run in runs if run.target == target and run.load == index]
            other = {
                int(run.result["total_output_tokens"])
                for run in own
                if run.result.get("total_output_tokens") not in (None, wanted)
            }
            if other:
                lines.append(
                    f"{place.name}, load {load}: generated {min(other):,} tokens in a run instead"
                    f" of {wanted:,}; does the server ignore `ignore_eos`?"
                )
    return lines
