"""The gate of an export without limits: what was predicted, or nothing, by name."""

from pathlib import Path
from typing import Any

import pytest

from export.source import Source
from octet.artifacts.manifest import Manifest
from octet.errors import ConfigError, GateError
from octet_cli import export as commands

FP8 = "weights+activations, e5m2 (nearest), bfloat16"


def predict(monkeypatch: pytest.MonkeyPatch, mean: float) -> None:
    """Lets calibrations predict a KL of `mean` nats, and up to three times that on few tokens."""
    ranges = {FP8: {"low": mean / 3, "mean": mean, "high": 3 * mean}}
    monkeypatch.setattr(Source, "_expected", lambda self: {"expected_divergence": ranges})


def test_a_prediction_within_the_limit_is_recorded(
    calibrations: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict(monkeypatch, 0.045)
    commands.export_checkpoint(calibrations["fp8"], tmp_path / "out")
    (judged,) = Manifest.load(tmp_path / "out", "checkpoint").details["gate"]
    assert judged["met"] and (judged["limit"], judged["predicted"]) == (0.05, 0.045)
    assert judged["text"].startswith("accuracy gate: predicted KL of 0.045 nats")


@pytest.mark.parametrize(("recipe", "most"), [("fp8", 0.05), ("nvfp4", 0.25), ("mxfp4", 0.5)])
def test_a_prediction_over_the_limit_of_the_format_writes_nothing(
    recipe: str,
    most: float,
    calibrations: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    predict(monkeypatch, 1.1 * most)
    message = f"of at most {most:g} for {recipe}; .* --gate off"
    with pytest.raises(GateError, match=message) as caught:
        commands.export_checkpoint(calibrations[recipe], out)
    assert caught.value.exit_code == 1 and list(tmp_path.iterdir()) == []
    commands.export_checkpoint(calibrations[recipe], out, gate="off")
    assert Manifest.load(out, "checkpoint").details["gate"][0]["off"]


def test_a_limit_of_ones_own_replaces_it(
    calibrations: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_kl": "0.1", "gate": "off"}
    with pytest.raises(ConfigError, match="--gate off leaves the gate out"):
        commands.export_checkpoint(calibrations["fp8"], tmp_path / "out", **options)


def test_without_a_prediction_there_is_nothing_to_judge(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    commands.export_onnx(calibrations["fp8"], tmp_path / "out")
    assert "gate" not in Manifest.load(tmp_path / "out", "onnx").details
