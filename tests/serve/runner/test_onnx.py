"""The ONNX runner on real exports of a tiny random model: exact, and the same in any company."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from export.onnx.write import export_onnx
from octet.errors import ArtifactError, UnsupportedError
from octet.recipe import Recipe
from serve.backends.embedded import EmbeddedBackend
from serve.runner.onnx import OnnxRunner
from serve.runner.protocol import SlotCache
from tests.export.conftest import make_calibration
from tests.fakes import opened
from tests.serve.runner.contract import CHECKS, Check
from tests.serve.runner.steps import forward, generate, prompt_of

QUANTIZED = ("fp8", "fp8-static", "mxfp8", "mxfp4", "nvfp4")
AS_EXPORTED = ("fp8", "fp8-static", "mxfp8")  # ONNX Runtime has no kernel for FP4
PROMPT_LENGTHS = (1, 5, 63, 64, 65, 130, 300, 7)


@pytest.fixture(scope="module")
def runners(exports: dict[str, Path]) -> dict[str, OnnxRunner]:
    return {name: OnnxRunner(path, threads=2) for name, path in exports.items()}


def alone(runner: OnnxRunner, length: int, steps: int) -> np.ndarray:
    """Logits [steps, V] of a prompt and the tokens after it, greedy, with nobody else."""
    cache = SlotCache(runner.spec, 1, 1024, runner.kv_dtype)
    logits = [forward(runner, cache, prompt_of(length), [0], [[length - 1]])[0, 0]]
    for _ in range(steps - 1):
        token = np.array([[logits[-1].argmax()]])
        logits.append(forward(runner, cache, token, [0], [[0]])[0, 0])
    return np.stack(logits)


@pytest.mark.parametrize("name", [*QUANTIZED, "plain"])
def test_logits_do_not_depend_on_the_batch_in_any_bit(
    runners: dict[str, OnnxRunner], name: str
) -> None:
    runner = runners[name]
    cache = SlotCache(runner.spec, len(PROMPT_LENGTHS), 1024, runner.kv_dtype)
    last = [
        forward(runner, cache, prompt_of(length), [slot], [[length - 1]])[0, 0]
        for slot, length in enumerate(PROMPT_LENGTHS)
    ]
    seen = [[row] for row in last]
    order = list(range(len(PROMPT_LENGTHS)))[::-1]  # not the order of the slots
    for _ in range(7):
        tokens = np.array([[seen[slot][-1].argmax()] for slot in order])
        rows = forward(runner, cache, tokens, order, np.zeros((len(order), 1)))[:, 0]
        for slot, row in zip(order, rows, strict=True):
            seen[slot].append(row)
    for slot, length in enumerate(PROMPT_LENGTHS):
        np.testing.assert_array_equal(np.stack(seen[slot]), alone(runner, length, 8), f"{length}")


@pytest.mark.parametrize("name", AS_EXPORTED)
def test_reading_the_cache_as_float16_changes_no_bit(
    runners: dict[str, OnnxRunner], exports: dict[str, Path], name: str
) -> None:
    as_exported = OnnxRunner(exports[name], threads=2, rewrite=False)
    for length in (5, 64, 130):
        np.testing.assert_array_equal(
            alone(runners[name], length, 4), alone(as_exported, length, 4)
        )


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_contract(runners: dict[str, OnnxRunner], name: str, check: Check) -> None:
    check(runners[name], np.testing.assert_array_equal)


def test_unquantized_logits_are_those_of_transformers(
    runners: dict[str, OnnxRunner], tiny_model: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    runner, tokens = runners["plain"], prompt_of(100)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        reference = model(torch.from_numpy(tokens)).logits[0].numpy()
    cache = SlotCache(runner.spec, 1, 1024, runner.kv_dtype)
    head = forward(runner, cache, tokens[:, :90], [0], [np.arange(90)])[0]
    tail = [forward(runner, cache, tokens[:, i : i + 1], [0], [[0]])[0] for i in range(90, 100)]
    served = np.concatenate([head, *tail])
    # A float16 cache rounds keys and values to 11 bits: 5e-4 of values of order 1.
    np.testing.assert_allclose(served, reference, atol=5e-3)


def test_an_altered_export_is_refused(exports: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(exports["fp8"], tmp_path / "copy")
    content = bytearray((copy / "model.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (copy / "model.onnx").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.onnx: altered"):
        OnnxRunner(copy)


def test_a_graph_for_tensorrt_is_refused_with_what_to_do(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    export_onnx(
        exports["fp8-static"].parent / "fp8-static-calibration", tmp_path / "out", target="tensorrt"
    )
    with pytest.raises(UnsupportedError, match=r"for TensorRT.*octet build-engine.*export onnx"):
        OnnxRunner(tmp_path / "out")


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_an_onnx_runtime_without_e8m0_is_refused_by_name(
    recipe: str, exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.26.1")
    with pytest.raises(UnsupportedError, match=r"onnxruntime 1\.27 or later, and this is 1\.26\.1"):
        OnnxRunner(exports[recipe])
    OnnxRunner(exports["nvfp4"])


def test_an_e4m3_cache_is_served(
    exports: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{x}_scale_e4m3": 0.03 for layer in (0, 1) for x in "kv"
    }
    make_calibration(tmp_path / "calibration", tiny_model, Recipe.load("fp8"), scales=scales)
    export_onnx(tmp_path / "calibration", tmp_path / "out", kv_cache="e4m3")
    runner = OnnxRunner(tmp_path / "out", threads=2)
    assert runner.kv_dtype == "e4m3"
    cache = runner.new_cache(1, 1024)
    whole = forward(runner, cache, prompt_of(90), [0], [np.arange(90)])[0]
    cache = runner.new_cache(1, 1024)
    parts = [forward(runner, cache, prompt_of(90)[:, :70], [0], [np.arange(70)])[0]]
    for at in range(70, 90):
        parts.append(forward(runner, cache, prompt_of(90)[:, at : at + 1], [0], [[0]])[0])
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert cache.codes.dtype == np.uint8 and len(np.unique(cache.codes)) > 100


def test_another_kind_of_artifact_is_refused(exports: dict[str, Path]) -> None:
    with pytest.raises(ArtifactError, match="is a calibration, not an ONNX export"):
        OnnxRunner(exports["fp8"].parent / "fp8-calibration")


@pytest.mark.parametrize("name", QUANTIZED)
async def test_greedy_answers_are_the_same_in_any_company(
    exports: dict[str, Path], name: str
) -> None:
    prompts = [tuple(prompt_of(length)[0].tolist()) for length in PROMPT_LENGTHS]
    async with opened(EmbeddedBackend(exports[name], slots=5, threads=2)) as backend:
        single = [await generate(backend, prompt, 12) for prompt in prompts]
        together = await asyncio.gather(*(generate(backend, prompt, 12) for prompt in prompts))
    assert list(together) == single
