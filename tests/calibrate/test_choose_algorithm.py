"""`calibrate --algorithm auto`, with stand-ins for ModelOpt's algorithms.

`tests/integration/test_modelopt.py` runs the real ones.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.algorithms import modelopt
from calibrate.algorithms.changed import Changed
from calibrate.algorithms.smoothing import fold, sites
from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.quality.gate import Gate
from octet.artifacts.calibration import WEIGHTS_FILE
from octet.errors import ConfigError, NumericsError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.storage.tensors import Tensor
from tests.outliers import write_outlier_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

CHANNELS = (1, 5)
FACTOR = 2**15


@pytest.fixture
def options(tiny_model: Path, example_samples: Path, tmp_path: Path) -> Options:
    """A model with outliers in every norm, which a static scale for each tensor cannot serve."""
    write_outlier_checkpoint(tiny_model, tmp_path / "m", factor=FACTOR, channels=CHANNELS)
    return Options(
        model=tmp_path / "m",
        samples=example_samples / "calibration.jsonl",
        held_out=example_samples / "heldout.jsonl",
        out=tmp_path / "out",
        recipe=Recipe.load("fp8-static"),
        algorithm="auto",
        count=128,
        max_length=32,
        predict=False,
    )


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has smoothquant undo the outliers, and gptq halve a weight; returns what was applied."""
    names: list[str] = []

    def apply(checkpoint: Checkpoint, algorithm: str, *_: Any, **__: Any) -> Changed:
        names.append(algorithm)
        if algorithm == "smoothquant":
            norms = [s for s in sites(checkpoint.spec) if s.producer.endswith("norm.weight")]
            vector = np.ones(checkpoint.spec.hidden_size, np.float32)
            vector[list(CHANNELS)] = 1 / FACTOR
            return Changed(fold(checkpoint, {site.input: vector for site in norms}))
        name = next(checkpoint.spec.linears()).name + ".weight"
        return Changed({name: Tensor.of(checkpoint.read(name).float32() / 2)})

    monkeypatch.setattr(modelopt, "apply_algorithm", apply)
    return names


def test_the_algorithm_with_the_least_divergence_is_used(
    options: Options, applied: list[str]
) -> None:
    calibration = run(options)
    assert calibration is not None and applied == ["smoothquant", "gptq"]  # awq: no 4-bit weights
    details = calibration.manifest.details
    compared = details["compared"]
    assert details["algorithm"]["name"] == compared["name"] == "smoothquant"
    assert compared["kl"]["smoothquant"] < compared["kl"]["none"] < compared["kl"]["gptq"]
    assert compared["less"]["smoothquant"]["low"] > 0 > compared["less"]["gptq"]["high"]
    said = json.loads((options.out / "report.json").read_text())["facts"]["algorithm"]
    assert "smoothquant is used: " in said and "held-out samples" in said
    assert (options.out / WEIGHTS_FILE).exists() and not options.progress.exists()
    # The same as if it had been named.
    again = replace(options, out=options.out.with_name("named"), algorithm="smoothquant")
    named = run(again)
    assert named is not None
    for file in ("scales.safetensors", WEIGHTS_FILE, "histograms.safetensors"):
        assert (again.out / file).read_bytes() == (options.out / file).read_bytes()


def test_it_compares_what_gpus_serve_that_round_no_activations(
    options: Options, applied: list[str], tiny_model: Path
) -> None:
    recipe = Recipe.load("fp8-static").model_copy(update={"kv_cache": "float16"})
    kl = {}
    for weight_only in ((), ("fp8:tensor/tensor",)):
        found = run(
            replace(options, model=tiny_model, recipe=recipe, weight_only=weight_only, force=True)
        )
        assert found is not None
        kl[weight_only] = found.manifest.details["compared"]["kl"]["none"]
    rounded, exact = kl.values()
    assert exact < 0.8 * rounded


def test_weights_stay_if_nothing_is_better(
    options: Options, applied: list[str], tiny_model: Path
) -> None:
    calibration = run(replace(options, model=tiny_model, recipe=Recipe.load("fp8")))
    assert calibration is not None
    details = calibration.manifest.details
    assert details["compared"]["name"] == "none" and "algorithm" not in details
    assert "nothing is lower with 95 % confidence" in details["compared"]["summary"]
    assert not (options.out / WEIGHTS_FILE).exists()


def test_an_interrupted_comparison_continues(
    options: Options, applied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(options)
    assert whole is not None
    calibration = (options.out / "scales.safetensors").read_bytes()
    again = replace(options, out=options.out.with_name("again"))
    apply = modelopt.apply_algorithm

    def interrupted(checkpoint: Checkpoint, algorithm: Any, *rest: Any, **more: Any) -> Changed:
        if algorithm == "gptq":
            raise KeyboardInterrupt
        return apply(checkpoint, algorithm, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(modelopt, "apply_algorithm", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(again)
    applied.clear()
    run(again)
    assert applied == ["gptq"]  # smoothquant's weights were kept
    assert (again.out / "scales.safetensors").read_bytes() == calibration


def test_an_algorithm_that_fails_on_the_model_is_left_out(
    options: Options, applied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = modelopt.apply_algorithm

    def failing(checkpoint: Checkpoint, algorithm: Any, *rest: Any, **more: Any) -> Changed:
        if algorithm == "gptq":
            raise NumericsError("gptq made NaN or Inf of it")
        return apply(checkpoint, algorithm, *rest, **more)

    monkeypatch.setattr(modelopt, "apply_algorithm", failing)
    calibration = run(options)
    assert calibration is not None
    assert set(calibration.manifest.details["compared"]["kl"]) == {"none", "smoothquant"}


def test_the_gate_says_what_chose_the_algorithm(options: Options, applied: list[str]) -> None:
    calibration = run(replace(options, gate=Gate.parse("1.0", None)))
    assert calibration is not None
    (gate,) = calibration.manifest.details["gate"]
    assert "--algorithm auto" in str(gate)


def test_it_needs_text_that_the_algorithms_have_not_seen(
    options: Options, example_samples: Path, tmp_path: Path
) -> None:
    lines = (example_samples / "calibration.jsonl").read_text().splitlines()[:128]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    few = replace(options, samples=tmp_path / "few.jsonl", held_out=None)
    with pytest.raises(ConfigError, match="give --held-out, or a smaller --count"):
        run(few)
