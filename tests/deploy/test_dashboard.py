"""Grafana's dashboard: each query is PromQL over metrics and labels that exist.

No Grafana runs here: how it looks is not checked.
"""

import json
import re
import time
from typing import Any

import promql_parser as promql
import pytest
from prometheus_client import Counter, Gauge, Histogram

from octet.errors import BackendError
from octet_cli.drift import GAUGES
from serve.access.shared import SharedLimits
from serve.backends.base import LoadReport
from serve.config import Judge, SharedConfig
from serve.members.proof_state import MemberProof
from serve.routing.judgement import Judgement
from tests.deploy.conftest import DEPLOY
from tests.serve.proof.exams import verdict
from tests.serve.telemetry.gateways import busy_gateway

DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/octet.json").read_text())
# Of vLLM's and Triton's documentation, as far as the dashboard shows them.
OTHERS = {
    "vllm:num_requests_running": {"model_name", "engine"},
    "vllm:num_requests_waiting": {"model_name", "engine"},
    "vllm:kv_cache_usage_perc": {"model_name", "engine"},
    "nv_inference_request_success": {"model", "version"},
    "nv_inference_request_failure": {"model", "version", "reason"},
}
TARGET = {"job", "instance"}  # Prometheus adds them to everything


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """Title and query, with Grafana's own variables filled in."""
    found = [(panel["title"], target) for panel in panels() for target in panel["targets"]]
    return [(title, target["expr"].replace("$__rate_interval", "1m")) for title, target in found]


def samples() -> dict[str, set[str]]:
    """Our metrics by the names that Prometheus stores, with their labels."""
    gateway = busy_gateway(max_tokens=100)
    (member,) = gateway.pools["main"].members
    member.report = LoadReport(running=1, waiting=0, kv_usage=0.1, capacity_tokens=1000)
    member.lease(1).failed(BackendError("by hand", kind="dead"))
    member.proof = MemberProof("golden records", "a" * 64, time.monotonic)
    member.proof.verdict = verdict("as_expected")
    member.proof.probed("as_expected")
    judgement = gateway.pools["main"].judgement = Judgement(Judge(reference="bf16", max_kl=0.1))
    judgement.add(0.0, 4, agreed=4)
    gateway.keys.shared = SharedLimits(SharedConfig(url="redis://127.0.0.1"))
    gateway.admission.rejections["main", "queue_full"] += 1
    gateway.admission.gates["main"] = gateway.admission._gate(gateway.pools["main"])
    found = {
        sample.name: set(sample.labels)
        for family in gateway.metrics.registry.collect()
        for sample in family.samples
    }
    for metric in vars(gateway.metrics).values():
        if isinstance(metric, Counter):
            found[f"{metric._name}_total"] = set(metric._labelnames)
        elif isinstance(metric, Gauge):
            found[metric._name] = set(metric._labelnames)
        elif isinstance(metric, Histogram):
            found[f"{metric._name}_bucket"] = {*metric._labelnames, "le"}
    return found | OTHERS


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    drift = {gauge: {"model", "calibration"} for gauge in GAUGES}  # of `octet drift --metrics`
    return samples() | drift


def selectors(query: str) -> list[promql.VectorSelector]:
    found: list[promql.VectorSelector] = []

    def visit(node: promql.Expr) -> bool:
        if isinstance(node, promql.VectorSelector):
            found.append(node)
        elif isinstance(node, promql.MatrixSelector):
            found.append(node.vector_selector)
        return True

    promql.walk(promql.parse(query), pre_visit=visit)
    return found


@pytest.mark.parametrize(("title", "query"), queries())
def test_queries_are_about_metrics_that_exist(
    known: dict[str, set[str]], title: str, query: str
) -> None:
    found = selectors(query)
    assert found
    labels: set[str] = set()
    for selector in found:
        assert selector.name in known, query
        labels |= known[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in known[selector.name] | TARGET, (query, matcher.name)
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        assert {label.strip() for label in group.split(",")} <= labels | TARGET, query


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_legends_name_labels_that_the_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        grouped = re.findall(r"\bby \(([^)]*)\)", target["expr"])
        kept = {label.strip() for group in grouped for label in group.split(",")}
        assert shown <= kept or not grouped, target["expr"]


def test_ratios_are_of_totals() -> None:
    """Prometheus divides what has the same labels; and a part that has none yet is 0."""
    for _, query in queries():
        if " / " in query:
            part, whole = query.split(" / ")
            for side in (part.removeprefix("(").removesuffix(" or vector(0))"), whole):
                total = promql.parse(side)
                assert isinstance(total, promql.AggregateExpr) or side.startswith("count("), query
                assert total.modifier is None, query
            assert part.endswith(" or vector(0))") or "octet_backend_up" in query, query


def test_every_metric_of_ours_for_pools_and_answers_is_shown(known: dict[str, set[str]]) -> None:
    shown = {selector.name for _, query in queries() for selector in selectors(query)}
    ours = {name for name in known if name.startswith(("octet_", "gen_ai_"))}
    hidden = {name for name in ours - shown if not name.endswith(("_sum", "_count"))}
    assert hidden == {
        "octet_backend_breaker_transitions_total",  # the state itself is shown
        "octet_backend_running",
        "octet_build_info",
        "octet_calibration_distance",  # only of counted pools; alerts tell of drift
        "octet_calibration_distance_limit",
        "octet_calibration_drifted",
        "octet_calibration_live_until_seconds",
        "octet_calibration_misfits",
        "octet_captured_requests_total",  # alerts tell of it, and /ui
        "octet_judged_ruling",  # an alert tells of it
        "octet_pool_ready",
        "octet_reloads_total",
        "octet_rollouts_total",
        "octet_shared_limits_alone_total",  # only with access.shared; an alert tells of a loss
        "octet_shared_limits_gateways",
        "octet_shared_limits_losses_total",
        "octet_shared_limits_up",
        "octet_shadow_requests_total",
        "octet_uncounted_streams_total",  # the estimated tokens are
    }


def test_ids_are_unique_and_panels_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"])
               for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert not own & cells, panel["title"]
        cells |= own


def test_queries_of_a_panel_have_names_of_their_own() -> None:
    for panel in panels():
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)


def test_variables(known: dict[str, set[str]]) -> None:
    """Each one used is declared, over a metric and a label that exist."""
    declared = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used - {"__rate_interval"} == set(declared)
    for name in ("model", "pool"):
        query = declared[name]["query"]["query"]
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
        assert match and match[2] in known[match[1]], query


def test_the_data_source_is_the_provisioned_one() -> None:
    (variable,) = [v for v in DASHBOARD["templating"]["list"] if v["type"] == "datasource"]
    assert variable["current"]["value"] == "prometheus"
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}
    provisioned = (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text()
    assert "uid: prometheus" in provisioned
