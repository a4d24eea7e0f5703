"""Backends from their configuration."""

import subprocess
import sys

import pytest

from octet.errors import OctetError
from serve.config import TritonConfig
from serve.members.factory import make_backend


def test_client_libraries_are_loaded_only_for_their_backends() -> None:
    code = (
        "import sys, serve.routing; from serve.config import HttpConfig;"
        "from serve.members.factory import make_backend;"
        "before = {m.partition('.')[0] for m in sys.modules};"
        "make_backend('m', HttpConfig(type='vllm', url='http://h'));"
        "after = {m.partition('.')[0] for m in sys.modules};"
        "print(*sorted(before)); print(*sorted(after - before))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    before, after = output.stdout.decode().splitlines()
    assert not {"aiohttp", "grpc", "tritonclient", "onnxruntime"} & set(before.split())
    assert "aiohttp" in after.split()
    assert not {"grpc", "tritonclient", "onnxruntime"} & set(after.split())


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "serve.backends.triton_grpc", None)
    with pytest.raises(OctetError, match=r"pip install 'octet-llm\[serve\]'"):
        make_backend("m", TritonConfig(type="triton", url="h:8001"))
