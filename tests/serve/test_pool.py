"""Round robin, and what happens to a backend that just failed."""

import subprocess
import sys
from typing import Any

from serve.config import HttpConfig
from serve.pool import COOL_DOWN_S, Pool, make_backend


class Named:
    def __init__(self, name: str, context_length: int | None = None) -> None:
        self.name = name
        self.context_length = context_length


def pool(count: int = 3) -> tuple[Pool, list[Any], list[float]]:
    backends: list[Any] = [Named("abc"[i]) for i in range(count)]
    now = [0.0]
    return Pool("m", backends, clock=lambda: now[0]), backends, now


def order(pool: Pool) -> str:
    return "".join(backend.name for backend in pool.order())


def test_backends_take_turns_and_each_is_tried() -> None:
    it, _, _ = pool()
    assert [order(it) for _ in range(4)] == ["abc", "bca", "cab", "abc"]


def test_a_backend_that_failed_comes_last_for_a_while() -> None:
    it, backends, now = pool()
    it.failed(backends[0])
    assert [order(it) for _ in range(3)] == ["bca", "bca", "cba"]
    now[0] = COOL_DOWN_S + 1
    assert [order(it) for _ in range(3)] == ["abc", "bca", "cab"]


def test_the_context_is_the_shortest_that_is_known() -> None:
    backends: list[Any] = [Named("a"), Named("b", 100), Named("c", 50)]
    assert Pool("m", backends).context_length == 50
    assert Pool("m", backends[:1]).context_length is None


def test_a_backend_answers_under_its_own_name_unless_told() -> None:
    assert make_backend("m", HttpConfig(type="vllm", url="http://h")).models == ("m",)
    backend: Any = make_backend("m", HttpConfig(type="vllm", url="http://h", model="served"))
    assert backend.served_name == "served"


def test_client_libraries_are_loaded_only_for_their_backends() -> None:
    code = "import sys, serve.server; print(*{m.partition('.')[0] for m in sys.modules})"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert not {"aiohttp", "grpc", "tritonclient", "onnxruntime"} & set(
        output.stdout.decode().split()
    )
