"""Tests `octet doctor` and `calibrate --recipe auto` as commands: output and exit codes."""

import json
from functools import partial
from pathlib import Path

import pytest

from octet.hardware.devices import find_device
from octet_cli.calibrate import calibrate
from tests.command import octet
from tests.verify.machine.test_diagnose import STACKS


def test_this_machine_as_a_report_and_as_json(tmp_path: Path) -> None:
    found = octet("doctor", "--json")
    answer = json.loads(found.stdout)
    assert found.returncode == answer["exit_code"] == 0
    assert {row["name"] for row in answer["rows"]} >= {"fp8", "nvfp4", "e5m2", "e4m3", "float16"}
    assert all(check["compared"] for check in answer["machine"]["environment"]["checks"])
    recorded = tmp_path / "machine.json"
    recorded.write_text(found.stdout)
    again = octet("doctor", "--recorded", str(recorded))
    assert again.returncode == 0 and "FP8 matmul: 1,536 of 1,536 values equal" in again.stdout
    assert len(again.stdout.splitlines()) < 40  # one screen


@pytest.mark.parametrize(
    ("stack", "code", "said"),
    [
        ("b200", 0, "8 x NVIDIA B200 (10.0, 179.1 GiB, ECC on)"),
        ("old-driver", 1, "error: driver 535.183.06 is too old"),
        ("no-flashinfer", 0, "works, with 1 warning"),
    ],
)
def test_recorded_stacks(stack: str, code: int, said: str) -> None:
    found = octet("doctor", "--recorded", str(STACKS / f"{stack}.json"))
    assert found.returncode == code and said in found.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no such directory"),
        (["a", "--config", "b"], "not both"),
        (["--python", "/nowhere/python"], "no such program"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--recorded", "nowhere.json"], "No such file"),
        (["--recorded", "x", "--python", "y"], "for another one"),
    ],
)
def test_what_cannot_be_told_is_exit_code_2(arguments: list[str], said: str) -> None:
    found = octet("doctor", *arguments)
    assert found.returncode == 2 and said in found.stderr
    assert found.stderr.startswith("error: ") and len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipe", "auto", "--for", "h1000"], "did you mean 'h100'"),
        (["--recipe", "auto", "--for", ","], "--for names no GPU"),
        (["--recipe", "fp8", "--for", "h1000"], "did you mean 'h100'"),
        (["--recipe", "auto", "--for", "gaudi3"], "no recipe is known to run on all of them"),
    ],
)
def test_a_choice_that_cannot_be_made(
    arguments: list[str], said: str, example_model: Path, example_samples: Path, tmp_path: Path
) -> None:
    samples = str(example_samples / "calibration.jsonl")
    out = tmp_path / "out"
    found = octet("calibrate", str(example_model), "--samples", samples, "-o", str(out), *arguments)
    assert found.returncode == 2 and said in found.stderr and not out.exists()


def test_a_gpu_that_serves_more_exactly_than_is_measured_is_named(
    example_model: Path,
    example_samples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "octet.hardware.machine.local_devices", lambda: (find_device("NVIDIA H100 80GB HBM3"),)
    )
    monkeypatch.setattr("calibrate.pipeline.run", lambda options, console: None)
    samples, out = example_samples / "calibration.jsonl", tmp_path / "out"
    start = partial(calibrate, example_model, samples, out, recipe="nvfp4")
    said = "vLLM runs nvfp4 weight-only on H100: --for 'H100' measures that"
    cases: list[tuple[dict[str, str], bool]] = [
        ({"max_kl": "0.1"}, True),
        ({"max_kl": "0.1", "for_": "b200"}, False),
        ({}, False),  # nothing is measured
    ]
    for options, hint in cases:
        start(**options)
        assert (said in " ".join(capsys.readouterr().err.split())) == hint


def test_a_choice_is_printed_and_recorded(
    example_model: Path, example_samples: Path, tmp_path: Path
) -> None:
    samples = ["--samples", str(example_samples / "calibration.jsonl"), "-n", "2"]
    few = ["--allow-few-samples", "--no-predict", "--max-length", "64"]
    auto = ["--recipe", "auto", "--for", "NVIDIA H100 80GB HBM3,l40s"]
    out = tmp_path / "out"
    found = octet("calibrate", str(example_model), *samples, *few, *auto, "-o", str(out))
    assert found.returncode == 0, found.stderr
    assert "fp8: the most exact that vLLM runs natively on H100, L40S" in found.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["details"]["chosen"]["for"] == ["H100", "L40S"]
    assert (manifest["recipe"]["name"], manifest["recipe"]["kv_cache"]) == ("fp8", "e4m3")
