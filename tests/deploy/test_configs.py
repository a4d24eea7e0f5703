"""The gateway's, Prometheus' and Grafana's configuration files, and the images' recipes."""

import re
import sys
import tomllib
from asyncio.subprocess import PIPE, create_subprocess_exec
from pathlib import Path
from typing import Any

import pytest
import yaml

from octet.errors import ConfigError
from serve.config import EmbeddedConfig, GatewayConfig, HttpConfig, TritonConfig
from serve.config.checks import load_config
from tests.deploy.conftest import DEPLOY, ROOT
from tests.fakes import FakeRunner, fake_backend
from tests.serve.conftest import serving

Services = dict[str, dict[str, Any]]


@pytest.fixture
def cpu() -> GatewayConfig:
    return load_config(DEPLOY / "gateway-cpu.yaml")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GatewayConfig:
    monkeypatch.setenv("OCTET_KEY_SHA256", "0" * 64)
    return load_config(DEPLOY / "gateway-gpu.yaml")


def mounted(service: dict[str, Any]) -> dict[str, str]:
    """Source by target, variables and all."""
    volumes = service.get("volumes", ())
    return {volume["target"]: volume["source"] for volume in volumes if isinstance(volume, dict)}


def names_on_networks(services: Services) -> set[str]:
    """What a container can be called by the others."""
    names = set(services)
    for service in services.values():
        networks = service["networks"]
        for settings in networks.values() if isinstance(networks, dict) else ():
            names |= set((settings or {}).get("aliases", ()))
    return names


def test_the_gateways_configurations_are_mounted(services: Services) -> None:
    for profile in ("cpu", "gpu"):
        source = mounted(services[f"gateway-{profile}"])["/etc/octet/gateway.yaml"]
        assert source == f"./deploy/gateway-{profile}.yaml"


def test_what_the_gateways_read_is_mounted(
    services: Services, cpu: GatewayConfig, gpu: GatewayConfig
) -> None:
    (embedded,) = cpu.all_pools["python-lm"].backends
    assert isinstance(embedded, EmbeddedConfig)
    assert str(embedded.path) in mounted(services["gateway-cpu"])
    (triton,) = gpu.pools["triton"].backends
    assert isinstance(triton, TritonConfig)
    assert str(triton.tokenizer) in mounted(services["gateway-gpu"])


def test_the_gateways_listen_where_they_are_published(
    services: Services, cpu: GatewayConfig, gpu: GatewayConfig
) -> None:
    for name, config in (("gateway-cpu", cpu), ("gateway-gpu", gpu)):
        (port,) = services[name]["ports"]
        assert config.listen.host == "0.0.0.0"
        assert port.rsplit(":", 1)[1] == str(config.listen.port)


def test_the_gateway_asks_servers_that_are_there(services: Services, gpu: GatewayConfig) -> None:
    (vllm,) = gpu.pools["vllm"].backends
    assert isinstance(vllm, HttpConfig)
    host, _, port = vllm.url.removeprefix("http://").partition(":")
    assert host in services
    command = services[host]["command"]
    assert f"--port={port}" in command
    # A model without a name of its own is asked for by the public one.
    assert f"--served-model-name={vllm.model or 'python-lm'}" in command
    (triton,) = gpu.pools["triton"].backends
    assert isinstance(triton, TritonConfig)
    assert triton.url.split(":") == ["triton", "8001"]  # Triton's own port for gRPC
    assert "--load-model=${TRITON_MODEL:-python-lm}" in services["triton"]["command"]


def test_without_a_key_the_gateway_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """docker-compose.yml fills in nothing for a variable that is not set."""
    monkeypatch.setenv("OCTET_KEY_SHA256", "")
    with pytest.raises(ConfigError, match="sha256"):
        load_config(DEPLOY / "gateway-gpu.yaml")


async def test_the_health_check_tells_ready_from_not_ready(services: Services) -> None:
    """The very code of docker-compose.yml, which is the Dockerfile's too."""
    *_, code = services["gateway-cpu"]["healthcheck"]["test"]
    assert code in (DEPLOY / "Dockerfile").read_text()

    async def check(url: str) -> tuple[int | None, bytes]:
        here = code.replace("http://127.0.0.1:8000", url)
        process = await create_subprocess_exec(sys.executable, "-c", here, stderr=PIPE)
        _, errors = await process.communicate()
        return process.returncode, errors

    async with serving(("fake", [fake_backend(FakeRunner())])) as served:
        assert (await check(served.url))[0] == 0
        served.gateway.pools["fake"].members[0].breaker.trip()
        status, errors = await check(served.url)
        assert status != 0
        assert b"503" in errors


def test_prometheus_asks_services_on_their_ports(services: Services) -> None:
    scrapes = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    targets = [t for job in scrapes for static in job["static_configs"] for t in static["targets"]]
    assert targets == ["gateway:8000", "vllm:8000", "triton:8002"]
    assert {target.split(":")[0] for target in targets} <= names_on_networks(services)
    reached = set(services["prometheus"]["networks"])
    assert reached == {"front", "back"}
    config = mounted(services["prometheus"])["/etc/prometheus/prometheus.yml"]
    assert config == "./deploy/prometheus.yml"


def test_grafana_finds_prometheus_and_the_dashboard(services: Services) -> None:
    (source,) = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert set(services["grafana"]["networks"]) & set(services["prometheus"]["networks"])
    (provider,) = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/dashboards/octet.yml").read_text()
    )["providers"]
    mounts = mounted(services["grafana"])
    assert mounts["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    assert mounts[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (DEPLOY / "grafana/dashboards" / home.name).is_file()


@pytest.mark.parametrize("name", ["Dockerfile", "triton.Dockerfile"])
def test_images_are_built_of_what_the_context_holds(name: str) -> None:
    text = (DEPLOY / name).read_text()
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M)
              for word in line.split()[:-1]]  # fmt: skip
    allowed = {line.lstrip("!").removesuffix("/**")
               for line in (ROOT / ".dockerignore").read_text().splitlines()
               if line.startswith("!")}  # fmt: skip
    assert set(copied) <= allowed
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {entry.split(".")[0] for entry in
                project["tool"]["setuptools"]["packages"]["find"]["include"]}  # fmt: skip
    assert packages <= set(copied)
    extras = {extra for group in re.findall(r"'\.\[([a-z,-]+)\]'", text)
              for extra in group.split(",")}  # fmt: skip
    assert extras and extras <= set(project["project"]["optional-dependencies"])
    assert "-c constraints.txt" in text  # what the tests ran with
    assert not re.search(r":latest\b", text)
    for image in re.findall(r"^FROM (\S+)", text, re.M):
        assert re.search(r":\d+\.\d+\.\d+-|:\d\d\.\d\d-", image), f"{image}: no exact version"
