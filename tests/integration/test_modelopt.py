"""NVIDIA ModelOpt, the real thing, as a peer and as an ally; run with -s to see the figures."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.observe.histogram import Histogram
from calibrate.samples.batches import Batch
from calibrate.samples.source import load_samples
from calibrate.samples.tokens import load_tokenizer
from calibrate.scales.derive import derive_scales
from calibrate.simulate.model import simulate
from octet.artifacts.calibration import Calibration
from octet.model.checkpoint import Checkpoint
from octet.numerics import formats, scaling
from octet.numerics.bits import bf16_to_float32, float32_to_bf16
from octet.numerics.microscaling import combined
from octet.recipe import PRESETS, Recipe
from octet.storage.tensors import TensorFile
from tests.calibrate.bench import histograms_of
from tests.outliers import write_outlier_checkpoint

REPOSITORY = Path(__file__).parents[2]
LENGTH = 192  # tokens of every sample, so that nothing is padded: ModelOpt would observe it


def token_rows(checkpoint: Checkpoint, samples: Path, count: int) -> Any:
    """int64 [count, LENGTH]: the first samples that are long enough."""
    tokenizer = load_tokenizer(checkpoint)
    texts = [sample.text for sample in load_samples(samples).samples]
    rows = [ids[:LENGTH] for ids in tokenizer(texts)["input_ids"] if len(ids) >= LENGTH]
    assert len(rows) >= count
    return np.array(rows[:count], np.int64)


@pytest.fixture(scope="module")
def tokens(
    example_model: Path, example_samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    checkpoint = Checkpoint.open(example_model)
    np.save(path, token_rows(checkpoint, example_samples / "calibration.jsonl", 32))
    return path


@pytest.fixture(scope="module")
def peer(modelopt_python: Path) -> Callable[..., str]:
    """Runs a command of `modelopt_peer` in ModelOpt's environment; returns what it prints."""

    def run(*arguments: object) -> str:
        command = [modelopt_python, "-m", "tests.integration.modelopt_peer", *map(str, arguments)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def histograms(checkpoint: Checkpoint, tokens: Path, dtype: ComputeDtype) -> dict[str, Histogram]:
    token_ids = torch.from_numpy(np.load(tokens))
    batch = Batch(token_ids, (LENGTH,) * len(token_ids), ("",) * len(token_ids))
    return histograms_of(checkpoint, [batch], dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_our_max_scales_are_modelopts(
    peer: Callable[..., str],
    example_model: Path,
    tokens: Path,
    tmp_path: Path,
    dtype: ComputeDtype,
) -> None:
    """To the bit. Of float32 activations we keep the magnitude rounded to BF16: then ours is
    ModelOpt's largest magnitude so rounded, at most 2^-8 off."""
    peer("max", example_model, tokens, dtype, tmp_path / "amax.npz")
    theirs = np.load(tmp_path / "amax.npz")
    checkpoint = Checkpoint.open(example_model)
    found = histograms(checkpoint, tokens, dtype)
    per_tensor = derive_scales(checkpoint, Recipe.load("fp8-static"), found).scales
    per_channel = derive_scales(checkpoint, Recipe.load("fp8"), found).scales
    linears = list(checkpoint.spec.linears())
    compared = 0
    for linear in linears:
        # q/k/v, and gate/up, are fused when served: one scale, as ModelOpt's export gives them.
        fused = [other.name for other in linears if other.input == linear.input]
        weight = np.max([theirs[f"{name} tensor"] for name in fused])
        observed = theirs[f"{linear.name} input"]
        if dtype == "float32":
            rounded = bf16_to_float32(float32_to_bf16(observed.reshape(1)))[0]
            assert abs(rounded - observed) <= 2**-8 * observed
            observed = rounded
        channels = theirs[f"{linear.name} channel"][:, None]
        for ours, amax in (
            (per_tensor[f"{linear.name}.weight_scale"], weight),
            (per_tensor[f"{linear.name}.input_scale"], observed),
            (per_channel[f"{linear.name}.weight_scale"], channels),
        ):
            np.testing.assert_array_equal(ours, np.float32(amax) / np.float32(448), linear.name)
            compared += np.size(ours)
    print(f"\n{dtype}: {compared} scales are ModelOpt's to the bit")


def test_our_columnwise_gptq_gives_modelopts_bits(peer: Callable[..., str]) -> None:
    equal = json.loads(peer("gptq-update"))
    assert equal == dict.fromkeys(PRESETS, True)


class Scores:
    """Perplexity, and KL divergence from the model as it is, on held-out samples."""

    def __init__(self, checkpoint: Checkpoint, calibration: Path, held_out: Any) -> None:
        self._calibration, self._token_ids = calibration, torch.from_numpy(held_out)
        self._reference = self._log_probs(load_model(checkpoint, "float32"))
        self.perplexity = self._perplexity(
            self._log_probs(load_model(checkpoint, "bfloat16"))
        )  # as it would be served without quantization

    def served(
        self, checkpoint: Checkpoint, recipe: Recipe, scales: dict[str, Any] | None = None
    ) -> tuple[float, float]:
        """(perplexity relative to BF16's, KL in nats) of `recipe`, simulated in float32."""
        found = histograms(checkpoint, self._calibration, "float32")
        every = derive_scales(checkpoint, recipe, found).scales
        model = load_model(checkpoint, "float32")
        with simulate(model, checkpoint.spec, recipe, every | (scales or {})):
            log_probs = self._log_probs(model)
        divergence = (self._reference.exp() * (self._reference - log_probs)).sum(-1).mean()
        return self._perplexity(log_probs) / self.perplexity, float(divergence)

    @torch.inference_mode()
    def _log_probs(self, model: Any) -> torch.Tensor:
        return torch.cat([model(row[None]).logits.float() for row in self._token_ids]).log_softmax(
            -1
        )

    def _perplexity(self, log_probs: torch.Tensor) -> float:
        next_ones = self._token_ids[:, 1:, None]
        return float(log_probs[:, :-1].gather(-1, next_ones).mean().neg().exp())


def changed(checkpoint: Checkpoint, folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    file = TensorFile.open(folder / "scales.safetensors")
    scales = {name: file.read(name).float32() for name in file.names}
    return checkpoint.with_changes(folder / "weights.safetensors"), scales


def logits(checkpoint: Checkpoint, tokens: Path) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = load_model(checkpoint, "float32")(
            torch.from_numpy(np.load(tokens)[:4])
        ).logits
    return found


@pytest.fixture(scope="module")
def outliers(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The example with outliers in the inputs of every layer."""
    path = tmp_path_factory.mktemp("outliers") / "model"
    write_outlier_checkpoint(example_model, path, layers=range(6))
    return Checkpoint.open(path)


def test_smoothquant_brings_a_model_with_outliers_back_to_one_percent(
    peer: Callable[..., str],
    outliers: Checkpoint,
    example_samples: Path,
    tokens: Path,
    tmp_path: Path,
) -> None:
    recipe = Recipe.load("fp8-static")
    held_out = token_rows(outliers, example_samples / "heldout.jsonl", 48)
    scores = Scores(outliers, tokens, held_out)
    alone, _ = scores.served(outliers, recipe)

    peer("apply", outliers.path, tokens, "fp8-static", tmp_path, "smoothquant")
    smoothed, _ = changed(outliers, tmp_path / "smoothquant")
    recovered, _ = scores.served(smoothed, recipe)
    print(
        f"\nfp8-static {alone - 1:+.2%} of BF16 perplexity, with smoothquant {recovered - 1:+.2%}"
    )
    assert alone > 1.03
    assert recovered < 1.01
    assert torch.equal(logits(smoothed, tokens), logits(outliers, tokens))
    details = json.loads((tmp_path / "smoothquant" / "details.json").read_text())
    assert details["method"] == "smoothquant"
    assert details["modelopt"].startswith("0.47")


def test_awq_finds_the_weights_that_matter(
    peer: Callable[..., str],
    outliers: Checkpoint,
    example_samples: Path,
    tokens: Path,
    tmp_path: Path,
) -> None:
    """Behind an input's outliers are weights so small that 4 bits make zeros of them."""
    recipe = Recipe.load("mxfp4")
    scores = Scores(outliers, tokens, token_rows(outliers, example_samples / "heldout.jsonl", 48))
    _, alone = scores.served(outliers, recipe)
    peer("apply", outliers.path, tokens, "mxfp4", tmp_path, "awq")
    scaled, scales = changed(outliers, tmp_path / "awq")
    assert scales == {}
    _, by_awq = scores.served(scaled, recipe)
    print(f"\nmxfp4 with outliers: KL {alone:.4f}, with awq {by_awq:.4f}")
    assert by_awq < 0.7 * alone
    assert torch.equal(logits(scaled, tokens), logits(outliers, tokens))


def test_gptq_lessens_what_four_bits_cost(
    peer: Callable[..., str],
    example_model: Path,
    example_samples: Path,
    tokens: Path,
    tmp_path: Path,
) -> None:
    recipe = Recipe.load("mxfp4")
    checkpoint = Checkpoint.open(example_model)
    held_out = token_rows(checkpoint, example_samples / "heldout.jsonl", 48)
    scores = Scores(checkpoint, tokens, held_out)
    _, alone = scores.served(checkpoint, recipe)
    peer("apply", example_model, tokens, "mxfp4", tmp_path, "gptq")
    moved, scales = changed(checkpoint, tmp_path / "gptq")
    _, by_gptq = scores.served(moved, recipe, scales)
    print(f"\nmxfp4: KL {alone:.4f}, with gptq {by_gptq:.4f}")
    assert by_gptq < 0.95 * alone


@pytest.mark.parametrize("name", ["nvfp4", "fp8-static"])
def test_gptq_leaves_weights_on_the_grid_of_its_scales(
    peer: Callable[..., str], example_model: Path, tokens: Path, tmp_path: Path, name: str
) -> None:
    """Rounding them with those scales changes nothing but what BF16 had rounded off."""
    peer("apply", example_model, tokens, name, tmp_path, "gptq")
    checkpoint = Checkpoint.open(example_model)
    moved, scales = changed(checkpoint, tmp_path / "gptq")
    recipe = Recipe.load(name)
    granularity = scaling.Granularity.of(recipe.weights.granularity, recipe.weights.group_size)
    fmt = formats.format_named(recipe.weights.format)
    for linear in checkpoint.spec.linears():
        stored = moved.read(f"{linear.name}.weight")
        assert stored.dtype == "BF16"
        scale = combined(
            scales[f"{linear.name}.weight_scale"], scales.get(f"{linear.name}.weight_global_scale")
        )
        rounded = scaling.fake_quantize(stored.float32(), scale, fmt, granularity)
        np.testing.assert_array_equal(float32_to_bf16(rounded), stored.codes, linear.name)
        before = checkpoint.read(f"{linear.name}.weight").float32()
        nearest = scaling.fake_quantize(before, scale, fmt, granularity)
        assert (nearest != rounded).mean() > 0.01, linear.name


def calibrate(
    python: Path, model: Path, samples: Path, out: Path, recipe: str, algorithm: str
) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "octet", "calibrate", model, "--samples", samples, "--count", "128"]
    command += ["--recipe", recipe, "--algorithm", algorithm, "--no-predict", "--out", out]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_the_command_keeps_what_an_algorithm_changed(
    modelopt_python: Path, tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    done = calibrate(modelopt_python, tiny_model, tiny_samples, tmp_path / "out", "nvfp4", "gptq")
    assert done.returncode == 0, done.stderr
    calibration = Calibration.load(tmp_path / "out")
    algorithm = calibration.manifest.details["algorithm"]
    assert (algorithm["name"], algorithm["method"]) == ("gptq", "gptq")
    checkpoint = Checkpoint.open(tiny_model)
    moved = checkpoint.with_changes(tmp_path / "out" / "weights.safetensors")
    for linear in checkpoint.spec.linears():
        stored = moved.read(f"{linear.name}.weight")
        scale = combined(
            calibration.scales[f"{linear.name}.weight_scale"],
            calibration.scales[f"{linear.name}.weight_global_scale"],
        )
        rounded = scaling.fake_quantize(stored.float32(), scale, formats.E2M1, scaling.group(16))
        np.testing.assert_array_equal(float32_to_bf16(rounded), stored.codes, linear.name)


def test_auto_compares_all_of_them(
    modelopt_python: Path, tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    done = calibrate(modelopt_python, tiny_model, tiny_samples, tmp_path / "out", "nvfp4", "auto")
    assert done.returncode == 0, done.stderr
    details = Calibration.load(tmp_path / "out").manifest.details
    compared = details["compared"]
    assert set(compared["kl"]) == {"none", "smoothquant", "awq", "gptq"}
    assert min(compared["kl"].values()) > 0
    assert details.get("algorithm", {"name": "none"})["name"] == compared["name"]


def test_the_command_refuses_in_one_line_what_an_algorithm_is_not_for(
    modelopt_python: Path, tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    done = calibrate(modelopt_python, tiny_model, tiny_samples, tmp_path / "out", "fp8", "awq")
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith(
            "error: recipe fp8: awq is for weights of 4 bits (nvfp4, mxfp4), and it has none"
        )
    )
    assert not (tmp_path / "out").exists()
