"""Counters, gauges and histograms for one event loop; `prometheus_client` writes them out.

Its own metrics take a lock for each figure, and cannot count one value several times (eight tokens
in one chunk). These are written by the event loop alone, so they need no lock; scrapes read them
there too.
"""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar, Metric
from prometheus_client.registry import Collector

__all__ = ["Counter", "Gauge", "Histogram", "HistogramSeries", "NumberSeries"]


class NumberSeries:
    """The value of a counter or a gauge for one combination of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        self.value -= amount

    def set(self, value: float) -> None:
        self.value = value


class HistogramSeries:
    """Counts by bucket, (lower bound, upper bound], for one combination of labels."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: above every bound
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}  # by bucket, the latest

    def observe(self, value: float, count: int = 1, trace_id: str | None = None) -> None:
        """Counts `value` `count` times; `trace_id` is a trace that shows such a value."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += count
        self.sum += value * count
        if trace_id is not None:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value)


Series = TypeVar("Series")


class _Family(Collector, Generic[Series]):
    """A metric: its series by the values of their labels."""

    kind: str

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self.name = name
        self.documentation = documentation
        self.label_names = tuple(labels)
        self._series: dict[tuple[str, ...], Series] = {}
        if not labels:
            self.labels()  # shown from the start
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series of these values, in the order of the metric's labels; the same each time."""
        series = self._series.get(values)
        if series is None:
            assert len(values) == len(self.label_names), (self.name, values)
            series = self._series[values] = self._new()
        return series

    def collect(self) -> Iterator[Metric]:
        metric = Metric(self.name, self.documentation, self.kind)
        for values, series in self._series.items():
            self._add(metric, dict(zip(self.label_names, values, strict=True)), series)
        yield metric

    @abstractmethod
    def _new(self) -> Series: ...

    @abstractmethod
    def _add(self, metric: Metric, labels: dict[str, str], series: Series) -> None:
        """The samples of one series."""


class Counter(_Family[NumberSeries]):
    """Only ever grows. `name` is without the suffix `_total`."""

    kind = "counter"

    def _new(self) -> NumberSeries:
        return NumberSeries()

    def _add(self, metric: Metric, labels: dict[str, str], series: NumberSeries) -> None:
        metric.add_sample(f"{self.name}_total", labels, series.value)


class Gauge(_Family[NumberSeries]):
    """Goes up and down."""

    kind = "gauge"

    def _new(self) -> NumberSeries:
        return NumberSeries()

    def _add(self, metric: Metric, labels: dict[str, str], series: NumberSeries) -> None:
        metric.add_sample(self.name, labels, series.value)


class Histogram(_Family[HistogramSeries]):
    """The distribution of a value, by the upper bounds of its buckets."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        *,
        bounds: Sequence[float],
    ) -> None:
        self.bounds = tuple(bounds)
        self._le = [*(str(float(bound)) for bound in bounds), "+Inf"]
        super().__init__(name, documentation, labels, registry)

    def _new(self) -> HistogramSeries:
        return HistogramSeries(self.bounds)

    def _add(self, metric: Metric, labels: dict[str, str], series: HistogramSeries) -> None:
        total = 0
        for bucket, count in enumerate(series.counts):
            total += count
            bucket_labels = labels | {"le": self._le[bucket]}
            exemplar = series.exemplars.get(bucket)
            metric.add_sample(f"{self.name}_bucket", bucket_labels, total, exemplar=exemplar)
        metric.add_sample(f"{self.name}_count", labels, total)
        metric.add_sample(f"{self.name}_sum", labels, series.sum)
