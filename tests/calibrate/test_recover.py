"""`octet recover`: what it trains, writes, refuses, and continues."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from calibrate import recover, recover_layers
from calibrate.algorithms.student import Student
from calibrate.decoder.loading import apply_changes, load_model
from calibrate.decoder.rounding import fake_quantize
from calibrate.options import Options, Trainable, Training, validate
from calibrate.pipeline import run
from calibrate.quality.divergence import Reference, evaluation_batches
from calibrate.quality.gate import Gate
from calibrate.samples.batches import Batch
from calibrate.samples.inputs import read_inputs
from calibrate.simulate.model import module_schemes, simulate
from octet.artifacts.calibration import WEIGHTS_FILE, Calibration
from octet.artifacts.manifest import Manifest
from octet.errors import (
    ArtifactError,
    ConfigError,
    GateError,
    NumericsError,
    SampleError,
    UnsupportedError,
)
from octet.model.checkpoint import Checkpoint
from octet.numerics import formats
from octet.recipe import Recipe
from octet.storage.tensors import TensorFile
from octet_cli.calibrate import recover as recover_command
from tests.command import octet
from tests.models import write_model
from tests.shared import Shared

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def origin(tiny_model: Path, example_samples: Path, shared: Shared) -> Path:
    """The tiny model calibrated for `nvfp4`."""

    def build(path: Path) -> None:
        run(
            Options(
                model=tiny_model,
                samples=example_samples / "calibration.jsonl",
                held_out=example_samples / "heldout.jsonl",
                out=path,
                recipe=Recipe.load("nvfp4"),
                count=128,
                max_length=32,
                predict=False,
            )
        )

    return shared.directory("tiny-nvfp4", build)


@pytest.fixture
def options(tiny_model: Path, example_samples: Path, origin: Path, tmp_path: Path) -> Options:
    return Options(
        model=tiny_model,
        samples=example_samples / "calibration.jsonl",
        held_out=example_samples / "heldout.jsonl",
        out=tmp_path / "recovered",
        recipe=Recipe.load("nvfp4"),
        count=128,
        max_length=32,
        predict=False,
        algorithm="recover",
        training=Training(calibration=origin, epochs=2, learning_rate=3e-4),
    )


@pytest.fixture(scope="module")
def recovered(
    origin: Path, example_samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same as the command writes it."""
    directory = tmp_path_factory.mktemp("recovered")
    return by_command("all", 3e-4, origin, example_samples, directory)


@pytest.fixture(scope="module")
def with_scales(
    origin: Path, example_samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same with trained scales, and weights as they were."""
    directory = tmp_path_factory.mktemp("scales")
    return by_command("scales", 5e-3, origin, example_samples, directory)


def by_command(train: str, rate: float, origin: Path, samples: Path, directory: Path) -> Path:
    out = directory / "recovered"
    printed = succeed(
        *("recover", origin, "--samples", samples / "calibration.jsonl", "--train", train),
        *("--held-out", samples / "heldout.jsonl", "--count", 128, "--max-length", 32),
        *("--epochs", 2, "--learning-rate", rate, "--no-predict", "-o", out),
    )
    out.with_name("printed.txt").write_text(printed, "utf-8")
    return out


def succeed(*arguments: object) -> str:
    """Runs a command, and returns its report, which is on stderr."""
    done = octet(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


def training_of(options: Options) -> Training:
    assert options.training is not None
    return options.training


def test_the_divergence_is_lower_and_the_weights_are_on_the_grid(
    recovered: Path, tiny_model: Path
) -> None:
    calibration = Calibration.load(recovered)
    details = calibration.manifest.details["algorithm"]
    assert details["held_out"]["after"] < details["held_out"]["before"]
    assert details["held_out"]["less"]["low"] > 0
    assert len(details["loss"]) == details["epochs"] == 2
    on_the_grid(calibration, tiny_model)


def on_the_grid(calibration: Calibration, model: Path) -> None:
    """Checks that the weights are trained, and values of their scales' grid."""
    original = Checkpoint.open(model)
    trained = calibration.applied_to(original)
    schemes = module_schemes(original.spec, calibration.manifest.recipe)
    for linear, (scheme, _) in schemes.items():
        weight = torch.from_numpy(trained.read(f"{linear}.weight").float32())
        scale = torch.from_numpy(calibration.scales[f"{linear}.weight_scale"])
        second = torch.from_numpy(calibration.scales[f"{linear}.weight_global_scale"])
        rounded = fake_quantize(weight, scheme, scale, second)
        assert torch.equal(rounded.bfloat16().float(), weight)
        before = torch.from_numpy(original.read(f"{linear}.weight").float32())
        assert not torch.equal(fake_quantize(before, scheme, scale, second), rounded)
    norm = "model.layers.1.post_attention_layernorm.weight"
    assert (trained.read(norm).float32() != original.read(norm).float32()).any()


def test_for_a_gpu_that_runs_the_recipe_weight_only_activations_are_not_rounded(
    options: Options, recovered: Path, tiny_model: Path
) -> None:
    run(replace(options, weight_only=("nvfp4",), gate=Gate.parse("0.06", None)))
    (judged,) = Calibration.load(options.out).manifest.details["gate"]
    assert judged["how"].startswith("simulated weight-only in ")
    rounded = Calibration.load(recovered).manifest.details["algorithm"]["held_out"]["after"]
    assert judged["bound"] < 0.06 < rounded
    found = {name: Calibration.load(name) for name in (options.out, recovered)}
    original = Checkpoint.open(tiny_model)
    model = load_model(original, "float32")
    batches = evaluation_batches(read_inputs(original, options).evaluation, 16_384)
    reference = Reference(model, original.spec, batches)
    served = {}
    for name, calibration in found.items():
        apply_changes(model, calibration.applied_to(original))
        with simulate(model, original.spec, options.recipe, calibration.scales, ("nvfp4",)):
            served[name] = reference.compare().kl
    details = found[options.out].manifest.details["algorithm"]
    assert details["weight_only"] == ["nvfp4"]
    assert details["held_out"]["after"] == pytest.approx(served[options.out], rel=0.05)
    assert served[options.out] < 0.9 * served[recovered]


@pytest.mark.parametrize(
    ("gpus", "error"),
    [
        ("h100,b200", "--for: H100 runs nvfp4 weight-only, and B200 does not"),
        ("h1000", "h1000"),
        (",", "--for names no GPU"),
    ],
)
def test_for_gpus_that_compute_differently_or_are_unknown(
    gpus: str, error: str, origin: Path, example_samples: Path, tmp_path: Path
) -> None:
    samples = ("--samples", example_samples / "calibration.jsonl")
    failed = octet("recover", origin, *samples, "--for", gpus, "-o", tmp_path / "out")
    assert failed.returncode == 2 and error in " ".join(failed.stderr.split())
    assert not list(tmp_path.iterdir())


def test_it_is_for_the_gpus_of_the_calibration_if_none_are_named(
    origin: Path, example_samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        "calibrate.pipeline.run", lambda options, console: taken.append(options.weight_only)
    )
    manifest = Manifest.load(origin)
    details = manifest.details | {"runs_weight_only": ["nvfp4"]}
    manifest = manifest.model_copy(update={"details": details, "recorded_identity": None})
    fields = manifest.model_dump(mode="json") | {"identity": manifest.identity}
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "manifest.json").write_text(json.dumps(fields), "utf-8")
    samples = example_samples / "calibration.jsonl"
    for calibration in (origin, tmp_path / "measured"):
        for gpus in (None, "b200", "h100"):
            recover_command(calibration, samples, tmp_path / "out", for_=gpus)
    assert taken == [(), (), ("nvfp4",), ("nvfp4",), (), ("nvfp4",)]


def test_the_report_says_what_the_training_gained(recovered: Path) -> None:
    held_out = Calibration.load(recovered).manifest.details["algorithm"]["held_out"]
    less = [f"{held_out['less'][key] / held_out['before']:.1%}" for key in ("mean", "low", "high")]
    said = (
        f"Trained on 128 samples for 2 epochs, 32 steps: the divergence on"
        f" {held_out['tokens']:,} tokens of held-out samples is {held_out['after']:.4g} nats a"
        f" token, and {held_out['before']:.4g} before: {less[0]} less (95 % interval {less[1]} to"
        f" {less[2]})."
    )
    report = json.loads((recovered / "report.json").read_text("utf-8"))
    printed = " ".join(recovered.with_name("printed.txt").read_text("utf-8").split())
    assert said in printed and said in (recovered / "report.html").read_text("utf-8")
    assert "not measured" not in report["summary"]["title"] and "not measured" not in printed
    assert (report["summary"]["status"] == "ready") == (not report["warnings"])
    assert "what these errors do to the model's output" not in [
        x["what"] for x in report["unknown"]
    ]


def test_the_report_names_no_option_that_the_command_lacks(recovered: Path) -> None:
    has = set(re.findall(r"--[a-z-]+", octet("recover", "--help").stdout))
    report = json.loads((recovered / "report.json").read_text("utf-8"))
    remedies = [*report["summary"]["todo"], *(unknown["remedy"] for unknown in report["unknown"])]
    for remedy in remedies:
        lacking = set(re.findall(r"--[a-z-]+", remedy)) - has
        assert not lacking or "`octet calibrate" in remedy
    assert "--sensitivity" not in recovered.with_name("printed.txt").read_text("utf-8")


@pytest.mark.parametrize("fixture", ["recovered", "with_scales"])
def test_every_export_reads_back_as_calibrated(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    recovered = request.getfixturevalue(fixture)
    succeed("export", "checkpoint", recovered, "--gate", "off", "-o", tmp_path / "checkpoint")
    succeed("verify", tmp_path / "checkpoint", "--calibration", recovered)
    succeed("export", "onnx", recovered, "--gate", "off", "-o", tmp_path / "onnx")
    succeed("verify", tmp_path / "onnx", "--calibration", recovered)


def test_its_weights_are_for_one_recipe(recovered: Path, tmp_path: Path) -> None:
    failed = octet("rescale", recovered, "--recipe", "fp8", "-o", tmp_path / "fp8")
    assert failed.returncode == 2
    assert "were fitted to recipe nvfp4 by recover" in failed.stderr
    succeed(
        *("rescale", recovered, "--kv", "e4m3", "--no-predict", "-o", tmp_path / "e4m3"),
    )
    kept = [(path / WEIGHTS_FILE).read_bytes() for path in (recovered, tmp_path / "e4m3")]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("at", "fixture", "train", "rate"),
    [
        (0, "recovered", ("weights", "norms"), 3e-4),
        (20, "recovered", ("weights", "norms"), 3e-4),
        (20, "with_scales", ("scales",), 5e-3),
    ],
)
def test_a_killed_run_continues_to_the_same_bytes(
    at: int,
    fixture: str,
    train: tuple[Trainable, ...],
    rate: float,
    request: pytest.FixtureRequest,
    options: Options,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recovered = request.getfixturevalue(fixture)
    training = replace(training_of(options), train=train, learning_rate=rate)
    options = replace(options, training=training)
    monkeypatch.setattr(recover, "_KEEP_EVERY_S", -1.0)
    steps: list[float] = []
    real = recover.backward

    def until(*args: Any) -> float:
        if len(steps) == at:
            raise KeyboardInterrupt
        steps.append(real(*args))
        return steps[-1]

    monkeypatch.setattr(recover, "backward", until)
    with pytest.raises(KeyboardInterrupt):
        run(options)
    assert not options.out.exists()
    rest: list[float] = []

    def counted(*args: Any) -> float:
        rest.append(real(*args))
        return rest[-1]

    monkeypatch.setattr(recover, "backward", counted)
    run(options)
    assert len(steps) + len(rest) == 2 * 16  # batches in two epochs: none is repeated
    for name in (WEIGHTS_FILE, "scales.safetensors", "histograms.safetensors"):
        assert (options.out / name).read_bytes() == (recovered / name).read_bytes()


def test_only_scales_are_trained(
    with_scales: Path, origin: Path, options: Options, tiny_model: Path
) -> None:
    """The weights are rounded to the trained scales, and answer as the training predicts."""
    original, calibration = Checkpoint.open(tiny_model), Calibration.load(with_scales)
    trained, before = calibration.applied_to(original), Calibration.load(origin).scales
    schemes = module_schemes(original.spec, calibration.manifest.recipe)
    for linear, (scheme, _) in schemes.items():
        scale = calibration.scales[f"{linear}.weight_scale"]
        assert (scale != before[f"{linear}.weight_scale"]).any()
        assert np.array_equal(scale, formats.round_to(scale, formats.E4M3)) and scale.min() > 0
        second = calibration.scales[f"{linear}.weight_global_scale"]
        assert second == before[f"{linear}.weight_global_scale"]
        weight = torch.from_numpy(original.read(f"{linear}.weight").float32())
        rounded = fake_quantize(weight, scheme, torch.from_numpy(scale), torch.from_numpy(second))
        after = torch.from_numpy(trained.read(f"{linear}.weight").float32())
        assert torch.equal(rounded.bfloat16().float(), after)
    held_out = calibration.manifest.details["algorithm"]["held_out"]
    assert held_out["less"]["low"] > 0

    batches = evaluation_batches(read_inputs(original, options).evaluation, 16_384)
    model = load_model(original, "float32")
    reference = Reference(model, original.spec, batches)
    apply_changes(model, trained)
    # Judged with the activations' scales of before; those of the result are of its own activations.
    own = {name: x for name, x in calibration.scales.items() if name.endswith(".weight_scale")}
    with simulate(model, original.spec, calibration.manifest.recipe, before | own):
        assert reference.compare().kl == pytest.approx(held_out["after"], rel=1e-5)


def test_fused_linears_keep_one_trained_scale(
    origin: Path, tmp_path: Path, tiny_model: Path
) -> None:
    """Of a recipe with one scale for a whole weight."""
    succeed("rescale", origin, "--recipe", "fp8-static", "--no-predict", "-o", tmp_path / "static")
    calibration, original = Calibration.load(tmp_path / "static"), Checkpoint.open(tiny_model)
    model = load_model(original, "float32")
    recipe = calibration.manifest.recipe
    with closing(Student(model, original.spec, recipe, calibration.scales, ("scales",))) as student:
        for name, move in student.trained.items():
            with torch.no_grad():
                move += 0.001 * (1 + len(name))
        moved = student.scales()
    assert moved.keys() == {f"{x}.weight_scale" for x in original.spec.linear_names}
    q, k, v, o = (moved[f"model.layers.0.self_attn.{x}_proj.weight_scale"] for x in "qkvo")
    assert q == k == v != o
    assert q != calibration.scales["model.layers.0.self_attn.q_proj.weight_scale"]


def test_scales_that_are_powers_of_two_are_not_trained(options: Options) -> None:
    training = replace(training_of(options), train=("scales",))
    with pytest.raises(ConfigError, match=r"recipe mxfp4 stores the scales of .* powers of two"):
        validate(replace(options, recipe=Recipe.load("mxfp4"), training=training))


def test_only_norms_are_trained(options: Options, tiny_model: Path) -> None:
    training = replace(training_of(options), train=("norms",), learning_rate=1e-2, epochs=1)
    calibration = run(replace(options, training=training))
    assert calibration is not None
    original, trained = (
        Checkpoint.open(tiny_model),
        calibration.applied_to(Checkpoint.open(tiny_model)),
    )
    schemes = module_schemes(original.spec, calibration.manifest.recipe)
    scales = calibration.scales
    for linear, (scheme, _) in schemes.items():
        scale, second = (
            torch.from_numpy(scales[f"{linear}.{name}"])
            for name in ("weight_scale", "weight_global_scale")
        )
        before = torch.from_numpy(original.read(f"{linear}.weight").float32())
        after = torch.from_numpy(trained.read(f"{linear}.weight").float32())
        assert torch.equal(fake_quantize(before, scheme, scale, second).bfloat16().float(), after)
    changed = set(TensorFile.open(options.out / WEIGHTS_FILE).names)
    assert "model.norm.weight" in changed and "model.layers.0.input_layernorm.weight" in changed


def test_a_result_that_is_no_better_is_not_written(options: Options) -> None:
    training = replace(training_of(options), learning_rate=0.03, epochs=1)
    with pytest.raises(GateError, match=r"not written: .* give a lower --learning-rate") as refused:
        run(replace(options, training=training))
    assert str(options.progress) in str(refused.value)
    assert not options.out.exists() and list(options.progress.rglob("training.safetensors"))


def test_a_gate_names_the_command_that_has_the_options(options: Options, tmp_path: Path) -> None:
    gate = Gate.parse("0.001", None)
    with pytest.raises(GateError, match="recover from what `octet calibrate` writes with --"):
        run(replace(options, gate=gate))
    # What was trained is kept, but was measured on other text.
    assert options.held_out is not None
    lines = options.held_out.read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(lines[1:]), "utf-8")
    with pytest.raises(ArtifactError, match="of another run"):
        run(replace(options, gate=gate, held_out=tmp_path / "other.jsonl"))


def test_a_loss_that_is_not_finite(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recover, "backward", lambda *_: float("nan"))
    with pytest.raises(NumericsError, match=r"after 0 steps .* lower --learning-rate than 0\.0003"):
        run(options)
    assert not options.out.exists()


@pytest.mark.parametrize(
    ("train", "rate", "free_mb"), [(("weights", "norms"), 3e-4, 40), (("scales",), 5e-3, 30)]
)
def test_a_model_that_does_not_fit_is_trained_layer_by_layer(
    train: tuple[Trainable, ...],
    rate: float,
    free_mb: int,
    recovered: Path,
    options: Options,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole takes 49 MB (40 for scales), a layer 25 (20) with hidden states in files."""
    options = replace(options, spill=tmp_path / "spill")
    training = replace(training_of(options), train=train, learning_rate=rate)
    options = replace(options, training=training)
    monkeypatch.setattr(recover, "free_memory", lambda _device: free_mb * 1_000_000)
    calibration = run(options, console=Console())
    assert calibration is not None
    assert "training layer by layer" in " ".join(capsys.readouterr().out.split())
    details = calibration.manifest.details["algorithm"]
    assert details["method"] == "layer by layer" and details["steps"] == 2 * 2 * 16
    assert all(last < first for first, last in details["loss"])
    held_out = details["held_out"]
    assert held_out["less"]["low"] > 0
    # Without the whole model in memory, held-out divergence is measured all the same.
    whole = Calibration.load(recovered).manifest.details["algorithm"]["held_out"]
    assert held_out["before"] == pytest.approx(whole["before"], rel=1e-4)
    if "weights" in train:
        on_the_grid(calibration, tiny_model)

    calls = 0
    real = recover_layers.backward

    def until_the_second_layer(*args: Tensor) -> float:
        nonlocal calls
        calls += 1
        if calls == 2 * 16 + 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(recover_layers, "backward", until_the_second_layer)
    killed = replace(options, out=tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        run(killed)
    # The method stays as it began, whatever memory is free now.
    monkeypatch.setattr(recover, "free_memory", lambda _device: 1 << 40)
    run(replace(killed, spill=None))
    assert calls == 2 * 16 + 5 + 2 * 16  # the first layer is not trained again
    for name in (WEIGHTS_FILE, "scales.safetensors", "histograms.safetensors"):
        assert (killed.out / name).read_bytes() == (options.out / name).read_bytes()


def test_too_little_memory_names_what_helps(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover, "free_memory", lambda _device: 1_000_000)
    with pytest.raises(ConfigError, match=r"0.0 GB are free .* a smaller --batch-size .* --spill"):
        run(options)


def test_two_ranks_train_together(
    origin: Path, tiny_model: Path, example_samples: Path, tmp_path: Path
) -> None:
    """Killed and resumed, they write the same bytes, and an error of one rank is that of all."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = ["-m", "tests.calibrate.recover_ranks"]
    places = [str(path) for path in (origin, tiny_model, example_samples, tmp_path)]
    result = subprocess.run(
        [*start, *worker, *places],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for method, steps in (("whole model", 8), ("layer by layer", 2 * 8)):
        outs = [tmp_path / f"{method}-{run}" for run in ("straight", "resumed")]
        details = Calibration.load(outs[0]).manifest.details["algorithm"]
        assert (details["method"], details["processes"]) == (method, 2)
        assert details["steps"] == steps  # of two batches each
        assert details["held_out"]["less"]["low"] > 0
        weights = [(out / WEIGHTS_FILE).read_bytes() for out in outs]
        assert weights[0] == weights[1]
    for rank in range(2):
        said = (tmp_path / f"error-{rank}").read_text("utf-8")
        assert said.startswith("the loss of layer 0 is not finite after 0 steps of training")


def test_another_calibration_in_the_same_place_is_trained_anew(
    origin: Path, recovered: Path, tmp_path: Path
) -> None:
    keys = []
    for source in (origin, recovered):
        shutil.rmtree(tmp_path / "calibration", ignore_errors=True)
        shutil.copytree(source, tmp_path / "calibration")
        keys.append(Training(calibration=tmp_path / "calibration").key)
    assert keys[0] != keys[1] and keys[0] == Training(calibration=origin).key


def test_held_out_samples_must_not_be_trained_on(options: Options) -> None:
    with pytest.raises(SampleError, match="held-out samples are also training samples"):
        run(replace(options, held_out=options.samples))


def test_a_calibration_of_another_checkpoint(options: Options, tmp_path: Path) -> None:
    write_model(tmp_path / "other", "llama")
    with pytest.raises(ArtifactError, match="other"):
        run(replace(options, model=tmp_path / "other"))


def test_experts_are_not_trained(options: Options, tmp_path: Path) -> None:
    write_model(tmp_path / "experts", "mixtral")
    with pytest.raises(UnsupportedError, match="does not train models with experts"):
        validate(replace(options, model=tmp_path / "experts"))


def test_the_gradient_is_that_of_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, head = (
        torch.randn(7, 16, generator=generator),
        torch.randn(50, 16, generator=generator),
    )
    states = torch.randn(2, 4, 16, generator=generator, requires_grad=True)
    batch = Batch(torch.zeros(2, 4, dtype=torch.int64), (4, 3), ("", ""))
    loss = recover.backward(states, batch, teacher, head)
    expected, gradient = by_autograd(states, teacher, head)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert states.grad is not None
    torch.testing.assert_close(states.grad, gradient, rtol=1e-4, atol=1e-6)


def by_autograd(states: Tensor, teacher: Tensor, head: Tensor) -> tuple[float, Tensor]:
    copy = states.detach().clone().requires_grad_()
    rows = torch.cat((copy[0], copy[1, :3]))
    p, q = (teacher @ head.T).log_softmax(-1), (rows @ head.T).log_softmax(-1)
    loss = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    torch.autograd.backward(loss)
    assert copy.grad is not None
    return float(loss.detach()), copy.grad
