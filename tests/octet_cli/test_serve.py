"""`octet serve MODEL`: what is calibrated and exported before it is served, and what is refused."""

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import octet_cli.serve
import serve.run
import serve.settings
from octet.artifacts.provenance import SampleSet
from octet.errors import ConfigError
from octet.hardware.devices import find_device
from octet.recipe import Recipe
from octet.storage.files import sha256_file
from octet_cli.calibrate import chosen_recipe
from serve.config import EmbeddedConfig, GatewayConfig, ManagedConfig
from serve.vllm.command import Gpu, Installed
from tests.command import octet
from tests.ports import reserved_port
from tests.serve.vllm.exports import write_export

Ran = list[list[str]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> Ran:
    """The commands that are run before serving; each writes what it would, without weights."""
    ran: Ran = []

    def run(*words: Any) -> None:
        ran.append([str(word) for word in words])
        kind = "calibration" if words[0] == "calibrate" else str(words[1])
        details = {"source": str(tiny_model), "target": "onnxruntime", "tensor_parallel": 1}
        given = dict(zip(map(str, words), words[1:], strict=False))
        recipe = chosen_recipe(str(given.get("--recipe", "fp8")), given.get("--kv"), None)
        fields: dict[str, Any] = {"kind": kind, "details": details, "recipe": recipe}
        write_export(Path(str(words[-1])), tiny_model, "m", **fields)

    monkeypatch.setattr(octet_cli.serve, "_octet", run)
    return ran


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[GatewayConfig]:
    """The settings that would be served."""
    served: list[GatewayConfig] = []
    monkeypatch.setattr(serve.run, "run", lambda settings, **_: served.append(settings))
    return served


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets whether this machine has a GPU and vLLM."""

    def vllm(there: bool) -> None:
        def find(**_: Any) -> Installed:
            if not there:
                raise ConfigError("no vLLM")
            return Installed(("vllm",), None)

        found = [Gpu("NVIDIA H100", (9, 0), 80_000, 79_500)] if there else []
        monkeypatch.setattr(serve.settings, "find_vllm", find)
        monkeypatch.setattr(serve.settings, "gpus", lambda: found)

    vllm(False)
    return vllm


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def test_a_model_is_calibrated_and_exported_once(
    ran: Ran,
    served: list[GatewayConfig],
    vllm: Callable[[bool], None],
    tiny_model: Path,
    port: int,
    tmp_path: Path,
) -> None:
    out = tmp_path / "kept"
    words = ("serve", tiny_model, "--samples", "texts.jsonl", "-o", out, "--port", port)
    assert octet(*words).returncode == 0
    calibration = str(out / "calibration")
    calibrate = ["calibrate", str(tiny_model), "--samples", "texts.jsonl", "--recipe", "fp8"]
    assert ran == [
        [*calibrate, "--out", calibration],
        ["export", "onnx", calibration, "--out", str(out / "onnx")],
    ]
    (backend,) = served[-1].all_pools["m"].backends
    assert isinstance(backend, EmbeddedConfig) and backend.path == out / "onnx"
    vllm(True)
    assert octet(*words).returncode == 0
    assert ran[2:] == [["export", "checkpoint", calibration, "--out", str(out / "checkpoint")]]
    (backend,) = served[-1].all_pools["m"].backends
    assert isinstance(backend, ManagedConfig) and backend.artifact == out / "checkpoint"
    for again in (words, ("serve", out), ("serve", tiny_model, "-o", out)):
        assert octet(*again).returncode == 0
    assert len(ran) == 3 and len(served) == 5


@pytest.mark.parametrize(
    ("gpu", "version", "recipe", "kv_cache"),
    [
        ("H100", "0.24.0", "fp8", []),
        ("H100", "0.33.0", "fp8", ["--kv", "e4m3"]),
        ("B200", "0.24.0", "nvfp4", ["--kv", "e4m3"]),
        ("L4", "0.33.0", "fp8", []),
        ("T4", "0.33.0", "fp8", []),  # serves no FP8 cache at all, which the start says
        ("H100", "0.33.0", "own.yaml", []),
    ],
)
def test_the_cache_is_one_that_vllm_has_on_this_gpu(
    ran: Ran,
    served: list[GatewayConfig],
    vllm: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    port: int,
    tmp_path: Path,
    gpu: str,
    version: str,
    recipe: str,
    kv_cache: list[str],
) -> None:
    vllm(True)
    installed = Installed(("vllm",), version)
    monkeypatch.setattr(serve.settings, "find_vllm", lambda **_: installed)
    monkeypatch.setattr(serve.settings, "local_devices", lambda: [find_device(gpu)])
    own = Recipe.load("fp8").model_copy(update={"name": "own"})
    (tmp_path / "own.yaml").write_text(own.model_dump_json())
    name = str(tmp_path / recipe) if recipe.endswith("yaml") else recipe
    words = ("serve", tiny_model, "--samples", "texts.jsonl", "--recipe", name)
    done = octet(*words, "-o", tmp_path / "kept", "--port", port)
    assert done.returncode == 0, done.stderr
    calibrate = ["calibrate", str(tiny_model), "--samples", "texts.jsonl", "--recipe", name]
    assert ran[0] == [*calibrate, *kv_cache, "--out", str(tmp_path / "kept" / "calibration")]
    again = octet(*words, "-o", tmp_path / "kept", "--port", port)
    assert again.returncode == 0, again.stderr
    assert len(ran) == 2 and len(served) == 2


def test_what_is_kept_is_of_this_model_and_recipe(
    ran: Ran, vllm: Callable[[bool], None], tiny_model: Path, tmp_path: Path
) -> None:
    write_export(
        tmp_path / "kept" / "calibration",
        tiny_model,
        "m",
        kind="calibration",
        details={"source": str(tmp_path)},
    )
    done = octet("serve", tiny_model, "--samples", "texts.jsonl", "-o", tmp_path / "kept")
    assert done.returncode == 2 and "name another directory with --out" in done.stderr
    write_export(tmp_path / "export", tiny_model, "m")
    done = octet("serve", tiny_model, "--samples", "texts.jsonl", "-o", tmp_path / "export")
    assert done.returncode == 2 and "is an artifact; name another directory" in done.stderr
    assert not ran


def test_a_model_that_has_changed_is_not_served_as_it_was(
    ran: Ran,
    served: list[GatewayConfig],
    vllm: Callable[[bool], None],
    tiny_model: Path,
    port: int,
    tmp_path: Path,
) -> None:
    model, out, samples = tmp_path / "m", tmp_path / "kept", tmp_path / "texts.jsonl"
    shutil.copytree(tiny_model, model)
    samples.write_text("{}")
    details = {"source": str(model), "target": "onnxruntime", "tensor_parallel": 1}
    samples_of = SampleSet(
        sha256=sha256_file(samples), count=1, tokens=1, max_length=1, batch_size=1
    )
    for kind, set_of in (("calibration", samples_of), ("onnx", None)):
        write_export(out / kind, model, "m", kind=kind, details=details, samples=set_of)
    words = ("serve", model, "--samples", samples, "-o", out, "--port", port)
    weights = model / "model.safetensors"
    later = time.time() + 60
    os.utime(weights, (later, later))  # written again, and the same
    done = octet(*words)
    assert done.returncode == 0 and "warning" not in done.stderr

    samples.write_text("{ }")
    done = octet(*words)
    assert done.returncode == 0 and len(served) == 2
    assert f"warning: {out} was made with other samples than {samples}; name" in done.stderr

    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    os.utime(weights, (later, later))
    done = octet(*words)
    assert done.returncode == 2 and len(served) == 2 and not ran
    assert f"error: {weights}: has changed since {out} was made from it; name" in done.stderr


def test_a_port_in_use_is_refused_before_anything_is_calibrated(
    ran: Ran, vllm: Callable[[bool], None], tiny_model: Path, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = octet(
            *("serve", tiny_model, "--samples", "texts.jsonl", "--port", port),
            *("-o", tmp_path / "kept"),
        )
    assert done.returncode == 2 and not ran
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr


def test_a_python_without_vllm_is_refused_before_anything_is_calibrated(
    ran: Ran, tiny_model: Path, tmp_path: Path
) -> None:
    words = ("serve", tiny_model, "--samples", "texts.jsonl", "-o", tmp_path / "kept")
    done = octet(*words, "--python", tmp_path / "none")
    assert done.returncode == 2 and not ran
    assert f"python {tmp_path}/none: no such program" in done.stderr
