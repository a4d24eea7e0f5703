"""Runs a calibration, from a checkpoint and samples to the artifact."""

import time
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from calibrate.algorithms.apply import changed_model
from calibrate.decoder.loading import resolve_dtype
from calibrate.golden import golden_set
from calibrate.journal.distributed import process_group
from calibrate.journal.identity import arithmetic_of
from calibrate.journal.journal import discard
from calibrate.observe.counting_cpu import make_counter
from calibrate.observe.sweep import observe_checkpoint
from calibrate.quality.budget import check_samples
from calibrate.quality.gate import Gate
from calibrate.quality.refused import check_refused, drop_refused, refused_directory
from calibrate.report.console import print_report
from calibrate.samples.inputs import read_inputs
from calibrate.samples.plan import LongPolicy
from calibrate.scales.derive import check_finite, check_quantizes, check_recipe
from calibrate.simulate.predict import expected_divergence
from calibrate.solve import solve
from calibrate.write_report import PAGE, keep_evidence, report_files, report_on
from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest, check_destination, software
from octet.artifacts.provenance import ModelIdentity
from octet.errors import ConfigError, UnsupportedError
from octet.limit import Limit
from octet.model.checkpoint import Checkpoint
from octet.progress import progress_bar
from octet.recipe import Recipe

__all__ = ["progress_directory", "run"]


def run(
    model: Path,
    samples: Path,
    out: Path,
    *,
    recipe: Recipe,
    name: str | None = None,
    count: int = 256,
    held_out: Path | None = None,
    text_field: str = "text",
    messages_field: str = "messages",
    max_length: int = 512,
    long: LongPolicy = "cut",
    pack: bool = False,
    batch_size: int = 8,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    algorithm: Literal["smoothquant", "awq", "gptq"] | None = None,
    budget: str | None = None,
    gate: Gate | None = None,
    sensitivity: bool = False,
    spill: Path | None = None,
    restart: bool = False,
    allow_few_samples: bool = False,
    predict: bool = True,
    force: bool = False,
    console: Console | None = None,
) -> Calibration | None:
    """Calibrates the checkpoint `model` on the first `count` of `samples`, and writes `out`.

    Golden records, and the divergence that `sensitivity`, `budget` and `gate` measure, come from
    `held_out`, or from the samples after the first `count`. `name` is the model's name when served
    (default: its directory's name). `max_length` is in tokens; `dtype` is that of the forward pass.
    `predict` also predicts the cost of each serving path on the golden prompts. Without a console
    nothing is printed. Finished work is kept in `<out>.progress` until `out` is written: a run
    that was killed continues from there and writes the same bytes.

    Raises a subclass of OctetError for anything that the user can correct, and leaves `out`
    unchanged. One of them is GateError, if the recipe costs more than `gate` allows: the evidence
    is then in `<out>.refused`, and the next call continues from `<out>.progress`. Of the processes
    that torchrun starts, the first writes `out`; the others return None.
    """
    check_destination(out, force=force, inputs=[model, samples], kind="calibration")
    checkpoint = Checkpoint.open(model)
    check_recipe(recipe, checkpoint.spec)
    check_quantizes(recipe, checkpoint.spec)
    limit = None if budget is None else Limit.parse(budget)
    if gate is not None:
        gate.check_spec(checkpoint.spec, model)
        check_refused(refused_directory(out))
    if checkpoint.spec.generic and (sensitivity or limit is not None):
        raise UnsupportedError(
            f"{model}: --sensitivity and --budget work on logits as a known architecture makes"
            f" them, and {checkpoint.spec.architecture} is none; calibrate without"
        )
    if limit is not None and algorithm == "gptq":
        raise ConfigError(
            "gptq moves weights onto the scales of one recipe, which --budget would change: give"
            " one of the two, or use smoothquant"
        )
    inputs = read_inputs(
        checkpoint,
        samples,
        held_out=held_out,
        count=count,
        text_field=text_field,
        messages_field=messages_field,
        max_length=max_length,
        long=long,
        pack=pack,
        batch_size=batch_size,
        allow_few_samples=allow_few_samples,
    )
    if limit is not None:
        check_samples(limit, inputs.evaluation)
    if gate is not None:
        lengths = [length for batch in inputs.evaluation for length in batch.lengths]
        remedy = "give more with --held-out, or a smaller --count"
        gate.check_samples(lengths, inputs.evaluated_on, remedy)
    compute_dtype = resolve_dtype(dtype, checkpoint)
    progress = progress_directory(out)
    resumed = progress.exists() and not restart
    with process_group(_device(device)) as (group, place):
        if group.rank != 0:
            console = None
        elif console is not None:
            console.print(inputs.plan.summary(), highlight=False)
            if resumed:
                console.print(f"continuing from {progress}", highlight=False, markup=False)
        if algorithm is not None and group.world > 1:
            raise ConfigError("--algorithm runs in one process: start it without torchrun")
        check_finite(checkpoint)
        changed = changed_model(
            checkpoint,
            algorithm,
            recipe,
            inputs.plan.batches,
            progress / "algorithm",
            dtype=compute_dtype,
            device=place,
            restart=restart,
            console=console,
        )
        make_counter(place, 1).close()  # compiles now: the timing below is of counting alone
        with progress_bar(console, "Calibrating", inputs.plan.tokens) as advance:
            started = time.perf_counter()
            observed = observe_checkpoint(
                changed.checkpoint,
                inputs.plan.batches,
                dtype=compute_dtype,
                device=place,
                chunks=len(inputs.plan.chunk_ends),
                queries=recipe.kv_cache == "e4m3",
                spill=spill,
                journal=progress / "layers",
                restart=restart,
                group=group,
                advance=advance,
            )
            seconds = None if resumed else time.perf_counter() - started
        if group.rank != 0:
            return None

    with progress_bar(console, "Golden records", inputs.prompt_tokens) as advance:
        golden = golden_set(checkpoint, inputs.prompts, device=place, advance=advance)
    solution = solve(
        changed.checkpoint,
        recipe,
        observed,
        inputs,
        changed.scales,
        limit=limit,
        gate=gate,
        sensitivity=sensitivity,
        dtype=compute_dtype,
        device=place,
        console=console,
    )
    identity = ModelIdentity.of(checkpoint, name)
    report = report_on(solution, checkpoint, identity.name, inputs, observed, compute_dtype)
    judged = solution.gate
    if judged is not None and not judged.met:
        refused = refused_directory(out)
        page = keep_evidence(refused, report, solution.convergence, solution.scales, golden, judged)
        if console is not None:
            print_report(console, report, page=page)
        again = f"calibrate again (it continues from {progress}, without observing)"
        raise judged.error(out, refused, again=again, budget=None if algorithm == "gptq" else again)
    prediction, predicted = None, dict[str, Any]()
    if predict:
        predicted["prediction"] = arithmetic_of(place)
        prediction = expected_divergence(
            changed.checkpoint,
            solution.recipe,
            solution.scales,
            golden,
            device=place,
            console=console,
        )
    details = {
        "source": str(model.absolute()),
        "compute_dtype": compute_dtype,
        **observed.facts,
        **changed.details,
        **predicted,
        "held_out": inputs.split.facts,
        "warnings": list(report.warnings),
    }
    if solution.budget is not None:
        told = ("metric", "limit", "reached", "bound", "met", "evaluated_on")
        details["budget"] = {key: solution.budget[key] for key in told}
    if judged is not None:
        details["gate"] = judged.details()
    calibration = Calibration.save(
        out,
        Manifest(
            kind="calibration",
            model=identity,
            recipe=solution.recipe,
            samples=inputs.sample_set,
            details=details,
            software=software("numpy", "torch", "transformers", "tokenizers", "numba"),
        ),
        observed.observations,
        observed.histograms,
        solution.scales,
        golden,
        extra_files=report_files(report, solution.convergence, prediction) | changed.files,
        force=force,
    )
    discard(progress)
    if judged is not None:
        drop_refused(refused_directory(out))
    if console is not None:
        page = out / PAGE
        print_report(
            console,
            report,
            expected=prediction.expected if prediction else None,
            tokens=inputs.plan.tokens,
            seconds=seconds,
            page=page,
        )
    return calibration


def progress_directory(out: Path) -> Path:
    """Returns the directory that keeps the finished work of a run that writes `out`."""
    return out.absolute().with_name(f"{out.name}.progress")


def _device(requested: Literal["auto", "cpu", "cuda"]) -> str:
    if requested != "auto":
        return requested
    return "cuda" if torch.cuda.is_available() else "cpu"
