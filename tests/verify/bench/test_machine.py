"""Tests what is measured of this machine and read from a server, and what stays unknown."""

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from verify.bench.machine import Gpu, Watch, is_local, kv_capacity, watched

PAGE = b"""vllm:num_requests_running{engine="0"} 0.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="%s"} 1.0
"""


@pytest.fixture
def page() -> Iterator[Any]:
    """Serves `content` as /metrics."""
    state = SimpleNamespace(content=PAGE % b"100", url="")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(state.content)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield state
        server.shutdown()
        thread.join()


def test_the_capacity_is_that_of_the_metrics(page: Any) -> None:
    assert kv_capacity(page.url, None) == 1600
    page.content = PAGE % b"None"
    assert kv_capacity(page.url, None) is None
    page.content = b"up 1\n"
    assert kv_capacity(page.url, "secret") is None
    assert kv_capacity("http://127.0.0.1:9", None) is None


def test_only_the_time_of_the_load_counts() -> None:
    watch = Watch([(1.0, 0, 10, 900_000), (2.0, 0, 30, 100_000), (3.0, 0, 20, 300_000)])
    assert watch.between(1.5, 3.5) == [Gpu(0, 30, 200.0)]
    assert watch.between(4.0, 5.0) is None
    assert Watch([(1.0, 1, 5, None)]).between(0.0, 2.0) == [Gpu(1, 5, None)]


def test_gpus_are_sampled_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=100 + handle),
        nvmlDeviceGetPowerUsage=lambda handle: 250_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    start = time.time()
    with watched() as watch:
        assert watch is not None
        while len(watch.samples) < 4:
            time.sleep(0.01)
    assert watch.between(start, time.time()) == [Gpu(0, 100, 250.0), Gpu(1, 101, 250.0)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # another user has GPU 0
    with watched() as watch:
        assert watch is not None
        while len(watch.samples) < 4:
            time.sleep(0.01)
    assert watch.between(start, time.time()) == [Gpu(1, 101, 250.0)]


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with watched() as watch:
        assert watch is None


def test_only_servers_of_this_machine_use_its_gpus() -> None:
    assert is_local("http://127.0.0.1:8000") and is_local("http://localhost:1")
    assert not is_local("http://10.0.0.7:8000") and not is_local("https://example.com")
