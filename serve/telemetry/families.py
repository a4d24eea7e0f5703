"""Counters, gauges and histograms for one event loop, and how Prometheus reads them.

`prometheus_client`'s own take a lock for each figure, cannot count one value several times (eight
tokens in one chunk), and write 3,000 lines in tens of milliseconds, in which no token is sent. Here
the event loop alone writes and reads, and each series keeps the text of its labels.
"""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar, Metric
from prometheus_client.registry import Collector

__all__ = ["Counter", "Family", "Gauge", "Histogram", "HistogramSeries", "NumberSeries"]

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class NumberSeries:
    """The value of a counter or a gauge for one combination of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        self.value -= amount


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
# What follows the metric's name (`_total`, `_bucket`), more labels, the value, its exemplar.
Sample = tuple[str, str, float, Exemplar | None]


class Family(Collector, Generic[Series]):
    """A metric: its series by the values of their labels."""

    kind: str

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self.name = name
        self.documentation = documentation
        self.label_names = tuple(labels)
        self._series: dict[tuple[str, ...], Series] = {}
        self._texts: dict[tuple[str, ...], str] = {}  # of the labels, as a scraper reads them
        if not labels:
            self.labels()  # shown from the start
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series of these values, in the order of the metric's labels; the same each time."""
        series = self._series.get(values)
        if series is None:
            pairs = zip(self.label_names, values, strict=True)
            self._texts[values] = ",".join(f'{k}="{v.translate(_ESCAPES)}"' for k, v in pairs)
            series = self._series[values] = self._new()
        return series

    def collect(self) -> Iterator[Metric]:
        """For `prometheus_client`."""
        metric = Metric(self.name, self.documentation, self.kind)
        for values, series in self._series.items():
            labels = dict(zip(self.label_names, values, strict=True))
            for suffix, bound, value, exemplar in self._samples(series):
                more = labels | {"le": bound} if bound else labels
                metric.add_sample(self.name + suffix, more, value, exemplar=exemplar)
        yield metric

    def render(self, openmetrics: bool) -> Iterator[str]:
        """The lines of an exposition, in Prometheus' text format or in OpenMetrics."""
        shown = self.name
        if self.kind == "counter" and not openmetrics:
            shown += "_total"
        yield f"# HELP {shown} {self.documentation}\n# TYPE {shown} {self.kind}\n"
        for values, series in self._series.items():
            text = self._texts[values]
            for suffix, bound, value, exemplar in self._samples(series):
                labels = f'{text}{"," if text else ""}le="{bound}"' if bound else text
                line = f"{self.name}{suffix}{{{labels}}} {value}"
                if exemplar is not None and openmetrics:
                    trace_id = exemplar.labels["trace_id"]
                    line += f' # {{trace_id="{trace_id}"}} {exemplar.value}'
                yield line + "\n"

    @abstractmethod
    def _new(self) -> Series: ...

    @abstractmethod
    def _samples(self, series: Series) -> Iterator[Sample]: ...


class Counter(Family[NumberSeries]):
    """Only ever grows. `name` is without the suffix `_total`."""

    kind = "counter"

    def _new(self) -> NumberSeries:
        return NumberSeries()

    def _samples(self, series: NumberSeries) -> Iterator[Sample]:
        yield "_total", "", series.value, None


class Gauge(Family[NumberSeries]):
    """Goes up and down."""

    kind = "gauge"

    def _new(self) -> NumberSeries:
        return NumberSeries()

    def _samples(self, series: NumberSeries) -> Iterator[Sample]:
        yield "", "", series.value, None


class Histogram(Family[HistogramSeries]):
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

    def _samples(self, series: HistogramSeries) -> Iterator[Sample]:
        total = 0
        exemplars = series.exemplars
        for bucket, count in enumerate(series.counts):
            total += count
            exemplar = exemplars.get(bucket) if exemplars else None
            yield "_bucket", self._le[bucket], float(total), exemplar
        yield "_count", "", float(total), None
        yield "_sum", "", series.sum, None
