"""Counters and histograms: what they count, and how Prometheus reads it."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import generate_latest as prometheus_text
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from serve.telemetry.families import Counter, Gauge, Histogram


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_counter_keeps_one_series_for_each_combination(registry: CollectorRegistry) -> None:
    counter = Counter("seen", "Seen.", ("a", "b"), registry)
    counter.labels("x", "y").inc()
    counter.labels("x", "y").inc(2)
    counter.labels("y", "x").inc()
    assert registry.get_sample_value("seen_total", {"a": "x", "b": "y"}) == 3
    assert registry.get_sample_value("seen_total", {"a": "y", "b": "x"}) == 1


def test_a_metric_without_labels_shows_from_the_start(registry: CollectorRegistry) -> None:
    Gauge("level", "Level.", (), registry)
    assert registry.get_sample_value("level") == 0


def test_labels_of_another_number_are_a_defect(registry: CollectorRegistry) -> None:
    with pytest.raises(ValueError):
        Counter("seen", "Seen.", ("a", "b"), registry).labels("x")


def test_a_value_on_a_bound_is_in_its_bucket(registry: CollectorRegistry) -> None:
    """Prometheus's `le` is "at most"."""
    histogram = Histogram("took_seconds", "Took.", (), registry, bounds=(1, 2))
    for value in (1.0, 1.5, 2.0, 2.5):
        histogram.labels().observe(value)
    found = {le: registry.get_sample_value("took_seconds_bucket", {"le": le}) for le in LE}
    assert found == {"1.0": 1, "2.0": 3, "+Inf": 4}


LE = ("1.0", "2.0", "+Inf")


def test_one_value_counts_as_often_as_said(registry: CollectorRegistry) -> None:
    histogram = Histogram("took_seconds", "Took.", ("a",), registry, bounds=(1, 2))
    histogram.labels("x").observe(0.5, 8)
    assert registry.get_sample_value("took_seconds_count", {"a": "x"}) == 8
    assert registry.get_sample_value("took_seconds_sum", {"a": "x"}) == 4


@pytest.mark.parametrize("openmetrics", [False, True])
def test_it_reads_as_what_prometheus_client_writes(
    registry: CollectorRegistry, openmetrics: bool
) -> None:
    """With labels that need escapes, with exemplars, without labels, and without any series."""
    odd = 'a"b\\c\nd, {}#'
    counter = Counter("seen", "Seen.", ("a", "b"), registry)
    counter.labels(odd, "").inc(1e18)
    gauge = Gauge("level", "Level.", (), registry)
    gauge.labels().dec(0.1)
    took = Histogram("took_seconds", "Took.", ("a",), registry, bounds=(0.001, 2))
    took.labels(odd).observe(0.0005, 3, trace_id="4bf92f3577b34da6a3ce929d0e0e4736")
    took.labels("x").observe(7)
    plain = Histogram("rest_seconds", "Rest.", (), registry, bounds=(1,))
    empty = Counter("never", "Never.", ("a",), registry)
    families = (counter, gauge, took, plain, empty)
    ours = "".join(line for family in families for line in family.render(openmetrics))
    if openmetrics:
        theirs = openmetrics_text(registry).decode()
        assert list(parse_openmetrics(ours + "# EOF\n")) == list(parse_openmetrics(theirs))
        assert "4bf92f3577b34da6a3ce929d0e0e4736" in ours
    else:
        theirs = prometheus_text(registry).decode()
        assert list(parse_prometheus(ours)) == list(parse_prometheus(theirs))
