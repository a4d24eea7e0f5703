"""Renders the Helm chart and checks each object by its published schema.

    .integration/kubernetes/bin/python tests/integration/helm_chart.py < values.json

Runs in an environment of its own: Helm 4 as a library, Kubernetes' JSON schemas, and models that
were generated from the CRDs of KEDA and the Prometheus Operator. Prints JSON: the objects, the
notes, and the problems; or the error, where Helm refuses the values.
"""

import json
import sys
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "octet"
KUBERNETES = ("1.25", "1.37")  # the chart's oldest, and the newest with a schema here
MODELS = {"ScaledObject": ScaledObject, "PodMonitor": PodMonitor}


def problems_of(found: dict[str, Any]) -> list[str]:
    kind = found["kind"]
    if kind in MODELS:
        read = MODELS[kind].model_validate(found)
        kept = json.loads(read.model_dump_json(by_alias=True, exclude_none=True))
        return [f"{kind}: {path} is no field" for path in unknown(found, kept)]
    if kind == "InferencePool":
        return []  # no package has its schema: the test has its fields
    problems = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{kind} in {version}: {error.message}")
    return problems


def unknown(sent: Any, kept: Any, path: str = "") -> list[str]:
    """Fields that the model has not read."""
    if isinstance(sent, dict):
        lost = [f"{path}.{key}" for key in sent if key not in (kept or {})]
        both = [key for key in sent if key in (kept or {})]
        return lost + [x for key in both for x in unknown(sent[key], kept[key], f"{path}.{key}")]
    if isinstance(sent, list):
        return [x for a, b in zip(sent, kept, strict=True) for x in unknown(a, b, f"{path}[]")]
    return []


def main() -> None:
    values = json.load(sys.stdin)
    answer: dict[str, Any] = {"lint": helm.lint(str(CHART))["errors"]}
    with helm.Chart.load(str(CHART)) as chart:
        try:
            chart.validate_schema(values)
            files = chart.render(values, name="demo", namespace="models")
        except helm.HelmError as error:
            print(json.dumps({"error": str(error)}))
            return
    notes = files.pop("octet/templates/NOTES.txt", "")
    objects = [x for text in files.values() for x in yaml.safe_load_all(text) if x]
    problems = [problem for found in objects for problem in problems_of(found)]
    print(json.dumps(answer | {"objects": objects, "notes": notes, "problems": problems}))


if __name__ == "__main__":
    main()
