"""Prometheus' alert rules: each is PromQL over metrics and labels that exist."""

import re
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.deploy.conftest import DEPLOY
from tests.deploy.test_configs import Services, mounted
from tests.deploy.test_dashboard import known, selectors

__all__ = ["known"]

(GROUP,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
RULES: list[dict[str, Any]] = GROUP["rules"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_is_about_metrics_and_labels_that_exist(
    rule: dict[str, Any], known: dict[str, set[str]]
) -> None:
    found = selectors(rule["expr"])
    assert found
    labels: set[str] = set()
    for selector in found:
        assert selector.name in known, selector.name
        labels |= known[selector.name] | {"instance", "job"}
        for matcher in selector.matchers.matchers:
            assert matcher.name in known[selector.name]
    grouped = re.search(r"\bby \(([^)]*)\)", rule["expr"])
    aggregated = grouped is not None or isinstance(promql.parse(rule["expr"]), promql.AggregateExpr)
    kept = {label.strip() for label in grouped[1].split(",")} if grouped else labels
    used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    assert used <= (kept if aggregated else labels), rule["alert"]


def test_names_are_unique_and_every_alert_has_a_severity_and_a_summary() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]


def test_prometheus_loads_the_rules(services: Services) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (path,) = config["rule_files"]
    assert mounted(services["prometheus"])[path] == "./deploy/alerts.yml"
