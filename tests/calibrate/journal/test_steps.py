"""A run that is stopped after its counts does not compute golden records or predictions again."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate import pipeline
from calibrate.journal.steps import Steps
from calibrate.options import Options
from calibrate.simulate import run as simulation
from calibrate.simulate.scenarios import scenarios_of
from octet.artifacts.golden import GOLDEN_FILE
from octet.artifacts.scenarios import SCENARIOS_FILE
from octet.artifacts.serving_path import EXPECTED_FILE
from octet.errors import ArtifactError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from tests.models import write_model

ARRAYS = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}


def test_predictions_continue_after_the_last_finished_sweep(
    tmp_path: Path, tiny_samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(
        model=write_model(tmp_path / "llama", "llama"),
        samples=tiny_samples,
        out=tmp_path / "whole",
        recipe=Recipe.load("fp8"),
        count=128,
        dtype="float32",
        max_length=32,
    )
    whole = pipeline.run(options)
    assert whole is not None
    stopped = dataclasses.replace(options, out=tmp_path / "stopped")
    sweeps = 0
    sweep = simulation._Bench.answers

    def counted(*args: Any) -> Any:
        nonlocal sweeps
        sweeps += 1
        if sweeps == 4:
            raise KeyboardInterrupt
        return sweep(*args)

    monkeypatch.setattr("calibrate.simulate.run._STATES_BYTES", 1)  # each scenario by itself
    monkeypatch.setattr(simulation._Bench, "answers", counted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(stopped)
    kept = sorted(path.name for path in (tmp_path / "stopped.progress/steps").glob("*.json"))
    assert kept == ["golden.json", "prediction-0.json", "prediction-1.json", "prediction-2.json"]
    monkeypatch.setattr(pipeline, "golden_set", None)  # fails if it is called
    remaining = 0

    def remain(*args: Any) -> Any:
        nonlocal remaining
        remaining += 1
        return sweep(*args)

    monkeypatch.setattr(simulation._Bench, "answers", remain)
    pipeline.run(stopped)
    spec = Checkpoint.open(options.model).spec
    assert remaining == len(scenarios_of(spec, options.recipe, whole.scales)) - 3
    for name in (GOLDEN_FILE, EXPECTED_FILE, SCENARIOS_FILE):
        assert (tmp_path / "stopped" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes()
    assert not (tmp_path / "stopped.progress").exists()


def test_a_step_is_what_was_kept_with_the_same_inputs(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "steps", {"model": "a"})
    assert steps.load("golden", "prompts") is None
    steps.keep("golden", "prompts", text="[1]", arrays=ARRAYS)
    text, arrays = steps.load("golden", "prompts") or ("", {})
    assert text == "[1]"
    np.testing.assert_array_equal(arrays["x"], ARRAYS["x"])
    assert steps.load("golden", "other prompts") is None
    assert Steps(tmp_path / "steps", {"model": "b"}).load("golden", "prompts") is None
    steps.keep("golden", "other prompts", text="[2]", arrays={})
    assert steps.load("golden", "prompts") is None
    assert steps.load("golden", "other prompts") == ("[2]", {})


@pytest.mark.parametrize("name", ["golden.json", "golden.safetensors"])
def test_an_altered_step_is_refused(tmp_path: Path, name: str) -> None:
    steps = Steps(tmp_path, {})
    steps.keep("golden", text="[1]", arrays=ARRAYS)
    content = bytearray((tmp_path / name).read_bytes())
    content[-8] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"{name}: altered since .*--restart begins anew"):
        steps.load("golden")


def test_a_step_that_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("a file")
    with pytest.raises(ArtifactError, match=r"^[^\n]*steps: File exists$"):
        Steps(tmp_path / "steps", {}).keep("golden", text="", arrays={})
