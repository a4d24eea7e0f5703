"""Starts the gateways that Octet's is compared with, each in its own virtual environment.

    python benchmarks/gateway_peers.py build [NAME ...] [--python python3.12]

installs the pins of benchmarks/requirements-NAME.txt into .peers/NAME (about 1 GB in all).
Every gateway is started as its documentation says it is fastest, with one worker.
"""

import argparse
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway_mock import MODEL

from octet import __version__

__all__ = ["GATEWAYS", "KEY", "Gateway", "chosen", "free_port", "version"]

HERE = Path(__file__).parent
PEERS = HERE.parent / ".peers"
KEY = "sk-" + hashlib.sha256(b"the key of the gateway benchmarks").hexdigest()
# vLLM production-stack's router is on GitHub alone: PyPI's vllm-router is another program.
SOURCE = "vllm-router @ git+https://github.com/vllm-project/production-stack@vllm-stack-0.1.12"


@dataclass(frozen=True)
class Gateway:
    """One program in one configuration.

    `command` makes its configuration in a directory and returns what to run, given the base URLs
    of two upstreams, which are the same, and the port to listen on.
    """

    name: str
    command: Callable[[list[str], int, Path], list[str]]
    distribution: str = "octet"  # whose version is reported
    peer: str | None = None  # the environment's name; None: this interpreter's
    environment: dict[str, str] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(peer: str, name: str) -> str:
    return str(PEERS / peer / "bin" / name)


def bare(upstreams: list[str], port: int, scratch: Path) -> list[str]:
    return [program("bare", "python"), str(HERE / "gateway_bare.py"), upstreams[0], str(port)]


def litellm(upstreams: list[str], port: int, scratch: Path) -> list[str]:
    """Without a database, so that it has no spend to track; Granian was faster than uvicorn."""
    parameters = {"model": f"openai/{MODEL}", "api_base": f"{upstreams[0]}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
        "litellm_settings": {"set_verbose": False, "telemetry": False},
        "general_settings": {"master_key": KEY},
    }
    file = scratch / "litellm.yaml"
    file.write_text(json.dumps(config))
    options = ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1", "--run_granian"]
    return [program("litellm", "litellm"), "--config", str(file), *options]


def production_stack(upstreams: list[str], port: int, scratch: Path) -> list[str]:
    return [
        program("production-stack", "vllm-router"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
        *("--service-discovery", "static", "--static-backends", ",".join(upstreams)),
        *("--static-models", ",".join(MODEL for _ in upstreams), "--routing-logic", "roundrobin"),
    ]


def rust_router(upstreams: list[str], port: int, scratch: Path) -> list[str]:
    """Returns the command of the router in Rust: vllm-project/router, not production-stack's."""
    return [
        program("vllm-router", "vllm-router"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
        *("--worker-urls", *upstreams, "--policy", "round_robin"),
        *("--prometheus-port", str(free_port())),
    ]


def octet(access_log: bool) -> Callable[[list[str], int, Path], list[str]]:
    """Everything on: keys with rates and quotas, admission by tokens, health, breaker, metrics."""

    def command(upstreams: list[str], port: int, scratch: Path) -> list[str]:
        key: dict[str, Any] = {
            "name": "benchmark",
            "sha256": hashlib.sha256(KEY.encode()).hexdigest(),
            "models": [MODEL],
            "requests_per_minute": 10**9,
            "tokens_per_minute": 10**12,
            "tokens_per_day": 10**14,
            "max_in_flight": 4096,
        }
        backends = [
            {"type": "vllm", "name": f"vllm-{i}", "url": url} for i, url in enumerate(upstreams)
        ]
        pool = {
            "backends": backends,
            "precision": "fp8",
            "routing": {"policy": "least_tokens"},
            "admission": {"max_tokens": 10**6},
        }
        config = {
            "access": {"keys": [key]},
            "logs": {"format": "json", "access": access_log},
            "pools": {"main": pool},
            "models": {MODEL: {"pool": "main"}},
        }
        file = scratch / "octet.yaml"
        file.write_text(json.dumps(config))
        return [
            *(sys.executable, "-m", "octet_cli.main", "serve"),
            *("--config", str(file), "--port", str(port)),
        ]

    return command


LITELLM = {
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks GitHub for prices as it starts
}
GATEWAYS = {
    gateway.name: gateway
    for gateway in (
        Gateway("bare", bare, "aiohttp", "bare"),
        Gateway("octet", octet(access_log=False)),
        Gateway("octet, access log", octet(access_log=True)),
        Gateway("production-stack", production_stack, "vllm-router", "production-stack"),
        Gateway("litellm", litellm, "litellm", "litellm", LITELLM),
        Gateway("router in Rust", rust_router, "vllm-router", "vllm-router"),
    )
}


def chosen(names: list[str]) -> list[Gateway]:
    """Returns the gateways in `names`; their environments must have been built."""
    gateways = [GATEWAYS[name] for name in names]
    if missing := {g.peer for g in gateways if g.peer and not (PEERS / g.peer).exists()}:
        raise SystemExit(f"not built: {', '.join(sorted(missing))}; see gateway_peers.py")
    return gateways


def version(gateway: Gateway) -> str:
    """Returns a version such as "litellm 1.106.2", and that of its Python."""
    if gateway.peer is None:
        return f"octet {__version__} on Python {platform.python_version()}"
    code = (
        "import platform; from importlib.metadata import version; "
        f"print(version({gateway.distribution!r}), 'on Python', platform.python_version())"
    )
    done = subprocess.run(
        [program(gateway.peer, "python"), "-c", code], capture_output=True, text=True, check=True
    )
    return f"{gateway.name}: {gateway.distribution} {done.stdout.strip()}"


def build(name: str, python: str, production_stack: str) -> None:
    """A fresh .peers/NAME with exactly the pins: nothing is resolved."""
    wanted = (HERE / f"requirements-{name}.txt").read_text().splitlines()
    requirements = [line for line in wanted if line and not line.startswith("#")]
    if name == "production-stack":
        requirements.append(production_stack)
    subprocess.run([python, "-m", "venv", "--clear", str(PEERS / name)], check=True)
    install = [program(name, "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, *requirements], check=True)


def main() -> None:
    peers = sorted({gateway.peer for gateway in GATEWAYS.values() if gateway.peer})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["build"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(peers))
    parser.add_argument("--python", default=sys.executable, help="3.12 or later, for the peers")
    parser.add_argument(
        "--production-stack", default=SOURCE, help="what pip installs; or the path of a clone"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(peers):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(peers)}")
    is_old = "import sys; sys.exit(sys.version_info < (3, 12))"
    if subprocess.run([options.python, "-c", is_old], check=False).returncode:
        parser.error(f"{options.python} is older than production-stack wants; give --python")
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    for name in options.names or peers:
        print(f"building {PEERS / name}", flush=True)
        build(name, options.python, options.production_stack)


if __name__ == "__main__":
    main()
