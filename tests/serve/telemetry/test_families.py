"""Counters and histograms: what they count, and how Prometheus reads it."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

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
    with pytest.raises(AssertionError):
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


def test_label_values_are_escaped(registry: CollectorRegistry) -> None:
    from prometheus_client import generate_latest

    odd = 'a"b\\c\nd'
    Counter("seen", "Seen.", ("a",), registry).labels(odd).inc()
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    assert [sample.labels for sample in family.samples] == [{"a": odd}]
