"""Tests what the TensorRT runner refuses, each in one line, and which engines it serves."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octet.artifacts.manifest import MANIFEST_FILE
from octet.errors import ArtifactError, ConfigError, UnsupportedError
from serve.backends.embedded import EmbeddedBackend
from serve.config import EmbeddedConfig
from serve.engine.load import load_runner
from serve.members.factory import make_backend
from serve.runner.onnx import OnnxRunner
from serve.settings import settings_of
from serve.tensorrt import gpu as gpu_module
from serve.tensorrt.runner import TensorRTRunner
from serve.triton_entry import TritonEntry
from tests.fakes import opened
from tests.serve.engines import Engines, install, make_engine, rewritten
from tests.serve.fake_gpu import FakeGpu
from tests.serve.fake_tensorrt import VERSION
from tests.serve.runner.steps import forward, generate, prompt_of
from tests.serve.test_triton_entry import arguments, streamed
from tests.serve.triton_python import PbUtils


@pytest.mark.usefixtures("gpu")
class TestRefusals:
    """Each in one line, and before the plan is read: it is not even there."""

    @pytest.fixture
    def engine(self, engines: Engines, tmp_path: Path) -> Path:
        path = shutil.copytree(engines("e5m2"), tmp_path / "engine")
        (path / "model.plan").unlink()
        return path

    def refused(self, engine: Path, said: str) -> None:
        with pytest.raises(UnsupportedError, match=said) as caught:
            TensorRTRunner(engine)
        assert "\n" not in str(caught.value) and str(engine) in str(caught.value)

    def test_an_engine_of_another_gpu(self, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, FakeGpu((9, 0)))
        self.refused(engine, r"built for sm89, and this GPU is sm90: .*--target sm90")

    def test_an_engine_of_another_version(
        self, engine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(monkeypatch, FakeGpu(), version="10.16.1.11")
        self.refused(
            engine, rf"built by TensorRT {VERSION}, and here is 10\.16\.1\.11.*tensorrt=={VERSION}"
        )

    def test_an_engine_of_the_other_builder(
        self, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
            monkeypatch.setitem(sys.modules, module, None)
        builder = {"name": "TensorRT-RTX", "version": "1.7.1.116"}
        engine = rewritten(shutil.copytree(engines("e5m2"), tmp_path / "rtx"), builder=builder)
        self.refused(engine, r"TensorRT-RTX 1\.7\.1\.116, which is not installed here: pip install")

    def test_a_machine_without_tensorrt(
        self, engine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("tensorrt", "tensorrt_bindings"):
            monkeypatch.setitem(sys.modules, module, None)
        self.refused(engine, rf"which is not installed here: pip install 'tensorrt=={VERSION}'")

    def test_a_machine_without_a_gpu(self, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, FakeGpu(devices=0))
        with pytest.raises(UnsupportedError, match=r"no NVIDIA GPU 0.*cudaErrorNoDevice"):
            TensorRTRunner(engine)

    def test_a_machine_without_cuda_bindings(
        self, engine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def missing() -> None:
            raise UnsupportedError("running an engine needs cuda-bindings")

        monkeypatch.setattr(gpu_module, "_runtime", missing)
        with pytest.raises(UnsupportedError, match="needs cuda-bindings"):
            TensorRTRunner(engine)

    def test_a_plan_that_was_altered(self, engines: Engines, tmp_path: Path) -> None:
        engine = shutil.copytree(engines("e5m2"), tmp_path / "engine")
        with (engine / "model.plan").open("ab") as file:
            file.write(b"x")
        with pytest.raises(ArtifactError, match=r"model\.plan: altered"):
            TensorRTRunner(engine)

    def test_a_plan_that_tensorrt_does_not_take(self, engines: Engines, tmp_path: Path) -> None:
        engine = shutil.copytree(engines("e5m2"), tmp_path / "engine")
        (engine / "model.plan").write_bytes(b"no plan")
        rewritten(engine)
        with pytest.raises(ArtifactError, match=r"does not load it: Error Code 1: the plan is"):
            TensorRTRunner(engine)

    def test_an_engine_of_another_graph(self, engine_calibration: Path, tmp_path: Path) -> None:
        engine = make_engine(engine_calibration, tmp_path / "engine", without="present.1.value")
        with pytest.raises(ArtifactError, match="not those that this release builds"):
            TensorRTRunner(engine)

    def test_more_slots_than_it_decodes_together(self, engines: Engines) -> None:
        runner = TensorRTRunner(engines("e5m2"))
        with pytest.raises(ConfigError, match=r"slots: 9 is more than the 8 .*--max-batch 9"):
            runner.new_cache(9, 64)

    def test_a_longer_context_than_it_was_built_for(
        self, engine_calibration: Path, tmp_path: Path
    ) -> None:
        runner = TensorRTRunner(make_engine(engine_calibration, tmp_path / "engine", context=500))
        assert runner.spec.max_positions == 500
        with pytest.raises(ConfigError, match="1 to 500 tokens"):
            runner.new_cache(1, 501)
        cache = runner.new_cache(1, 500)
        for start in (0, 256, 490):  # up to a window that would not be a multiple of 64
            count = min(256, 490 - start) if start < 490 else 1
            forward(runner, cache, prompt_of(500)[:, start : start + count], [0], [[0]])
        for _ in range(9):
            forward(runner, cache, np.array([[7]]), [0], [[0]])
        assert cache.lengths[0] == 500


@pytest.mark.usefixtures("gpu")
class TestServing:
    def test_octet_serve_takes_an_engine(self, engines: Engines) -> None:
        engine = engines("e5m2")
        ((name, pool),) = settings_of(engine, None).all_pools.items()
        assert name == json.loads((engine / MANIFEST_FILE).read_text())["model"]["name"]
        (backend,) = pool.backends
        assert isinstance(backend, EmbeddedConfig) and backend.path == engine

    def test_octet_serve_takes_no_calibration(self, engine_calibration: Path) -> None:
        with pytest.raises(ConfigError, match="is a calibration; what is served here is"):
            settings_of(engine_calibration, None)

    async def test_the_slots_are_those_that_the_engine_was_built_for(
        self, engines: Engines
    ) -> None:
        async with opened(EmbeddedBackend(engines("e5m2"))) as backend:
            assert backend.stats is not None and backend.stats.slots == 8
            assert len(await generate(backend, (5, 6, 7), 9)) == 9

    async def test_a_configuration_may_ask_for_fewer_and_shorter_ones(
        self, engines: Engines
    ) -> None:
        """Which is what a GPU with too little memory needs."""
        asked = EmbeddedConfig(type="embedded", path=engines("e5m2"), slots=2, context=100)
        async with opened(make_backend("m", asked)) as backend:
            assert backend.context_length == 100 and backend.stats.slots == 2
            assert backend.stats.cache_bytes == 2 * 4 * 2 * 128 * 64

    def test_the_triton_entry_takes_the_engine_of_its_version(
        self, engines: Engines, tmp_path: Path, gpu: FakeGpu
    ) -> None:
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "engine").symlink_to(engines("e5m2"))
        (tmp_path / "1" / "onnx").symlink_to(tmp_path / "nothing")
        gpu.devices = 2
        given = arguments(tmp_path, slots="2", threads="1") | {"model_instance_device_id": "1"}
        entry = TritonEntry.load(given, PbUtils)
        runner = entry._loaded.engine._runner
        assert isinstance(runner, TensorRTRunner) and runner.gpu.index == 1
        requests = [streamed("def f(x):") for _ in range(3)]
        entry.execute(requests)
        first, *others = [request.wait().text for request in requests]
        assert first and others == [first, first]
        entry.close()

    def test_a_runner_is_chosen_by_what_the_directory_holds(
        self, engines: Engines, references: Callable[[str], OnnxRunner], engine_calibration: Path
    ) -> None:
        references("e5m2")
        assert isinstance(load_runner(engines("e5m2")), TensorRTRunner)
        assert isinstance(load_runner(engine_calibration.parent / "e5m2-onnx", 2), OnnxRunner)
        with pytest.raises(ArtifactError, match="is a calibration"):
            load_runner(engine_calibration)
