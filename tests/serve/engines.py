"""Engine directories for `FakeTensorRT`: the graph that build-engine compiles, in FLOAT."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from export.onnx.tensorrt_decoder import build_engine_graph
from export.source import Source
from octet.artifacts.manifest import MANIFEST_FILE, ArtifactWriter, Manifest, write_artifact
from octet.model.spec import ModelSpec
from octet.recipe import KvCacheDtype
from serve.tensorrt import kernels
from tests.serve.fake_gpu import FakeGpu, fake_code
from tests.serve.fake_tensorrt import VERSION, FakeTensorRT, plan_of

__all__ = ["Engines", "install", "make_engine", "rewritten"]

Engines = Callable[[str], Path]  # the engine with a given cache


def make_engine(
    calibration: Path,
    out: Path,
    *,
    batch: int = 8,
    prompt: int = 256,
    context: int | None = None,
    logits: int = 128,
    kv_cache: KvCacheDtype | None = None,
    without: str | None = None,
    **details: Any,
) -> Path:
    """Writes `out`, with a plan of these limits; `details` replace some of the manifest's.

    `without` drops an output.
    """
    source = Source.open(calibration, kv_cache=kv_cache)
    longest = context or source.spec.max_positions
    profiles = {
        "prefill": (1, prompt, longest, logits),
        "decode": (batch, 1, longest, 1),
    }
    with write_artifact(out) as writer:
        source.copy_side_files(writer.path)
        scratch = writer.path / "onnx"
        scratch.mkdir()
        path = build_engine_graph(source, TensorProto.FLOAT).save(scratch)
        model = onnx.load(path)
        for output in [item for item in model.graph.output if item.name == without]:
            model.graph.output.remove(output)
        for file in scratch.iterdir():
            file.unlink()
        scratch.rmdir()
        shapes = {name: _profile(source.spec, largest) for name, largest in profiles.items()}
        (writer.path / "model.plan").write_bytes(plan_of(model, shapes))
        described = {
            "targets": ["sm89"],
            "builder": {"name": "TensorRT", "version": VERSION},
            "kv_cache": {"dtype": source.kv_cache},
        }
        writer.finish(source.manifest("engine", described | details))
    return out


def rewritten(directory: Path, **details: Any) -> Path:
    """`directory`, its manifest anew over the files as they are; `details` replace some."""
    manifest = Manifest.load(directory, verify=False)
    (directory / MANIFEST_FILE).unlink()
    changed = manifest.model_copy(update={"details": manifest.details | details})
    ArtifactWriter(directory).finish(changed)
    return directory


def install(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, version: str = VERSION) -> None:
    """Makes this machine one with `gpu` and TensorRT."""
    bindings = ModuleType("cuda.bindings")
    bindings.runtime = bindings.driver = gpu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRT(gpu, version))
    monkeypatch.setattr(kernels, "compile_kernels", fake_code)


def _profile(spec: ModelSpec, largest: tuple[int, int, int, int]) -> Any:
    batch, tokens, cached, logits = largest

    def shapes(b: int, t: int, s: int, n: int) -> dict[str, tuple[int, ...]]:
        cache = (b, spec.kv_heads, s, spec.head_dim)
        return {
            "input_ids": (b, t),
            "position_ids": (b, t),
            "attention_mask": (b, 1, t, s + t),
            "logit_positions": (b, n),
            **{
                f"past_key_values.{index}.{kind}": cache
                for index in range(spec.layers)
                for kind in ("key", "value")
            },
        }

    low, high = shapes(1, 1, 0, 1), shapes(batch, tokens, cached, logits)
    usual = shapes(1, 64, 0, 1) if tokens > 1 else shapes(4, 1, 128, 1)
    return {name: (low[name], usual[name], high[name]) for name in low}
