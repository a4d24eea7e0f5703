"""A mixture of experts from the command to the artifact, with experts that nothing reaches."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from calibrate.decoder.loading import load_model
from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.rescale import rescale
from calibrate.scales.expert_fallback import MIN_TOKENS
from octet.artifacts.calibration import Calibration
from octet.errors import ConfigError
from octet.limit import Limit
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.storage.tensors import Tensor, write_tensors
from tests.command import octet
from tests.models import write_model


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE whose routers send every token to one of experts 0 and 1, and one of 6 and 7.

    Their logits are a and -a, and b and -b; those of the other four experts are 0.
    """
    path = write_model(tmp_path_factory.mktemp("moe") / "moe", "qwen3_moe")
    checkpoint = Checkpoint.open(path)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensor_names}
    for index in range(checkpoint.spec.layers):
        name = f"{checkpoint.spec.layer(index)}.mlp.gate.weight"
        codes = tensors[name].codes.copy()
        codes[2:6] = 0
        codes[1], codes[7] = codes[0] ^ 0x8000, codes[6] ^ 0x8000  # the sign of each BF16
        tensors[name] = Tensor("BF16", codes)
    whole = {name: Tensor(x.dtype, x.codes.copy()) for name, x in tensors.items()}
    write_tensors(path / "model.safetensors", whole)
    return path


@pytest.fixture(scope="module")
def done(
    moe: Path, tiny_samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Calibration, str]:
    """Its calibration to `fp8-static`, and what was printed."""
    out = tmp_path_factory.mktemp("calibrated") / "out"
    stream = io.StringIO()
    recipe, console = Recipe.load("fp8-static"), Console(file=stream, width=200)
    paths: Any = {"model": moe, "samples": tiny_samples, "out": out}
    options = Options(**paths, recipe=recipe, count=128, dtype="float32", predict=False)
    run(options, console=console)
    return Calibration.load(out), " ".join(stream.getvalue().split())


@pytest.fixture(scope="module")
def calibration(done: tuple[Calibration, str]) -> Calibration:
    return done[0]


def test_each_experts_tokens_are_in_the_report(calibration: Calibration) -> None:
    manifest = calibration.manifest
    spec, samples = manifest.model.spec, manifest.samples
    assert samples is not None
    experts = json.loads((calibration.path / "report.json").read_text())["experts"]
    assert experts["min_tokens"] == MIN_TOKENS
    assert experts["layers"].keys() == {spec.layer(0), spec.layer(1)}
    for layer in experts["layers"].values():
        tokens = layer["tokens"]
        assert sum(tokens) == samples.tokens * spec.experts_per_token
        assert tokens[0] + tokens[1] == tokens[6] + tokens[7] == samples.tokens
        assert tokens[2:6] == [0, 0, 0, 0]
    named = {item["name"]: item["tokens"] for item in experts["fallback"]}
    unused = {
        f"{spec.experts_of(spec.layer(layer))}.{expert}"
        for layer in range(2)
        for expert in range(2, 6)
    }
    assert unused <= named.keys() and all(named[name] == 0 for name in unused)


def test_unused_experts_have_the_scales_of_all_and_weights_of_their_own(
    calibration: Calibration, moe: Path
) -> None:
    spec, scales = calibration.manifest.model.spec, calibration.scales
    finite = np.arange(0x7F80, dtype=np.uint32)
    for layer in range(spec.layers):
        experts = spec.experts_of(spec.layer(layer))
        for projection in ("gate_proj", "down_proj"):
            stored = [
                calibration.histograms[f"{experts}.{expert}.{projection}.input"]
                for expert in range(spec.experts)
            ]
            assert [bool(counts.any()) for counts in stored[2:6]] == [False] * 4  # as observed
            largest = int(np.flatnonzero(np.sum(stored, axis=0)[: len(finite)]).max())
            amax = np.uint32(largest << 16).view(np.float32)
            for expert in range(2, 6):
                found = scales[f"{experts}.{expert}.{projection}.input_scale"]
                assert found == amax / np.float32(448)
        weights = {float(scales[f"{experts}.{e}.down_proj.weight_scale"]) for e in range(2, 6)}
        assert len(weights) > 1


def test_they_are_named_where_people_look(done: tuple[Calibration, str]) -> None:
    calibration, said = done
    spec = calibration.manifest.model.spec
    assert f"of {2 * spec.experts} experts saw fewer than {MIN_TOKENS} tokens" in said
    warnings = " ".join(calibration.manifest.details["warnings"])
    assert f"{spec.experts_of(spec.layer(0))}.2 (0)" in warnings
    page = (calibration.path / "report.html").read_text()
    assert f"{spec.experts_of(spec.layer(0))}.2" in page


def test_the_golden_records_are_those_of_the_whole_model(
    calibration: Calibration, moe: Path
) -> None:
    model = load_model(Checkpoint.open(moe), "float32")
    assert len(calibration.golden.records) > 0
    for record in calibration.golden.records:
        with torch.inference_mode():
            logits = model(torch.tensor([record.prompt_token_ids])).logits[0, -1]
        expected = logits.log_softmax(-1)[list(record.tops[0].token_ids)]
        assert np.allclose(record.tops[0].logprobs, expected.numpy(), atol=1e-4)


def test_another_recipe_needs_no_other_run(
    calibration: Calibration, moe: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    recipe = Recipe.load("nvfp4")
    new = {"recipe": recipe, "predict": False}
    derived = rescale(calibration.path, tmp_path / "derived", **new)
    fresh = run(
        Options(
            model=moe,
            samples=tiny_samples,
            out=tmp_path / "fresh",
            **new,
            count=128,
            dtype="float32",
        )
    )
    assert fresh is not None and derived.scales.keys() == fresh.scales.keys()
    for name, scale in fresh.scales.items():
        assert np.array_equal(derived.scales[name], scale), name


def test_a_budget_keeps_all_experts_of_a_layer_in_one_format(
    moe: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    """One so small that every unit is promoted; the experts of a layer are one, named by `*`.

    Whether it is met is not asked: routers turn the last bits of a cache into other experts.
    """
    recipe = Recipe.load("fp8").model_copy(update={"kv_cache": "float16"})
    options: Any = {"dtype": "float32", "budget": Limit.parse("kl=1e-6")}
    with pytest.raises(ConfigError, match="2 held-out samples cannot bound"):
        run(
            Options(
                model=moe,
                samples=tiny_samples,
                out=tmp_path / "out",
                recipe=recipe,
                count=128,
                **options,
            )
        )
    assert not list(tmp_path.iterdir())  # it is said before the model runs
    options |= {"count": 120, "allow_few_samples": True}
    calibration = run(
        Options(model=moe, samples=tiny_samples, out=tmp_path / "out", recipe=recipe, **options)
    )
    assert calibration is not None
    spec, chosen = calibration.manifest.model.spec, calibration.manifest.recipe
    for layer in range(spec.layers):
        assert f"{spec.experts_of(spec.layer(layer))}.*" in chosen.exclude
    assert not any(".experts." in name for name in calibration.scales)
    report = json.loads((calibration.path / "report.json").read_text())
    units = [item["unit"] for item in report["budget"]["chosen"]]
    assert len(units) == 3 * spec.layers
    assert spec.experts_of(spec.layer(0)) in units


def test_no_graph_is_built_of_experts(calibration: Calibration, tmp_path: Path) -> None:
    """A checkpoint of them is written; ONNX and TensorRT refuse in one line."""
    ended = octet("export", "onnx", calibration.path, "-o", tmp_path / "out")
    assert ended.returncode == 2, ended
    (line,) = ended.stderr.strip().splitlines()
    assert "Qwen3MoeForCausalLM is a mixture of experts" in line
    assert not (tmp_path / "out").exists()
