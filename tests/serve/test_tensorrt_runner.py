"""The TensorRT runner: the decode loop, its cache on a GPU, and what it refuses.

No GPU and no TensorRT are needed: tests/serve/fake_gpu.py and fake_tensorrt.py stand at their
interfaces and run the engine's own graph with real numbers.
"""

from pathlib import Path

import numpy as np
import pytest

from octet.recipe import Recipe
from serve.onnx_runner import OnnxRunner
from serve.runner import StepBatch
from serve.tensorrt.runner import TensorRTRunner
from tests.serve.engines import install, make_engine
from tests.serve.fake_gpu import FakeGpu


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.export.conftest import make_calibration

    root = tmp_path_factory.mktemp("engine")
    make_calibration(root / "calibration", tiny_model, Recipe.load("fp8-static"))
    return make_engine(root / "calibration", root / "engine")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    install(monkeypatch, gpu)
    return gpu


def test_it(engine: Path, gpu: FakeGpu, exports) -> None:
    runner = TensorRTRunner(engine)
    reference = OnnxRunner(exports["fp8-static"], threads=2)
    ids = np.random.default_rng(0).integers(1, 4096, (1, 300))
    for r in (runner, reference):
        cache = r.new_cache(2, 1024)
        a = r.forward(StepBatch(ids, [0], np.array([[0, 299]])), cache).copy()
        print(a[..., :5])
        for t in range(70):
            b = r.forward(StepBatch(ids[:, t : t + 1], [0], np.array([[0]])), cache).copy()
        print(b[..., :5])
    print(gpu.launches.count("gather"), gpu.launches.count("append"))
