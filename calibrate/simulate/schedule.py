"""Plans the runs of a simulation, and which of them go through the layers together.

Paths run over all records, `REPEATS` times; faults run once, over `FAULT_RECORDS` of them, evenly
spaced by length. Those records are in batches of their own. So a fault of one layer can start from
the fault-free path's hidden states before that layer, bit for bit, and run only the layers from
there on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from octet.artifacts.golden import FIRST, GoldenSet, spread
from octet.artifacts.scenarios import Scenario

__all__ = ["REPEATS", "Run", "fault_records", "planned", "shares"]

REPEATS = 2
FAULT_RECORDS = FIRST
_COST = {"float32": 4, "bfloat16": 1}  # on a GPU: `calibrate.decoder.split_matmul`


def fault_records(golden: GoldenSet) -> list[int]:
    """Returns the indices of the records that faults are simulated on, evenly spaced by length."""
    lengths = [len(record.prompt_token_ids) for record in golden.records]
    order = sorted(range(len(lengths)), key=lambda n: lengths[n])
    return sorted(order[n] for n in spread(len(order), FAULT_RECORDS))


@dataclass
class Run:
    """One run of a scenario.

    `states` are the hidden states [1, n, H] of each pack after the layers so far; after the last
    layer [1, m, H], of the compared tokens. If not `whole`, only the records of faults run. A
    `carrier` is a path that runs only for the faults that start from it. `start` is the first layer
    that differs from the path without the fault.
    """

    scenario: Scenario
    repeat: int = 0
    whole: bool = True
    carrier: bool = False
    start: int = 0
    states: list[Tensor] = field(default_factory=list)


def planned(
    chosen: Sequence[Scenario], nbytes: Callable[[Run], int], most: int
) -> Iterator[list[Run]]:
    """Yields runs whose hidden states together fit in `most` bytes, or are of one scenario."""
    order = sorted(chosen, key=lambda h: (h.fault is not None, chosen.index(h)))
    part: list[Run] = []
    for scenario in order:
        if scenario.fault is None:
            runs = [Run(scenario, repeat) for repeat in range(REPEATS)]
        else:
            runs = [Run(scenario, whole=False, start=_first_layer(scenario))]
        needed = runs + _carriers(part, runs)
        if part and sum(map(nbytes, part + needed)) > most:
            yield part
            part, needed = [], runs + _carriers([], runs)
        part += needed
    if part:
        yield part


def shares(
    chosen: Sequence[Scenario], golden: GoldenSet, layers: int, world: int
) -> list[list[Scenario]]:
    """Divides `chosen` into `world` parts that cost about the same, the same on every rank.

    The costliest scenario left goes to the part that costs least so far.
    """
    few = len(fault_records(golden)) / len(golden.records)

    def cost(scenario: Scenario) -> float:
        whole = REPEATS if scenario.fault is None else few
        return _COST[scenario.path.compute] * whole * (layers - _first_layer(scenario))

    parts: list[list[Scenario]] = [[] for _ in range(world)]
    costs = [0.0] * world
    for scenario in sorted(chosen, key=cost, reverse=True):
        least = costs.index(min(costs))
        parts[least].append(scenario)
        costs[least] += cost(scenario)
    return [sorted(part, key=chosen.index) for part in parts]


def _carriers(part: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Returns carriers for the paths that `runs` start from and `part` does not have."""
    conforming = {run.scenario.path for run in part if run.scenario.fault is None}
    wanted = {run.scenario.path for run in runs if run.start} - conforming
    return [Run(Scenario(path=path), whole=False, carrier=True) for path in wanted]


def _first_layer(scenario: Scenario) -> int:
    """Returns the first layer that differs from the path without the fault."""
    fault = scenario.fault
    return 0 if fault is None or fault.layer is None else fault.layer
