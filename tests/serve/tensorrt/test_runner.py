"""The TensorRT runner: the decode loop over it, its cache on the GPU, and what it refuses.

No GPU and no TensorRT are needed: tests/serve/fake_gpu.py and fake_tensorrt.py stand at their
interfaces, and run the engine's own graph with real numbers. The same tests of its answers run on
the real ones, where they are:

    pytest -m gpu tests/serve/tensorrt/test_runner.py

on a machine with an FP8 GPU and `pip install 'octet-llm[test,tensorrt]'` (or tensorrt-rtx).
"""

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from octet.errors import BackendError, BackendUnavailable, ConfigError, UnsupportedError
from octet.hardware.tensorrt_log import logger
from serve.backends.embedded import EmbeddedBackend
from serve.runner.onnx import OnnxRunner
from serve.tensorrt.gpu import Gpu
from serve.tensorrt.runner import TensorRTRunner
from tests.fakes import opened
from tests.serve.engines import Engines, install
from tests.serve.fake_gpu import FakeGpu, cudaError_t
from tests.serve.fake_tensorrt import IExecutionContext, ILogger
from tests.serve.runner.contract import CHECKS, Check
from tests.serve.runner.steps import forward, generate, prompt_of
from tests.serve.waiting import until

CACHES = ("e5m2", "e4m3", "float16")


def real_engine(calibration: Path, cache: str) -> Path:
    """One built by the TensorRT of this machine for its GPU."""
    try:
        Gpu()
    except UnsupportedError as error:
        pytest.skip(f"{error}; where there is one: see the top of this file")
    from export.engine.build import build_engine

    path = calibration.parent / f"{cache}-real"
    if not path.exists():
        try:
            build_engine(calibration, path, kv_cache=cache, max_batch=8)
        except UnsupportedError as error:
            pytest.skip(f"{error}; see the top of this file")
    return path


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def open_engine(
    request: pytest.FixtureRequest,
    engines: Engines,
    engine_calibration: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], TensorRTRunner]]:
    """A runner of the engine with a given cache; `exact` says whether it computes in float32."""
    if request.param == "fake":
        install(monkeypatch, FakeGpu())
        yield lambda cache: TensorRTRunner(engines(cache))
    else:
        yield lambda cache: TensorRTRunner(real_engine(engine_calibration, cache))


def close(found: np.ndarray, expected: np.ndarray) -> None:
    """Within what FP16 and other kernels round; a wrong key, value or mask is far outside."""
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (expected, found))
    divergence = (np.exp(p) * (p - q)).sum(-1)
    assert divergence.max() < 1e-2, divergence
    assert divergence.mean() < 2e-3, divergence


class TestAnswers:
    """On the fake, and on real hardware."""

    @pytest.mark.parametrize("cache", CACHES)
    def test_its_logits_are_those_of_the_onnx_export(
        self,
        open_engine: Callable[[str], TensorRTRunner],
        references: Callable[[str], OnnxRunner],
        cache: str,
    ) -> None:
        """Along a prompt in two chunks, and 80 tokens after it: across a window's border."""
        runner, reference = open_engine(cache), references(cache)
        assert runner.kv_dtype == cache
        mine, its = runner.new_cache(3, 1024), reference.new_cache(3, 1024)
        tokens = prompt_of(200)
        for part, wanted in ((tokens[:, :70], [0, 30, 69]), (tokens[:, 70:120], [49])):
            got = forward(runner, mine, part, [2], [wanted])
            close(got, forward(reference, its, part, [2], [wanted]))
        for at in range(120, 200):
            token = tokens[:, at : at + 1]
            got = forward(runner, mine, token, [2], [[0]])
            close(got, forward(reference, its, token, [2], [[0]]))

    def test_rows_of_a_batch_keep_to_themselves(
        self, open_engine: Callable[[str], TensorRTRunner]
    ) -> None:
        """In an order that is not the slots', and that changes; lengths on both sides of 64."""
        runner = open_engine("e5m2")
        lengths = [5, 63, 64, 65, 130, 1]
        cache = runner.new_cache(len(lengths), 512)
        for slot, length in enumerate(lengths):
            forward(runner, cache, prompt_of(length), [slot], [[length - 1]])
        seen: dict[int, list[np.ndarray]] = {slot: [] for slot in range(len(lengths))}
        for order in ([5, 4, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0], [0, 3], [3, 0, 5], [1, 2, 4, 5]):
            tokens = np.array([[100 + slot] for slot in order])
            rows = forward(runner, cache, tokens, order, np.zeros((len(order), 1)))[:, 0]
            for slot, row in zip(order, rows, strict=True):
                seen[slot].append(row)
        for slot, length in enumerate(lengths):
            alone = runner.new_cache(1, 512)
            forward(runner, alone, prompt_of(length), [0], [[length - 1]])
            for row in seen[slot]:
                close(row, forward(runner, alone, np.array([[100 + slot]]), [0], [[0]])[0, 0])

    @pytest.mark.parametrize("check", CHECKS)
    def test_contract(self, open_engine: Callable[[str], TensorRTRunner], check: Check) -> None:
        check(open_engine("e5m2"), close)

    async def test_the_embedded_backend_generates_what_it_does_from_onnx(
        self,
        open_engine: Callable[[str], TensorRTRunner],
        references: Callable[[str], OnnxRunner],
        engine_calibration: Path,
    ) -> None:
        """Ten requests over eight slots, greedy: the first tokens, before close calls differ."""
        from serve.engine.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(engine_calibration.parent / "e5m2-onnx")
        answers = []
        for runner in (open_engine("e5m2"), references("e5m2")):
            async with opened(
                EmbeddedBackend(Path("m"), slots=8, load=lambda runner=runner: (runner, tokenizer))
            ) as backend:
                prompts = [tuple(prompt_of(3 + 29 * i)[0].tolist()) for i in range(10)]
                answers.append(await asyncio.gather(*(generate(backend, p, 12) for p in prompts)))
        same = sum(a[:4] == b[:4] for a, b in zip(*answers, strict=True))
        assert same >= 8, answers


@pytest.mark.usefixtures("gpu")
class TestMemory:
    """What is on the GPU, as the fake shows it."""

    def test_a_batch_that_goes_on_is_gathered_once_a_window(
        self, engines: Engines, gpu: FakeGpu
    ) -> None:
        runner = TensorRTRunner(engines("e5m2"))
        cache = runner.new_cache(2, 512)
        for slot in (0, 1):
            forward(runner, cache, prompt_of(60), [slot], [[59]])
        gpu.launches.clear()
        for _ in range(10):  # from 60 to 70 tokens: the window of 64 is left on the way
            forward(runner, cache, np.array([[1], [2]]), [0, 1], [[0], [0]])
        assert gpu.launches.count("gather") == 2 and gpu.launches.count("append") == 10
        forward(runner, cache, np.array([[1]]), [0], [[0]])
        assert gpu.launches.count("gather") == 3, "another batch"

    @pytest.mark.parametrize("cache", CACHES)
    def test_a_freed_slot_is_zero_and_its_neighbours_are_not(
        self, engines: Engines, gpu: FakeGpu, cache: str
    ) -> None:
        runner = TensorRTRunner(engines(cache))
        slots = runner.new_cache(3, 200)
        for expected in (0, 1, 2):
            assert slots.acquire() == expected
            forward(runner, slots, prompt_of(70), [expected], [[69]])
        slots.release(1)
        runner.gpu.synchronize()
        held = gpu.view(slots._memory.address, slots.size_bytes).reshape(3, 4, 2, 256, -1)
        assert not held[1].any() and not held[:, :, :, 70:].any()
        assert held[0, :, :, :70].any(axis=-1).all() and held[2, :, :, :70].any(axis=-1).all()
        item = 2 if cache == "float16" else 1
        assert slots.size_bytes == 3 * 4 * 2 * 256 * 64 * item

    def test_it_is_all_given_back(self, engines: Engines, gpu: FakeGpu) -> None:
        runner = TensorRTRunner(engines("e5m2"))
        cache = runner.new_cache(2, 512)
        forward(runner, cache, prompt_of(100), [0], [[99]])
        assert gpu.allocated > cache.size_bytes
        del runner, cache
        gc.collect()
        assert gpu.allocated == 0

    def test_too_little_of_it_is_said_with_what_helps(
        self, engines: Engines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(monkeypatch, FakeGpu(memory=20 << 20))
        runner = TensorRTRunner(engines("float16"))
        with pytest.raises(ConfigError, match=r"the GPU has 0\.0 GiB.*fewer slots or a shorter"):
            runner.new_cache(8, 1024)
        runner.new_cache(1, 64)

    async def test_a_gpu_that_fails_ends_every_request_and_the_engine(
        self, engines: Engines, gpu: FakeGpu
    ) -> None:
        """Nobody waits for an answer that cannot come, and the backend is not ready any more."""
        async with opened(EmbeddedBackend(engines("e5m2"), slots=2)) as backend:
            tasks = [asyncio.create_task(generate(backend, (5, 6, 7 + i), 200)) for i in range(4)]
            await until(lambda: backend.stats and backend.stats.generated_tokens)
            gpu.fails = cudaError_t.cudaErrorIllegalAddress
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, BackendError)
                assert "CUDA: cudaErrorIllegalAddress" in str(outcome)
            while await backend.ready():
                await asyncio.sleep(0.01)
            with pytest.raises(BackendUnavailable):
                await generate(backend, (5, 6), 2)

    @pytest.mark.parametrize(
        "first",
        [
            "cudaSetDevice",
            "cudaMemcpyHostToDevice",
            "execute_async_v3",
            "cuLaunchKernel append",
            "cudaMemcpyDeviceToHost",
            "cudaStreamSynchronize",
        ],
    )
    async def test_one_that_fails_between_requests_ends_the_engine_too(
        self, engines: Engines, gpu: FakeGpu, first: str
    ) -> None:
        """Whichever call is the first to hear of it."""
        async with opened(EmbeddedBackend(engines("e5m2"), slots=2)) as backend:
            await generate(backend, (5, 6, 7), 3)
            assert await backend.ready()
            gpu.fails, gpu.first = cudaError_t.cudaErrorIllegalAddress, first
            with pytest.raises(
                BackendError, match=r"cudaErrorIllegalAddress.*restart this process"
            ) as failed:
                await generate(backend, (5, 6, 7), 3)
            assert failed.value.kind == "dead"
            while await backend.ready():
                await asyncio.sleep(0.01)
            with pytest.raises(BackendUnavailable):
                await generate(backend, (5, 6), 2)

    async def test_an_error_of_one_step_leaves_the_others_alone(
        self, engines: Engines, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What CUDA refuses without having failed: the next request is answered."""
        async with opened(EmbeddedBackend(engines("e5m2"), slots=2)) as backend:
            refused = [(cudaError_t.cudaErrorInvalidValue,)]
            copy = gpu.cudaMemcpyAsync
            monkeypatch.setattr(
                gpu, "cudaMemcpyAsync", lambda *args: refused.pop() if refused else copy(*args)
            )
            with pytest.raises(BackendError, match="cudaErrorInvalidValue"):
                await generate(backend, (5, 6, 7), 3)
            assert len(await generate(backend, (5, 6, 7), 3)) == 3 and await backend.ready()

    def test_a_step_that_tensorrt_does_not_run_says_why(
        self, engines: Engines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = TensorRTRunner(engines("e5m2"))
        cache = runner.new_cache(1, 64)

        def refuse(context: IExecutionContext, stream_handle: int) -> bool:
            logger(sys.modules["tensorrt"]).log(ILogger.ERROR, "Error Code 2:\nno kernel")
            return False

        with monkeypatch.context() as patched:
            patched.setattr(IExecutionContext, "execute_async_v3", refuse)
            for _ in range(2):
                with pytest.raises(BackendError, match=r"not run the step: Error Code 2: no kern"):
                    forward(runner, cache, prompt_of(5), [0], [[4]])
        assert np.isfinite(forward(runner, cache, prompt_of(5), [0], [[4]])).all()
