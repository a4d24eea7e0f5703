"""What a configuration becomes under Ray, and what Ray cannot serve of it."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from octet.artifacts.manifest import Manifest, software, write_artifact
from octet.artifacts.provenance import ModelIdentity
from octet.errors import ConfigError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from serve.config import GatewayConfig
from serve.ray.plan import engines_of, problems, require_resources

EMBEDDED = {"type": "embedded", "path": "onnx"}
KEY = {"name": "a", "sha256": "0" * 64, "requests_per_minute": 1}


def config(*backends: dict[str, Any], **fields: Any) -> GatewayConfig:
    pools = {"main": {"backends": backends or [EMBEDDED]}}
    content = {"models": {"m": {"pool": "main"}}, "pools": pools, **fields}
    return GatewayConfig.model_validate(content)


def test_each_engine_is_a_deployment_and_a_server_with_a_url_is_none() -> None:
    url = {"type": "openai", "url": "http://127.0.0.1:9"}
    vllm = {"type": "vllm", "artifact": "checkpoint", "name": "mine"}
    found = list(engines_of(config(EMBEDDED, url, vllm, ray={"engines": {"main": {"cpus": 2}}})))
    assert [(engine.name, engine.needs) for engine in found] == [
        ("main-1", {"CPU": 2.0}),
        ("main-3", {"CPU": 2.0, "GPU": 1.0}),
    ]


def test_a_replica_has_its_backend_alone_and_no_keys() -> None:
    whole = config(EMBEDDED, EMBEDDED, access={"keys": [KEY]})
    first, second = (engine.alone(whole) for engine in engines_of(whole))
    assert first.access.keys == ()
    assert [entry.name for entry in first.pools["main"].backends] == ["main-1"]
    assert [entry.name for entry in second.pools["main"].backends] == ["main-2"]
    assert first.models_of("main") == ["m"]


def test_a_tensor_parallel_artifact_takes_its_gpus(tiny_model: Path, tmp_path: Path) -> None:
    with write_artifact(tmp_path / "checkpoint") as writer:
        model, recipe = ModelIdentity.of(Checkpoint.open(tiny_model)), Recipe.load("fp8")
        manifest = Manifest(kind="checkpoint", model=model, recipe=recipe, software=software())
        writer.finish(manifest.model_copy(update={"details": {"tensor_parallel": 2}}))
    backend = {"type": "vllm", "artifact": tmp_path / "checkpoint"}
    (engine,) = engines_of(config(backend))
    assert engine.needs["GPU"] == 2
    few = config(backend, ray={"engines": {"main": {"gpus": 1}}})
    assert list(problems(few)) == [
        "ray.engines.main.gpus: is 1, and the artifact was exported for tensor parallelism 2"
    ]
    assert list(problems(config(backend, ray={"engines": {"main": {"gpus": 0}}}))) == []


SHARED = {"url": "redis://127.0.0.1", "replicas": 1}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"access": {"usage_file": "usage"}}, "access.usage_file: replicas share no file"),
        (
            {"access": {"keys": [KEY]}, "ray": {"gateways": 2}},
            "access.shared: missing: each of 2 gateways (ray.gateways) would give a key",
        ),
        (
            {"access": {"shared": SHARED}, "ray": {"gateways": 2}},
            "access.shared.replicas: is 1; count all 2 gateways",
        ),
        ({"admin": {"port": 1}}, "admin.port: replicas of one machine cannot share a port"),
        ({"ray": {"engines": {"mian": {}}}}, "ray.engines.mian: no pool of that name"),
    ],
)
def test_what_ray_cannot_serve_is_named(fields: dict[str, Any], problem: str) -> None:
    (found,) = problems(config(**fields))
    assert found.startswith(problem)


def test_pools_that_start_one_at_a_time_are_refused() -> None:
    pools = {"a": {"backends": [EMBEDDED]}, "b": {"backends": [EMBEDDED]}}
    model = {"pool": "a", "fallback": ["b"], "one_at_a_time": True}
    found = problems(GatewayConfig.model_validate({"models": {"m": model}, "pools": pools}))
    assert [line.partition(":")[0] for line in found] == ["pool a", "pool b"]


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_replicas is 1, and min_replicas 2"):
        config(ray={"engines": {"main": {"min_replicas": 2}}})


def node(**resources: float) -> dict[str, Any]:
    return {"Alive": True, "Resources": resources}


def test_replicas_that_no_machine_can_hold_are_refused() -> None:
    two = config(ray={"engines": {"main": {"gpus": 2}}})
    require_resources(two, [node(CPU=8, GPU=2)])
    apart = [node(CPU=8, GPU=1), node(CPU=8, GPU=1), {"Alive": False, "Resources": {"GPU": 8}}]
    with pytest.raises(ConfigError, match="main-1: a replica needs 1 CPU, 2 GPU on one machine"):
        require_resources(two, apart)


def test_more_replicas_than_the_cluster_holds_are_refused() -> None:
    many = config(ray={"engines": {"main": {"min_replicas": 3, "max_replicas": 9}}})
    require_resources(many, [node(CPU=2), node(CPU=2)])
    with pytest.raises(ConfigError, match="the fewest replicas need 4 CPU, and the cluster has 3"):
        require_resources(many, [node(CPU=1), node(CPU=2)])
