"""The command line as a user meets it: one line and exit code 2 for each mistake."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from octet.artifacts.manifest import Manifest
from octet.recipe import PRESETS, KvCacheDtype
from octet_cli import main as cli
from octet_cli.calibrate import chosen_recipe
from tests.command import octet
from tests.models import write_model
from tests.shared import Shared


def refused(*arguments: object) -> str:
    """The one line on standard error; asserts that it is one, and that the exit code is 2."""
    done = octet(*arguments)
    assert done.returncode == 2, done
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert done.stdout == ""
    return lines[0]


def commands(within: typer.Typer = cli.app, *before: str) -> Iterator[tuple[str, ...]]:
    """Of the application and its groups."""
    for command in within.registered_commands:
        assert command.callback is not None
        yield (*before, command.name or command.callback.__name__.replace("_", "-"))
    for group in within.registered_groups:
        assert group.typer_instance is not None and group.name is not None
        yield (*before, group.name)
        yield from commands(group.typer_instance, *before, group.name)


@pytest.mark.parametrize("command", [(), *commands()], ids=" ".join)
def test_every_command_has_help_that_can_be_read(command: tuple[str, ...]) -> None:
    """Square brackets are markup, unless they are escaped."""
    done = CliRunner().invoke(cli.app, [*command, "--help"])
    assert done.exit_code == 0, done.exception
    assert f"Usage: {' '.join(('root', *command))}" in " ".join(done.stdout.split()), done.stdout


@pytest.fixture(scope="module")
def calibration(tiny_model: Path, tiny_samples: Path, shared: Shared) -> Path:
    def build(path: Path) -> None:
        samples = ("--samples", tiny_samples, "-n", 128)
        done = octet("calibrate", tiny_model, *samples, "-o", path, "--json")
        assert done.returncode == 0, done.stderr
        reported = json.loads(done.stdout)
        assert reported["identity"] == Manifest.load(path, "calibration").identity

    return shared.directory("cli-calibration", build)


def test_a_calibration_lists_what_it_can_be_exported_to(
    calibration: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """What it lists is what the exports then do."""
    changes = ("--recipe", "fp8-static", "--kv", "e4m3", "--no-predict", "--model", tiny_model)
    done = octet("rescale", calibration, *changes, "-o", tmp_path / "cal")
    works, _, refused = done.stdout.partition("it can be exported:\n")[2].partition("it cannot:\n")
    assert "export onnx" in works and "--format modelopt" in works and refused == ""
    for number, line in enumerate(works.splitlines()):
        words = line.replace("--out DIR", f"--out {tmp_path / str(number)}").split()
        exported = octet(*words[1:])
        assert exported.returncode == 0, (words, exported.stderr)


def test_what_cannot_be_exported_is_learned_when_it_is_calibrated(
    tiny_samples: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "olmo2", "olmo2")
    out, many = tmp_path / "cal", ("--samples", tiny_samples, "-n", 8, "--held-out", tiny_samples)
    done = octet("calibrate", model, *many, "-o", out)
    assert done.returncode == 0, done.stderr
    works, _, refused = done.stdout.partition("it can be exported:\n")[2].partition("it cannot:\n")
    assert works == f"  octet export checkpoint {out} --out DIR\n"
    reason = "Olmo2ForCausalLM is not an architecture that Octet knows how to compute, which ONNX"
    assert f"  octet export onnx: {reason}" in refused
    again = octet("rescale", out, "--kv", "float16", "-o", tmp_path / "again", "--json")
    exports = json.loads(again.stdout)["exports"]
    assert exports["checkpoint"] is None and exports["onnx"].startswith(reason)


def truncate(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def rename_architecture(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (lambda p: shutil.rmtree(p), "no such directory"),
    "not a model": (lambda p: (p / "config.json").unlink(), "not a Hugging Face checkpoint"),
    "truncated": (truncate, "model.safetensors: the header describes"),
    "other architecture": (rename_architecture, "BertModel is not supported; supported: Llama"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_bad_model_is_refused(
    case: str, tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    damage, message = MODELS[case]
    copy = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    damage(copy)
    out = tmp_path / "out"
    assert message in refused("calibrate", copy, "--samples", tiny_samples, "-o", out)
    assert [path.name for path in tmp_path.iterdir() if path.name != "model"] == []


SAMPLES = {
    "empty": ("", "samples.jsonl"),
    "not JSONL": ("hello\n", "samples.jsonl"),
    "without the field": ('{"content": "x"}\n' * 130, "content"),
    "too few": ('{"text": "x = 1"}\n' * 100, "--allow-few-samples"),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_bad_samples_are_refused(case: str, tiny_model: Path, tmp_path: Path) -> None:
    text, message = SAMPLES[case]
    samples = tmp_path / "samples.jsonl"
    samples.write_text(text)
    command = ("calibrate", tiny_model, "--recipe", "fp8-static")  # which takes from the samples
    assert message in refused(*command, "--samples", samples, "-o", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_samples_and_tokenizer_are_checked_before_torch_is_loaded(
    tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "samples.jsonl"
    bad.write_bytes(b'{"text": "x = 1"}\n' * 150 + b'{"text": "caf\xe9"}\n')
    silent = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    for path in silent.glob("tokenizer*"):
        path.unlink()
    code = (
        "import sys; from octet_cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules)"
    )
    cases = ((tiny_model, bad, "line 151"), (silent, tiny_samples, "no tokenizer files"))
    for model, samples, message in cases:
        command = ("calibrate", model, "--samples", samples, "-o", tmp_path / "out")
        words = [sys.executable, "-c", code, *map(str, command)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and message in line and done.stdout == "False\n"


def test_an_unknown_recipe_flag_or_command_names_the_nearest(tmp_path: Path) -> None:
    common = ("calibrate", tmp_path, "--samples", "x", "-o", tmp_path / "out")
    assert "did you mean 'fp8-static'?" in refused(*common, "--recipe", "fp8-statc")
    assert "--samples" in refused("calibrate", tmp_path, "--sample", "x", "-o", tmp_path / "out")
    assert "calibrate" in refused("calibrat", tmp_path)


def test_rescale_asks_what_should_change(calibration: Path, tmp_path: Path) -> None:
    assert "give --recipe" in refused("rescale", calibration, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rescale_changes_the_recipe_that_there_is(calibration: Path, tmp_path: Path) -> None:
    done = octet("rescale", calibration, "--kv", "e4m3", "--no-predict", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    before = Manifest.load(calibration, "calibration").recipe
    after = Manifest.load(tmp_path / "out", "calibration").recipe
    assert after.name == f"{before.name}+kv-e4m3" and after.kv_cache == "e4m3"
    assert after.weights == before.weights


def test_a_preset_with_changes_has_a_name_of_its_own(calibration: Path, tmp_path: Path) -> None:
    changes = ("--kv-cache", "float16", "--exclude", "*.down_proj")
    out, exported = tmp_path / "out", tmp_path / "checkpoint"
    done = octet("rescale", calibration, "--recipe", "fp8", "--no-predict", *changes, "-o", out)
    assert done.returncode == 0, done.stderr
    name = "fp8+kv-float16+exclude"
    assert f"derived {name} from" in done.stderr
    assert Manifest.load(out, "calibration").recipe.name == name
    assert json.loads((out / "report.json").read_text())["recipe"]["name"] == name
    assert octet("export", "checkpoint", out, "-o", exported).returncode == 0
    assert Manifest.load(exported, "checkpoint").recipe.name == name


@pytest.mark.parametrize(
    ("kv_cache", "exclude", "name"),
    [
        (None, None, "fp8"),
        ("e5m2", ["lm_head"], "fp8"),  # as the preset has them
        ("e4m3", [], "fp8+kv-e4m3"),
        (None, ["*.o_proj", "*.o_proj"], "fp8+exclude"),
    ],
)
def test_the_name_says_what_was_changed(
    kv_cache: KvCacheDtype | None, exclude: list[str] | None, name: str
) -> None:
    recipe = chosen_recipe("fp8", kv_cache, exclude)
    assert recipe.name == name
    assert (recipe == PRESETS["fp8"]) == (name == "fp8")


def test_options_of_another_target_and_unknown_choices_are_refused(
    calibration: Path, tmp_path: Path
) -> None:
    line = refused("export", "checkpoint", calibration, "--full-precision", "-o", tmp_path)
    assert "--full-precision" in line
    line = refused("export", "onnx", calibration, "--kv", "e4m", "-o", tmp_path)
    assert "'e5m2', 'e4m3'" in line


def test_export_refuses_what_is_no_calibration_or_has_changed(
    calibration: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert "no such directory" in refused("export", "onnx", tmp_path / "absent", "-o", out)
    assert "not an Octet artifact" in refused("export", "checkpoint", tiny_model, "-o", out)
    damaged = Path(shutil.copytree(calibration, tmp_path / "calibration"))
    scales = damaged / "scales.safetensors"
    scales.write_bytes(scales.read_bytes()[:-4] + b"\0\0\0\0")
    assert "scales.safetensors: altered" in refused("export", "checkpoint", damaged, "-o", out)
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2] + b"\1\1")
    line = refused("export", "checkpoint", calibration, "--model", model, "-o", out)
    assert "model.safetensors has changed since calibration" in line
    assert not out.exists()


def test_an_existing_artifact_is_kept_unless_forced(calibration: Path, tmp_path: Path) -> None:
    out = tmp_path / "checkpoint"
    assert octet("export", "checkpoint", calibration, "-o", out).returncode == 0
    before = Manifest.load(out, "checkpoint")
    assert "exists already; add --force" in refused("export", "checkpoint", calibration, "-o", out)
    assert octet("export", "checkpoint", calibration, "-o", out, "--force").returncode == 0
    assert Manifest.load(out, "checkpoint") == before


def test_force_never_replaces_a_calibration_by_an_export(calibration: Path, tmp_path: Path) -> None:
    kept = Path(shutil.copytree(calibration, tmp_path / "kept"))
    line = refused("export", "checkpoint", calibration, "-o", kept, "--force")
    assert f"{kept}: is a calibration, which --force keeps" in line
    assert Manifest.load(kept, "calibration").files


def test_an_export_says_what_it_wrote_where(calibration: Path, tmp_path: Path) -> None:
    out = tmp_path / "a [bold]name"
    done = octet("export", "checkpoint", calibration, "-o", out)
    assert done.returncode == 0, done.stderr
    said = "".join(done.stdout.split())
    assert f"wrote{out}".replace(" ", "") in said
    assert "servewith:--kv-cache-dtypefp8_e5m2" in said


def test_all_triton_entries_are_of_every_backend(calibration: Path, tmp_path: Path) -> None:
    line = refused("export", "triton", "--all", calibration, "--backend", "vllm", "-o", tmp_path)
    assert "leave --backend out" in line


def test_evaluate_refuses_what_it_cannot_score(
    calibration: Path, tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    absent = tmp_path / "absent"
    assert f"{absent}: no such file" in refused("evaluate", absent, "--samples", tiny_samples)
    assert f"{absent}: no such file" in refused("evaluate", tiny_model, "--samples", absent)
    line = refused("evaluate", calibration, "--samples", tiny_samples)
    assert "what `octet calibrate` wrote, not a checkpoint" in line
    done = octet("evaluate", tiny_model, "--samples", tiny_samples, "-n", 4, "--json")
    assert json.loads(done.stdout)["perplexity"] > 1


def test_serve_wants_one_thing_to_serve(tmp_path: Path) -> None:
    assert "--config" in refused("serve")
    assert "no such directory" in refused("serve", tmp_path / "absent")


@pytest.mark.parametrize("after_s", [0.3, 2.5, 4.0])
def test_an_interrupted_calibration_leaves_nothing_half_written(
    after_s: float, tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    # Before this line, Python is starting, and nothing of ours can answer a signal.
    started = "import runpy; print(flush=True); runpy.run_module('octet', run_name='__main__')"
    command = [sys.executable, "-c", started, "calibrate", str(tiny_model)]
    command += ["--samples", str(tiny_samples)]
    processes = {
        number: subprocess.Popen(
            [*command, "-o", str(tmp_path / number.name / "out")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    for process in processes.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
    time.sleep(after_s)
    for number, process in processes.items():
        process.send_signal(number)
        _, errors = process.communicate(timeout=600)
        # Python ends itself by SIGINT, which a shell shows as 130, if it was interrupted in an
        # import.
        assert process.returncode in (0, 130, -number, -signal.SIGINT), errors
        # Python drops a signal in a library's destructor, prints that traceback, and goes on.
        dropped = errors.count("Exception ignored in")
        assert errors.count("Traceback") <= dropped or process.returncode < 0, errors
        out = tmp_path / number.name / "out"
        if out.exists():  # the signal came after it had taken its place: then it is whole
            Manifest.load(out, "calibration")
        kept = out.with_name("out.progress")  # what the same command would continue from
        assert [path for path in out.parent.glob("*") if path not in (out, kept)] == []
