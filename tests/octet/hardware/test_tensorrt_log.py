"""TensorRT's one logger in a process, which building and serving share."""

from pathlib import Path

import pytest

import export.engine.builder
import serve.tensorrt.library
from octet.errors import ArtifactError, ExportError
from octet.hardware.tensorrt_log import logger
from tests.export import fake_tensorrt as builders
from tests.serve.fake_gpu import FakeGpu
from tests.serve.fake_tensorrt import FakeTensorRT, ILogger


def test_building_and_serving_have_the_same(tmp_path: Path) -> None:
    trt = FakeTensorRT(FakeGpu())
    log = export.engine.builder.logger(trt)
    log.log(ILogger.ERROR, "of an earlier build")
    (tmp_path / "plan").write_bytes(b"not a plan")
    with pytest.raises(ArtifactError, match=r"not load it: Error Code 1: the plan is damaged$"):
        serve.tensorrt.library.load_engine(trt, tmp_path / "plan")
    assert log.errors == ["Error Code 1:\nthe plan is damaged"]


def test_it_tells_errors_from_what_sounds_like_one() -> None:
    log = logger(builders)
    log.clear()
    assert log.reason == "it does not say why"
    log.log(ILogger.WARNING, "slow")
    log.log(ILogger.ERROR, "Skipping tactic 0x0")
    log.check("TensorRT")
    log.log(ILogger.INTERNAL_ERROR, "no\nkernel")
    log.log(ILogger.ERROR, "so nothing")
    with pytest.raises(ExportError, match=r"^TensorRT refuses the graph: no kernel$"):
        log.check("TensorRT")
    log.clear()
    log.log(ILogger.INFO, "Total Activation Memory: 4096 bytes")
    log.log(ILogger.VERBOSE, "Unused Input: mask")
    assert log.scratch_bytes == 4096
    with pytest.raises(ExportError, match="drop a part of the graph: Unused Input: mask"):
        log.check("TensorRT")
    log.clear()
