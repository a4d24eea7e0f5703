"""docker-compose.yml: valid by the Compose specification, and what no schema can say.

No image is pulled and nothing is started here: `make compose-test` does that (tests/compose).
"""

import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from octet_cli.main import app
from tests.deploy.conftest import DEPLOY, ROOT

Services = dict[str, dict[str, Any]]
COMPOSE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(?P<name>[A-Z0-9_]+)(?::?-(?P<default>[^}]*))?\}")
# Where `make demo` and the commands at the top of docker-compose.yml put what they write.
WRITTEN = {"./out/demo/onnx", "./out/demo/checkpoint", "./out/demo/triton_models"}


def filled_in(text: str) -> str:
    """`text` with the default of each variable."""
    return VARIABLE.sub(lambda match: match["default"] or "", text)


def bind_mounts(service: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Source, target and mode of each directory or file of the host."""
    mounts = [volume for volume in service.get("volumes", ()) if isinstance(volume, dict)]
    return [
        (filled_in(m["source"]), m["target"], "ro" if m.get("read_only") else "rw") for m in mounts
    ]


def health_command(service: dict[str, Any]) -> list[str]:
    command: list[str] = service["healthcheck"]["test"]
    return command


def check_jsonschema(path: Path) -> subprocess.CompletedProcess[str]:
    """Validates by the Compose specification's JSON schema, which check-jsonschema comes with."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*command, path], capture_output=True, text=True, timeout=600)


def test_the_compose_specification() -> None:
    done = check_jsonschema(COMPOSE)
    assert done.returncode == 0, done.stdout


def test_a_misspelled_key_would_be_found(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(COMPOSE.read_text().replace("healthcheck:", "health_check:"))
    assert check_jsonschema(broken).returncode != 0


def test_every_mounted_file_exists(services: Services) -> None:
    for name, service in services.items():
        for source, _, _ in bind_mounts(service):
            assert source in WRITTEN or (ROOT / source).exists(), (name, source)


def test_what_the_host_has_is_not_written(services: Services) -> None:
    for name, service in services.items():
        for source, _, mode in bind_mounts(service):
            assert mode == "ro", (name, source)


def test_a_mistyped_path_is_an_error_and_no_directory_of_roots(services: Services) -> None:
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            if isinstance(volume, dict):
                assert volume["type"] == "bind", name
                assert volume["bind"] == {"create_host_path": False}, name
            else:  # a volume of Docker's own
                assert not volume.startswith((".", "/", "$")), (name, volume)


def test_the_commands_in_its_head_write_what_is_mounted() -> None:
    head = COMPOSE.read_text().partition("name: octet")[0]
    demo = (ROOT / "examples" / "demo.py").read_text()
    assert 'default=Path("out/demo")' in demo
    assert all(f'"{kind}"' in demo for kind in ("onnx", "checkpoint"))
    (triton,) = re.findall(r"octet export triton .*", head)
    assert "-o out/demo/triton_models/python-lm" in triton


def test_named_volumes_networks_and_secrets_are_declared(compose: Any, services: Services) -> None:
    declared: dict[str, set[str]] = {
        kind: set(compose.get(kind, ())) for kind in ("volumes", "networks", "secrets")
    }
    used: dict[str, set[str]] = {kind: set() for kind in declared}
    for service in services.values():
        named = [volume for volume in service.get("volumes", ()) if isinstance(volume, str)]
        used["volumes"] |= {volume.split(":")[0] for volume in named}
        used["networks"] |= set(service.get("networks", ()))
        used["secrets"] |= set(service.get("secrets", ()))
    assert used == declared


def test_images_are_of_one_version(services: Services) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, service in services.items():
        image, _, tag = service["image"].rpartition(":")
        assert image and re.fullmatch(r"v?\d+\.\d+\.\d+", tag), (name, service["image"])
        if "build" in service:
            assert tag == project["version"], name
            build = service["build"]
            assert (ROOT / build["context"] / build["dockerfile"]).is_file()


def test_what_one_waits_for_runs_too_and_says_when_it_is_healthy(services: Services) -> None:
    for name, service in services.items():
        assert service["profiles"], f"{name} would start in every profile"
        for other, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}, (name, other)
            assert set(service["profiles"]) <= set(services[other]["profiles"]), (name, other)
            assert "healthcheck" in services[other], (name, other)


def test_the_start_has_an_order(services: Services) -> None:
    """Servers, then the gateway; Prometheus, then Grafana. Nobody waits for himself."""
    waits = {name: set(service.get("depends_on", ())) for name, service in services.items()}
    assert waits["gateway-gpu"] == {"vllm", "triton"}
    assert waits["grafana"] == {"prometheus"}
    started: set[str] = set()
    while waits:
        ready = {name for name, others in waits.items() if others <= started}
        assert ready, f"a circle: {waits}"
        started |= ready
        waits = {name: others for name, others in waits.items() if name not in ready}


@pytest.mark.parametrize("profile", ["cpu", "gpu", "monitoring"])
def test_profiles(services: Services, profile: str) -> None:
    expected = {
        "cpu": {"gateway-cpu"},
        "gpu": {"gateway-gpu", "vllm", "triton", "prometheus", "grafana"},
        "monitoring": {"prometheus", "grafana"},
    }
    assert {n for n, s in services.items() if profile in s["profiles"]} == expected[profile]


def test_no_two_services_of_a_profile_publish_one_port(services: Services) -> None:
    for (one, first), (two, second) in itertools.combinations(services.items(), 2):
        if not set(first["profiles"]) & set(second["profiles"]):
            continue
        both = [
            {filled_in(p).rsplit(":", 1)[0] for p in s.get("ports", ())} for s in (first, second)
        ]
        assert not both[0] & both[1], (one, two)


def test_ports_are_published_to_this_machine_alone(services: Services) -> None:
    """Whoever wants the world to reach the gateway puts TLS in front of it."""
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), (name, port)


def test_the_servers_are_on_an_internal_network(compose: Any, services: Services) -> None:
    assert compose["networks"]["back"]["internal"] is True
    for name in ("vllm", "triton"):
        assert services[name]["networks"] == ["back"]
        assert "ports" not in services[name]
    assert "back" in services["gateway-gpu"]["networks"]


def test_health_checks_use_what_the_image_has(services: Services) -> None:
    """Python: our own image, vLLM's, and Triton's with the Python backend. busybox's wget:
    Prometheus' image, which is built on busybox, and Grafana's on Alpine."""
    tools = {name: health_command(service)[1] for name, service in services.items()}
    assert tools == {
        "gateway-cpu": "python",
        "gateway-gpu": "python",
        "vllm": "python3",
        "triton": "python3",
        "prometheus": "wget",
        "grafana": "wget",
    }


def test_health_checks_ask_the_port_that_is_listened_on(services: Services) -> None:
    ports = {"prometheus": 9090, "grafana": 3000}
    for name, service in services.items():
        (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)/", " ".join(health_command(service)))
        assert int(url) == ports.get(name, 8000), name


def test_python_health_checks_compile(services: Services) -> None:
    for service in services.values():
        if "-c" in health_command(service):
            compile(health_command(service)[-1], "healthcheck", "exec")


def test_gpus_are_reserved_where_they_are_needed(services: Services) -> None:
    for name, service in services.items():
        devices = service.get("deploy", {}).get("resources", {}).get("reservations", {})
        assert bool(devices.get("devices")) == (name in ("vllm", "triton")), name
        for device in devices.get("devices", ()):
            assert device["capabilities"] == ["gpu"]
            assert device["driver"] == "nvidia"


def test_vllm_is_told_of_the_cache(services: Services) -> None:
    """0.24 serves E5M2 over FP8 weights, by FlashInfer alone (docs/compatibility.md)."""
    assert services["vllm"]["image"] == "vllm/vllm-openai:v0.24.0"
    assert "--kv-cache-dtype=fp8_e5m2" in services["vllm"]["command"]
    assert "--attention-backend=FLASHINFER" in services["vllm"]["command"]


def test_the_gateway_cannot_write(services: Services) -> None:
    for name in ("gateway-cpu", "gateway-gpu"):
        assert services[name]["read_only"] is True
        assert services[name]["tmpfs"] == ["/tmp:size=16m"]  # it would count as memory


@pytest.mark.parametrize("name", ["Dockerfile", "triton.Dockerfile"])
def test_our_images_do_not_run_as_root(name: str) -> None:
    users = re.findall(r"^USER (\S+)$", (DEPLOY / name).read_text(), re.M)
    assert users and all(int(user.split(":")[0]) > 0 for user in users)


def test_no_service_keeps_a_capability(services: Services) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "cap_add" not in service and not service.get("privileged"), name


def test_no_secret_is_in_the_file(services: Services) -> None:
    for name, service in services.items():
        for key, value in service.get("environment", {}).items():
            if re.search("KEY|PASSWORD|SECRET|TOKEN", key) and not key.endswith("__FILE"):
                assert VARIABLE.fullmatch(str(value)), (name, key)


def test_a_profile_needs_no_variable_of_another_one() -> None:
    """Compose fills in every service, those of other profiles too."""
    required = re.findall(r"\$\{[A-Z_0-9]+:?\?", COMPOSE.read_text())
    assert required == []


def commands() -> list[list[str]]:
    """Every `octet` command: in services, Dockerfiles and comments."""
    compose = COMPOSE.read_text()
    found = [shlex.split(line)[1:] for line in re.findall(r"^#   (octet .*)$", compose, re.M)]
    found += [
        match.split(", ") for match in re.findall(r"^  command: \[(serve.*)\]$", compose, re.M)
    ]
    (docker,) = re.findall(r"^CMD \[(.*)\]$", (DEPLOY / "Dockerfile").read_text(), re.M)
    return [*found, [word.strip('" ') for word in docker.split(",")], ["keys", "new", "default"]]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_our_own_commands_parse(words: list[str]) -> None:
    """Their flags exist; nothing is run."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context("octet", list(words))


def test_every_command_was_found() -> None:
    assert {words[0] for words in commands()} == {"export", "serve", "keys"}
