"""A clock that only the test moves, and figures to look at."""

from types import SimpleNamespace

import pytest

from serve.telemetry import observation
from serve.telemetry.metrics import Metrics
from tests.serve.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(observation, "time", SimpleNamespace(perf_counter=clock))
    return clock


class Figures:
    """The metrics of one test."""

    def __init__(self) -> None:
        self.metrics = Metrics()

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def only(self, name: str) -> dict[tuple[str, ...], float]:
        """Every series of a sample's name, by its label values in the order of their names."""
        return {
            tuple(sample.labels[key] for key in sorted(sample.labels)): sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name
        }


@pytest.fixture
def figures() -> Figures:
    return Figures()
