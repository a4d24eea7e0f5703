"""What vLLM's plugin entry point does, where the backend cannot work."""

import logging
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch

from serve import vllm_attention


def of_version(version: str) -> SimpleNamespace:
    return SimpleNamespace(__version__=version)


def test_that_vllm_finds_the_entry_point() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="octet")
    assert entry.load() is vllm_attention.register


def test_that_a_build_without_cuda_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setitem(sys.modules, "vllm", of_version("0.24.0"))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    vllm_attention.register()  # would raise ImportError


def test_that_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "vllm", of_version("0.31.0"))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    with caplog.at_level(logging.INFO, "vllm.octet"):
        vllm_attention.register()
    assert "vLLM 0.31.0 is not 0.24.x" in caplog.text


@pytest.mark.parametrize("taken", [False, True])
def test_that_another_custom_backend_stays(monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    found = []

    class Backends:
        class CUSTOM:
            @staticmethod
            def is_overridden() -> bool:
                return taken

    registry = SimpleNamespace(
        AttentionBackendEnum=Backends, register_backend=lambda backend, path: found.append(path)
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "vllm", of_version("0.24.0"))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", registry)
    vllm_attention.register()
    assert found == ([] if taken else ["serve.vllm_attention.backend.E5m2Backend"])
