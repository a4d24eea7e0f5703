"""Alternates the targets in rounds, and keeps each run as soon as it is measured.

In a round every target runs every load once. The order of the targets rotates from round to round
(A B, B A, ...), so a machine that slowly changes favours none. All targets of a round get the same
prompts; another round or load has others. A directory `out` keeps every run as a file.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octet.errors import ConfigError
from verify.bench.load import FIGURES, Generator, Load, Place
from verify.bench.machine import is_local, watched

__all__ = ["Plan", "Run", "measure"]

_SETUP = "bench.json"
_SCHEMA = 1


@dataclass(frozen=True)
class Plan:
    """The targets, loads and rounds to measure.

    `identities` are facts that each server reports about itself.
    A run sends `requests` for each concurrent client of its load.
    """

    places: Sequence[Place]
    identities: Sequence[Mapping[str, str]]
    loads: Sequence[Load]
    rounds: int
    requests: int

    def order(self) -> Iterator[tuple[int, int, int]]:
        """Yields (round, load, target) as they are run."""
        n = len(self.places)
        for turn in range(self.rounds):
            for load in range(len(self.loads)):
                for place in range(n):
                    yield turn, load, (turn + place) % n

    def seed(self, turn: int, load: int) -> int:
        """Returns the seed of the prompts; `turn` -1 is the warm-up."""
        return (turn + 1) * len(self.loads) + load


@dataclass(frozen=True)
class Run:
    """One target under one load in one round: the generator's JSON, and the GPUs if known."""

    round: int
    load: int
    target: int
    result: Mapping[str, Any]
    gpus: list[dict[str, Any]] | None = None

    def figures(self) -> dict[str, float]:
        return {name: float(self.result[key]) for name, key in FIGURES.items()}


def measure(
    plan: Plan,
    generator: Generator,
    *,
    out: Path | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[Run]:
    """Returns all runs of the plan; those that `out` has are not run again.

    Each target runs each load once beforehand, unmeasured, if a run of it is missing. Raises
    ConfigError if `out` holds another plan, and what `Generator.run` raises.
    """
    if out is not None:
        _require_same_setup(out, plan, generator)
    found = {key: _kept(out, plan, *key) for key in plan.order()}
    missing = [key for key, run in found.items() if run is None]
    warm = list(dict.fromkeys((load, target) for _, load, target in missing))
    total = len(warm) + len(missing)
    advance(0, total)
    for done, (load, target) in enumerate(warm, start=1):
        _run(plan, generator, -1, load, target)
        advance(done, total)
    for done, key in enumerate(missing, start=len(warm) + 1):
        found[key] = run = _run(plan, generator, *key)
        if out is not None:
            _write(_path(out, plan, *key), asdict(run))
        advance(done, total)
    return [run for run in found.values() if run is not None]


def _run(plan: Plan, generator: Generator, turn: int, load: int, target: int) -> Run:
    place, wanted = plan.places[target], plan.loads[load]
    requests = wanted.clients * (plan.requests if turn >= 0 else 1)
    with watched() as watch:
        result = generator.run(place, wanted, requests=requests, seed=plan.seed(turn, load))
    gpus = None
    if watch is not None and is_local(place.url):
        # The generator loads its libraries first; its result is written when the last request ends.
        ended = float(result["ended"])
        gpus = watch.between(ended - float(result["duration"]), ended)
    return Run(turn, load, target, result, None if gpus is None else [asdict(gpu) for gpu in gpus])


def _require_same_setup(out: Path, plan: Plan, generator: Generator) -> None:
    """Writes the setup to `out`; raises ConfigError if `out` holds runs of another setup."""
    setup = {
        "schema_version": _SCHEMA,
        "targets": [
            {"name": place.name, **identity}
            for place, identity in zip(plan.places, plan.identities, strict=True)
        ],
        "loads": [str(load) for load in plan.loads],
        "requests": plan.requests,
        "tokenizer": str(generator.tokenizer.resolve()),
    }
    path = out / _SETUP
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _write(path, setup)
        return
    before = _read(path)
    for key, value in setup.items():
        if before.get(key) != value:
            raise ConfigError(
                f"--out {out}: holds runs with other {key.replace('_', ' ')}"
                f" ({json.dumps(before.get(key))}, now {json.dumps(value)}): give another directory"
            )


def _path(out: Path, plan: Plan, turn: int, load: int, target: int) -> Path:
    return out / f"round{turn + 1}-{plan.loads[load]}-target{target + 1}.json"


def _kept(out: Path | None, plan: Plan, turn: int, load: int, target: int) -> Run | None:
    if out is None or not (path := _path(out, plan, turn, load, target)).exists():
        return None
    try:
        run = Run(**_read(path))
        run.figures()
    except (TypeError, KeyError, ValueError):
        raise ConfigError(f"{path}: is not a run that `octet bench` wrote: remove it") from None
    return run


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: is not JSON that `octet bench` wrote: remove it")
    return data


def _write(path: Path, data: Any) -> None:
    """Writes a file atomically: an interrupted run leaves none."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    os.replace(partial, path)
