"""`calibrate.run`, end to end: what it writes, refuses, prints and leaves behind."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from rich.console import Console

from calibrate.decoder.layers import LayeredModel
from calibrate.journal.distributed import Group
from calibrate.observe.counting_cpu import CpuCounter
from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.simulate.scenarios import scenarios_of, serving_paths
from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest
from octet.artifacts.scenarios import SCENARIOS_FILE, ScenarioSet
from octet.artifacts.serving_path import EXPECTED_FILE, ExpectedSet
from octet.errors import (
    ArtifactError,
    CheckpointError,
    ConfigError,
    GpuError,
    NumericsError,
    OctetError,
    SampleError,
    UnsupportedError,
)
from octet.limit import Limit
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.storage.files import file_digests
from octet.storage.tensors import Tensor, TensorFile, write_tensors
from tests.command import octet
from tests.models import write_model

FP8 = Recipe.load("fp8")
ROOT = Path(__file__).parents[2]


def poisoned(model: Path, to: Path, name: str) -> Path:
    """A copy of the checkpoint with one NaN in the tensor `name`."""
    shutil.copytree(model, to)
    file = TensorFile.open(model / "model.safetensors")
    tensors = {key: file.read(key) for key in file.names}
    codes = tensors[name].codes.copy()
    codes.flat[7] = 0x7FC0
    write_tensors(to / "model.safetensors", tensors | {name: Tensor("BF16", codes)})
    return to


def without(model: Path, to: Path, name: str) -> Path:
    """A copy of the checkpoint that lacks the tensor `name`."""
    shutil.copytree(model, to)
    file = TensorFile.open(model / "model.safetensors")
    tensors = {key: file.read(key) for key in file.names if key != name}
    write_tensors(to / "model.safetensors", tensors)
    return to


def test_what_it_writes(
    calibration: Calibration, checkpoint: Checkpoint, tiny_model: Path, tiny_samples: Path
) -> None:
    loaded = Calibration.load(calibration.path)
    manifest, spec = loaded.manifest, checkpoint.spec
    manifest.model.require(checkpoint)
    assert manifest.details["source"] == str(tiny_model)
    assert manifest.details["compute_dtype"] == "float32"
    assert manifest.details["held_out"]["count"] == 2
    assert manifest.samples is not None
    assert (manifest.samples.count, manifest.samples.batch_size) == (128, 8)
    assert {"torch", "transformers", "tokenizers", "numpy"} <= manifest.software.keys()
    assert loaded.observations.keys() == loaded.histograms.keys()
    assert len(loaded.histograms) == 6 * spec.layers
    for linear in spec.linears():
        counts = loaded.histograms[linear.input]
        assert counts.sum() == manifest.samples.tokens * linear.in_features
        assert loaded.scales[f"{linear.name}.weight_scale"].shape == ()
        assert loaded.scales[f"{linear.name}.input_scale"].shape == ()
    for index in range(spec.layers):
        assert loaded.scales[f"{spec.layer(index)}.self_attn.k_scale"] == 1.0


def test_input_scales_follow_from_the_stored_histograms(calibration: Calibration) -> None:
    finite = np.arange(0x7F80, dtype=np.uint32)
    for name, observation in calibration.observations.items():
        if observation.kind != "input":
            continue
        largest = np.flatnonzero(calibration.histograms[name][: len(finite)]).max()
        amax = np.uint32(largest << 16).view(np.float32)
        for consumer in observation.consumers:
            assert calibration.scales[f"{consumer}.input_scale"] == amax / np.float32(448)


def test_the_report_compares_every_method(calibration: Calibration) -> None:
    report = json.loads((calibration.path / "report.json").read_text())
    assert report["tensors"].keys() == calibration.observations.keys()
    for tensor in report["tensors"].values():
        methods = tensor["methods"]
        assert methods.keys() == {"max", "mse", "percentile", "kl"}
        assert methods["mse"]["sqnr_db"] >= max(m["sqnr_db"] for m in methods.values()) - 1e-9
        assert tensor["chosen"]["sqnr_db"] > 20
    assert len(report["weights"]) == 14


def test_two_runs_write_the_same_bytes_in_silence(
    calibration: Calibration,
    tiny_model: Path,
    tiny_samples: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    recipe = Recipe.load("fp8-static")
    again = run(
        Options(
            model=tiny_model,
            samples=tiny_samples,
            out=tmp_path / "out",
            recipe=recipe,
            count=128,
            dtype="float32",
        )
    )
    assert capfd.readouterr() == ("", "")  # no console was given
    assert again.manifest.files == calibration.manifest.files
    assert again.manifest.identity == calibration.manifest.identity


def test_reports_progress_tensors_and_warnings(
    tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=120)
    result = run(
        Options(
            model=tiny_model,
            samples=tiny_samples,
            out=tmp_path / "out",
            recipe=FP8,
            name="served-name",
            count=8,
            allow_few_samples=True,
        ),
        console=console,
    )
    assert result.manifest.model.name == "served-name"
    text = stream.getvalue()
    assert "Reading weights" in text
    assert "tokens/s" in text
    assert "lowest SQNR" in text
    expected = ExpectedSet.load(tmp_path / "out")
    assert [x.path for x in expected.expectations] == list(serving_paths(FP8))
    assert all(0 < x.low < x.mean < x.high for x in expected.expectations)
    told = f"Expected KL from the original, over 64 prompts: {expected.expectations[0].mean:.2g}"
    assert told in " ".join(text.split())
    assert [x.prompts for x in expected.power] == [24, 64]
    assert "The 64 golden prompts examine " in " ".join(text.split())
    assert "The 24 that an admission sends first examine " in " ".join(text.split())
    assert f"perplexity by {expected.power[0]} after 24 prompts" in " ".join(text.split())
    scenarios = ScenarioSet.load(tmp_path / "out", result.golden)
    assert set(scenarios.logprobs) == set(
        scenarios_of(Checkpoint.open(tiny_model).spec, FP8, result.scales)
    )
    assert SCENARIOS_FILE in result.manifest.files
    assert result.manifest.details["predicted"] is True
    assert "layers.0.self_attn.key " in text
    assert "warning: 8 samples are few" in " ".join(text.split())
    assert result.manifest.details["compute_dtype"] in ("bfloat16", "float32")
    assert not any(name.endswith("input_scale") for name in result.scales)  # dynamic


def test_what_serving_costs_need_not_be_predicted(
    tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"recipe": FP8, "count": 8, "allow_few_samples": True}
    run(
        Options(
            model=tiny_model, samples=tiny_samples, out=tmp_path / "out", predict=False, **options
        )
    )
    assert not (tmp_path / "out" / EXPECTED_FILE).exists()
    assert not (tmp_path / "out" / SCENARIOS_FILE).exists()
    assert Manifest.load(tmp_path / "out").details["predicted"] is False


def test_refuses_a_weight_with_nan_before_it_runs(
    tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    for name in (
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
    ):
        model = poisoned(tiny_model, tmp_path / name, name)
        with pytest.raises(NumericsError, match=name) as error:
            run(
                Options(
                    model=model, samples=tiny_samples, out=tmp_path / "out", recipe=FP8, count=128
                )
            )
        assert "1 NaN" in str(error.value)
        assert not (tmp_path / "out").exists()


def refused(
    kind: type[OctetError], match: str, out: Path, model: Path, samples: Path, **options: Any
) -> None:
    with pytest.raises(kind, match=match) as error:
        run(Options(**{"model": model, "samples": samples, "out": out, "recipe": FP8} | options))
    assert "\n" not in str(error.value)
    assert [path for path in out.parent.iterdir() if path.name.startswith((".", "out"))] == []


def test_refuses_what_is_not_a_whole_checkpoint(
    tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    refused(CheckpointError, "no such directory", out, tmp_path / "nothing", tiny_samples)

    model = shutil.copytree(tiny_model, tmp_path / "truncated")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(CheckpointError, "truncated", out, model, tiny_samples)

    name = "model.norm.weight"  # transformers would initialise it and go on
    model = without(tiny_model, tmp_path / "incomplete", name)
    refused(CheckpointError, f"tensor {name} is missing", out, model, tiny_samples)

    model = shutil.copytree(tiny_model, tmp_path / "no tokenizer")
    for file in model.glob("tokenizer*"):
        file.unlink()
    refused(CheckpointError, "no tokenizer files", out, model, tiny_samples)

    model = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    refused(UnsupportedError, "GPT2LMHeadModel.*LlamaForCausalLM", out, model, tiny_samples)


def test_refuses_too_few_samples(tiny_model: Path, tmp_path: Path) -> None:
    samples = tmp_path / "few.jsonl"
    samples.write_text('{"text": "import os"}\n' * 100)
    few = (SampleError, "100 samples.*--allow-few-samples", tmp_path / "out", tiny_model, samples)
    refused(*few, recipe=Recipe.load("fp8-static"))
    refused(*few, recipe=Recipe.load("mxfp4"))  # whose weights are weighed by them
    refused(*few, recipe=FP8.model_copy(update={"kv_cache": "e4m3"}))
    refused(*few, budget=Limit.parse("kl=0.01"))


@pytest.mark.parametrize("count", [5, 128])
def test_a_recipe_that_takes_nothing_from_samples_needs_few_and_calls_none_enough(
    tiny_model: Path, tmp_path: Path, count: int
) -> None:
    samples = tmp_path / "hi.jsonl"
    samples.write_text('{"text": "hi"}\n' * count)
    stream, out = io.StringIO(), tmp_path / "out"
    console = Console(file=stream, width=400)
    run(Options(model=tiny_model, samples=samples, out=out, recipe=FP8), console=console)
    shown = stream.getvalue()
    assert "No scale is taken from the samples: inputs are scaled at run time, and the" in shown
    assert "Expected KL from the original, over 64 prompts: " in shown
    assert f"warning: only 1 of {count} samples are distinct" in shown
    page = (out / "report.html").read_text()
    for text in (shown, page):
        assert "enough:" not in text and "was not simulated" not in text
    assert "Expected KL from the original, over 64 prompts: " in page


def test_a_destination_that_exists_is_kept(
    tiny_model: Path, tiny_samples: Path, calibration: Calibration, tmp_path: Path
) -> None:
    before = calibration.manifest.identity
    with pytest.raises(ArtifactError, match="exists already; add --force"):
        run(Options(model=tiny_model, samples=tiny_samples, out=calibration.path, recipe=FP8))
    assert Calibration.load(calibration.path).manifest.identity == before


@pytest.mark.parametrize(
    ("number", "stage"),
    [(signal.SIGINT, "Calibrating"), (signal.SIGTERM, "Golden records")],
    ids=["SIGINT", "SIGTERM"],
)
def test_after_a_signal_the_same_command_continues(
    tiny_model: Path, tiny_samples: Path, tmp_path: Path, number: signal.Signals, stage: str
) -> None:
    out = tmp_path / "out"
    command = ["calibrate", str(tiny_model), "--samples", str(tiny_samples), "--recipe", "fp8"]
    command += ["-o", str(out), "-n", "128", "--no-predict"]
    for _ in range(10):  # until the signal comes before the end: a busy machine may hold us up
        code, said = interrupted(command, number, stage)
        if code:
            break
        shutil.rmtree(out)
    assert said.rstrip().endswith("interrupted")
    assert "Traceback" not in said
    assert code == 130
    progress = out.with_name("out.progress")
    kept = [progress] if stage == "Golden records" else list(tmp_path.glob("out.progress"))
    assert list(tmp_path.iterdir()) == kept  # nothing else, whenever the signal came
    assert (f"kept {progress}" in said) == bool(kept)
    again = octet(*command)
    assert again.returncode == 0, again.stderr
    assert ("continuing from" in again.stderr) == bool(kept)
    assert list(tmp_path.iterdir()) == [out]


def interrupted(command: list[str], number: signal.Signals, stage: str) -> tuple[int, str]:
    """Sends the signal when the command shows `stage`; returns its exit code, and all it said."""
    environment = os.environ | {"COLUMNS": "120", "FORCE_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "octet", *command],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stderr is not None
    seen = b""
    deadline = time.monotonic() + 600
    while stage.encode() not in seen and time.monotonic() < deadline:
        seen += os.read(process.stderr.fileno(), 4096)
    process.send_signal(number)
    _, rest = process.communicate(timeout=600)
    return process.returncode, (seen + rest).decode()


@pytest.mark.parametrize(("stage", "most"), [("Calibrating", 16), ("Golden records", 32)])
def test_after_a_gpu_failed_the_same_run_continues(
    tiny_model: Path,
    tiny_samples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    most: int,
) -> None:
    def fail(what: str) -> NoReturn:
        raise torch.AcceleratorError(f"CUDA error: {what}\nCUDA kernel errors might be reported")

    forward, calls = LayeredModel.forward, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > most:  # 16 batches in each of two layers
            fail("an illegal memory access was encountered")
        return forward(*args, **kwargs)

    options = Options(
        model=tiny_model,
        samples=tiny_samples,
        out=tmp_path / "out",
        recipe=FP8,
        count=128,
        predict=False,
    )
    with monkeypatch.context() as broken:
        broken.setattr(LayeredModel, "forward", failing)
        broken.setattr(CpuCounter, "close", lambda _: calls > most and fail("cleaning up"))
        with pytest.raises(GpuError) as error:
            run(options)
    assert str(error.value).startswith(
        f"the GPU failed in '{stage}': CUDA error: an illegal memory access was encountered."
        " Finished work is kept: give the same command again."
    )
    assert "\n" not in str(error.value)
    assert (tmp_path / "out.progress" / "layers" / "layer-000.json").exists()
    stream = io.StringIO()
    run(options, console=Console(file=stream, width=120))
    assert "continuing from" in stream.getvalue()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_full_gpu_is_an_error_of_one_line(
    tmp_path: Path, tiny_model: Path, tiny_samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")

    monkeypatch.setattr("calibrate.pipeline.golden_set", full)
    out = tmp_path / "out"
    with pytest.raises(ConfigError) as error:
        run(Options(model=tiny_model, samples=tiny_samples, out=out, recipe=FP8, count=128))
    assert str(error.value).startswith("CUDA out of memory in 'Golden records': stop what else")
    assert "--max-kl" in str(error.value) and "--device cpu" in str(error.value)


def within(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `run` be a rank of `group`."""
    monkeypatch.setattr(
        "calibrate.pipeline.process_group", lambda _: nullcontext((group, torch.device("cpu")))
    )


def test_golden_records_are_kept_if_another_rank_fails_meanwhile(
    tmp_path: Path, tiny_model: Path, tiny_samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Last(Group):
        """The second of two ranks, of which the first cannot derive a scale."""

        rank, world = 1, 2

        def gather(self, item: Any) -> list[Any]:
            return [None, item]

        def attempt(self, work: Callable[[], Any]) -> Any:
            if isinstance(found := work(), tuple):  # golden records, while the first rank counts
                raise NumericsError("no scale")
            return found

    within(Last(), monkeypatch)
    monkeypatch.setattr("calibrate.pipeline.check_finite", lambda *_: None)
    out = tmp_path / "out"
    options = Options(model=tiny_model, samples=tiny_samples, out=out, recipe=FP8, count=128)
    with pytest.raises(NumericsError, match="no scale"):
        run(options)
    monkeypatch.undo()
    monkeypatch.setattr("calibrate.pipeline.golden_set", None)  # fails if it is called
    assert run(replace(options, predict=False)) is not None


def test_ranks_agree_on_an_error_of_the_report(
    tmp_path: Path, tiny_model: Path, tiny_samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the others wait for the first, which has ended."""
    agreed = list[OctetError | None]()

    class First(Group):
        def agree(self, error: OctetError | None) -> None:
            agreed.append(error)
            super().agree(error)

    def broken(*_: Any) -> NoReturn:
        raise NumericsError("no report")

    within(First(), monkeypatch)
    monkeypatch.setattr("calibrate.pipeline.report_on", broken)
    out = tmp_path / "out"
    options = Options(model=tiny_model, samples=tiny_samples, out=out, recipe=FP8, count=128)
    with pytest.raises(NumericsError) as error:
        run(replace(options, predict=False))
    assert agreed[-1] is error.value


def test_the_journal_of_another_run_is_refused_before_weights_are_read_or_discarded_by_force(
    tiny_model: Path, tiny_samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(
        model=tiny_model,
        samples=tiny_samples,
        out=tmp_path / "out",
        recipe=FP8,
        count=128,
        predict=False,
    )
    with monkeypatch.context() as interrupted:
        interrupted.setattr("calibrate.pipeline.golden_set", lambda *_, **__: interrupt())
        with pytest.raises(KeyboardInterrupt):
            run(options)
    threads = torch.get_num_threads()
    monkeypatch.setattr("torch.get_num_threads", lambda: threads + 1)
    with monkeypatch.context() as unread:
        unread.setattr("calibrate.pipeline.check_finite", lambda *_: pytest.fail("reads weights"))
        with pytest.raises(ArtifactError) as refused:
            run(options)
    assert str(refused.value) == (
        f"{options.progress / 'layers'}: the journal of a run with another number of torch threads;"
        f" OMP_NUM_THREADS={threads} continues it; --restart discards it, and so does --force"
    )
    stream = io.StringIO()
    run(replace(options, force=True), console=Console(file=stream, width=200))
    shown = stream.getvalue()
    assert "starting over: " in shown and "continuing from" not in shown
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_each_weight_file_is_hashed_once(
    tmp_path: Path, tiny_model: Path, tiny_samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counted(path: Path, *rest: Any) -> tuple[str, str | None]:
        hashed.append(path.name)
        return file_digests(path, *rest)

    monkeypatch.setattr("octet.storage.tensors.file_digests", counted)
    out = tmp_path / "out"
    run(Options(model=tiny_model, samples=tiny_samples, out=out, recipe=FP8, predict=False))
    weights = sorted(path.name for path in tiny_model.glob("*.safetensors"))
    assert sorted(name for name in hashed if name in weights) == weights


def test_an_architecture_that_cannot_run_is_refused_before_samples_are_read(
    tmp_path: Path, tiny_samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", "olmo2")
    monkeypatch.setattr("calibrate.pipeline.read_inputs", lambda *_: pytest.fail("reads samples"))
    monkeypatch.setattr("calibrate.decoder.supported.find_norm", no_norm)
    refused(UnsupportedError, "run layer by layer: no norm", tmp_path / "out", model, tiny_samples)


def no_norm(decoder: object) -> NoReturn:
    raise ValueError("no norm")


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def test_refuses_a_recipe_that_leaves_nothing_to_quantize(
    tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    nothing = FP8.model_copy(update={"exclude": (*FP8.exclude, "*")})
    with pytest.raises(ConfigError, match="excludes every linear"):
        run(Options(model=tiny_model, samples=tiny_samples, out=tmp_path / "out", recipe=nothing))
    assert list(tmp_path.iterdir()) == []
