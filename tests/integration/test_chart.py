"""The Helm chart, rendered by Helm and checked by the published schemas of what it makes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from octet_cli.main import app
from serve.config import GatewayConfig
from tests.integration.servers import layout
from tests.verify.kubernetes.kubelet import ROLE

SCRIPT = Path(__file__).with_name("helm_chart.py")
IMAGE = {"repository": "registry.example/octet"}
CONFIG = {
    "models": {"llama": {"pool": {"backends": [{"type": "vllm", "url": "http://vllm:8000"}]}}}
}
KEY = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "vllm", "key": "api-key"}}}
PROVER = {"selector": {"tier": "a", "app": "vllm-fp8"}, "port": 8000, "artifact": "/artifacts/fp8"}
ALL = {
    "image": IMAGE,
    "artifacts": {"persistentVolumeClaim": {"claimName": "artifacts"}},
    "gateway": {"config": CONFIG, "env": [{"name": "KEY", "value": "x"}]},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {
        "clients": [{"podSelector": {"matchLabels": {"app": "web"}}}],
        "scrapers": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
    "provers": {
        "fp8": PROVER
        | {
            "options": ["--engine", "vllm-gpu", "--device", "h100", "--api-key-env", "KEY"],
            "env": [KEY],
            "inferencePool": {"port": 8000, "endpointPicker": {"name": "epp", "port": 9002}},
            "autoscale": {
                "deployment": "vllm-fp8",
                "pool": "fp8",
                "min": 1,
                "max": 8,
                "tokens": 50000,
            },
        },
        "bf16": PROVER | {"port": "http", "selector": {"app": "vllm-bf16"}},
    },
}


def rendered(values: dict[str, Any]) -> dict[str, Any]:
    if not layout.is_ready(layout.KUBERNETES):
        pytest.skip("no Helm: run `tests/integration/servers/setup.py kubernetes`")
    done = subprocess.run(
        [str(layout.python(layout.KUBERNETES)), "-P", str(SCRIPT)],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def pods_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        x["metadata"]["name"]: x["spec"]["template"]["spec"]
        for x in found["objects"]
        if x["kind"] == "Deployment"
    }


@pytest.fixture(scope="module")
def chart() -> dict[str, Any]:
    return rendered(ALL)


def test_every_object_is_what_its_schema_says(chart: dict[str, Any]) -> None:
    assert chart["lint"] == [] and chart["problems"] == []
    kinds = sorted(x["kind"] for x in chart["objects"])
    print("\n", kinds)
    assert kinds.count("Deployment") == 3 and kinds.count("NetworkPolicy") == 2
    assert {"InferencePool", "ScaledObject", "PodMonitor", "PodDisruptionBudget"} <= set(kinds)
    assert "readinessGates: [{conditionType: octet.dev/proven}]" in chart["notes"]


def test_an_inference_pool_has_the_fields_of_its_version_1(chart: dict[str, Any]) -> None:
    """Those of config/crd in kubernetes-sigs/gateway-api-inference-extension, v1."""
    (pool,) = (x for x in chart["objects"] if x["kind"] == "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"] == {
        "selector": {"matchLabels": PROVER["selector"]},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
    }


def test_a_prover_may_do_what_it_needs_and_nothing_more(chart: dict[str, Any]) -> None:
    """The rights with which the tests run it."""
    (role,) = (x for x in chart["objects"] if x["kind"] == "Role")
    assert role["rules"] == ROLE
    assert not [x for x in chart["objects"] if x["kind"].startswith("ClusterRole")]
    mounted = {name: pod["automountServiceAccountToken"] for name, pod in pods_of(chart).items()}
    assert mounted == {
        "demo-gateway": False,
        "demo-prover-fp8": True,
        "demo-prover-bf16": True,
    }


def test_no_container_is_root_or_can_write_its_files(chart: dict[str, Any]) -> None:
    for pod in pods_of(chart).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]


def test_the_commands_and_the_configuration_are_octets(chart: dict[str, Any]) -> None:
    group: Any = typer.main.get_command(app)
    for pod in pods_of(chart).values():
        name, *words = pod["containers"][0]["args"]
        context = group.commands[name].make_context(name, [*words])
        if name == "prove":
            assert context.params["selector"] in ("app=vllm-fp8,tier=a", "app=vllm-bf16")
            assert context.params["metrics"] == "0.0.0.0:9090"
            if context.params["api_key_env"]:
                assert pod["containers"][0]["env"] == [KEY]
    (config,) = (x for x in chart["objects"] if x["kind"] == "ConfigMap")
    GatewayConfig.model_validate(yaml.safe_load(config["data"]["gateway.yaml"]))


def test_what_is_missing_is_named() -> None:
    config = {"config": CONFIG}
    error = rendered({"gateway": config})["error"]
    assert "image.repository: the image that you have built" in error
    assert "gateway.config: give the gateway's" in rendered({"image": IMAGE})["error"]
    error = rendered({"image": IMAGE, "gateway": config, "provers": {"fp8": {"port": 1}}})["error"]
    assert "selector" in error and "artifact" in error
    wrong = {"fp8": PROVER | {"artefact": "/x"}}
    assert "artefact" in rendered({"image": IMAGE, "gateway": config, "provers": wrong})["error"]
    alone = rendered({"image": IMAGE, "gateway": {"enabled": False}, "provers": {"fp8": PROVER}})
    assert alone["problems"] == [] and list(pods_of(alone)) == ["demo-prover-fp8"]
