"""A run that is stopped after its counts computes and measures nothing finished again."""

import dataclasses
import errno
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate import pipeline
from calibrate.journal.steps import NOT_KEPT, Steps
from calibrate.options import Options
from calibrate.quality.divergence import Reference
from calibrate.quality.gate import Gate
from calibrate.simulate import run as simulation
from calibrate.simulate.scenarios import scenarios_of
from octet.artifacts.golden import GOLDEN_FILE
from octet.artifacts.scenarios import SCENARIOS_FILE
from octet.artifacts.serving_path import EXPECTED_FILE
from octet.errors import ArtifactError
from octet.limit import Limit
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from tests.models import write_model

MXFP4 = Recipe.load("mxfp4").model_copy(update={"kv_cache": "e4m3"})
UNITS = 12  # of two layers: four in each, embeddings, head, cache, and all together
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


@pytest.fixture
def measuring(tmp_path: Path, tiny_samples: Path) -> Options:
    return Options(
        model=write_model(tmp_path / "llama", "llama"),
        samples=tiny_samples,
        out=tmp_path / "stopped",
        recipe=MXFP4,
        count=110,
        dtype="float32",
        max_length=32,
        predict=False,
        allow_few_samples=True,
    )


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a calibration, and returns how often it compared the model with its reference."""
    compare = Reference.compare

    def run(options: Options, *, stopped_after: int | None = None) -> int:
        done = 0

        def counted(*args: Any, **changes: Any) -> Any:
            nonlocal done
            if done == stopped_after:
                raise KeyboardInterrupt
            found = compare(*args, **changes)
            done += 1
            return found

        monkeypatch.setattr(Reference, "compare", counted)
        if stopped_after is None:
            pipeline.run(options)
        else:
            with pytest.raises(KeyboardInterrupt):
                pipeline.run(options)
        return done

    return run


def test_measurements_continue_wherever_a_run_is_stopped(
    measuring: Options, tmp_path: Path, compared: Callable[..., int]
) -> None:
    limit, gate = Limit.parse("kl=0.02"), Gate.parse("9", None)
    stopped = dataclasses.replace(measuring, budget=limit, gate=gate)
    whole = dataclasses.replace(stopped, out=tmp_path / "whole")
    all_in_all = compared(whole)
    report = (tmp_path / "whole" / "report.json").read_bytes()
    curve = json.loads(report)["budget"]["curve"]
    assert len(curve) > 3
    in_sensitivity, in_budget = 5, UNITS
    before_gate = all_in_all - in_sensitivity - in_budget - 1
    for work in (in_sensitivity, in_budget, before_gate):
        compared(stopped, stopped_after=work)
        assert not stopped.out.exists()
    assert compared(stopped) == 1
    assert (stopped.out / "report.json").read_bytes() == report
    assert not stopped.progress.exists()


def test_what_a_measurement_depends_on_is_measured_again(
    measuring: Options, tmp_path: Path, compared: Callable[..., int]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"{i} is {i}"}) + "\n" for i in range(30)))
    first = dataclasses.replace(measuring, sensitivity=True)
    compared(first, stopped_after=5)
    another_recipe = dataclasses.replace(
        first, recipe=MXFP4.model_copy(update={"exclude": (*MXFP4.exclude, "*.o_proj")})
    )
    compared(another_recipe, stopped_after=UNITS - 3)  # all but its last
    other_text = dataclasses.replace(first, held_out=other)
    compared(other_text, stopped_after=UNITS - 1)
    assert compared(first) == UNITS - 5


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


def test_arrays_keep_their_shapes(tmp_path: Path) -> None:
    arrays = {"scale": np.array(0.5, np.float32), "none": np.zeros((0, 3), np.float32)}
    steps = Steps(tmp_path, {})
    steps.keep("training", text="", arrays=arrays)
    _, found = steps.load("training") or ("", {})
    assert {name: value.shape for name, value in found.items()} == {"scale": (), "none": (0, 3)}


def test_a_state_stays_until_a_newer_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(tmp_path, {})
    steps.keep("training", text="[1]", arrays=ARRAYS)

    def full(path: Path, tensors: object) -> str:
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    def not_reached(path: Path, record: object) -> None:
        raise KeyboardInterrupt

    for name, fails, error in (
        ("write_tensors", full, ArtifactError),
        ("write_json", not_reached, KeyboardInterrupt),
        ("write_json", not_reached, KeyboardInterrupt),  # and once more
    ):
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(f"calibrate.journal.steps.{name}", fails)
            steps.keep("training", text="[2]", arrays={"x": ARRAYS["x"] + 1})
        text, arrays = steps.load("training") or ("", {})
        assert text == "[1]"
        np.testing.assert_array_equal(arrays["x"], ARRAYS["x"])
    steps.keep("training", text="[3]", arrays=ARRAYS)
    assert (steps.load("training") or ("", {}))[0] == "[3]"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "training.json",
        "training.safetensors",
    ]


@dataclass(frozen=True)
class Figures:
    names: tuple[str, ...]
    values: tuple[float | None, ...]


def test_figures_are_kept_exactly_and_computed_once(tmp_path: Path) -> None:
    figures = Figures(("a",), (0.1 + 0.2, 1 / 3, 5e-324, math.inf, -0.0, None, math.nan))
    steps = Steps(tmp_path, {"model": "a"}).depending_on("recipe")
    assert not steps.has("unit")
    assert steps.once("unit", Figures, lambda: figures) is figures
    again = Steps(tmp_path, {"model": "a"}).depending_on("recipe")
    assert again.has("unit")
    assert repr(again.once("unit", Figures, lambda: pytest.fail("computed"))) == repr(figures)
    for others in (Steps(tmp_path, {"model": "b"}).depending_on("recipe"), NOT_KEPT):
        assert not others.has("unit")
        assert others.once("unit", Figures, lambda: figures) is figures
    assert not Steps(tmp_path, {"model": "a"}).depending_on("another").has("unit")
    assert again.has("unit")


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
