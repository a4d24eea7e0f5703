"""Runs a calibration, from a checkpoint and samples to the artifact."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from calibrate.algorithms.apply import ChangedModel, changed_model
from calibrate.choose_algorithm import UNCHANGED, check_held_out, choose_algorithm
from calibrate.decoder.loading import ComputeDtype, resolve_dtype
from calibrate.decoder.supported import require_runnable
from calibrate.decoder.weights import LayerWeights, full_gpu
from calibrate.golden import described, examined, golden_set
from calibrate.job import Job
from calibrate.journal.distributed import Group, gpu_failures, process_group
from calibrate.journal.identity import (
    arithmetic_of,
    digest_of_batches,
    run_identity,
    setting_identity,
)
from calibrate.journal.journal import discard, record_threads, stale
from calibrate.journal.steps import Steps
from calibrate.observe.counting_cpu import make_counter
from calibrate.observe.sweep import Observed, observe_checkpoint
from calibrate.options import Options, validate
from calibrate.quality.budget import check_samples
from calibrate.quality.refused import drop_refused, refused_directory
from calibrate.recover import recover
from calibrate.report.console import print_report
from calibrate.report.document import Report
from calibrate.samples.inputs import Inputs, read_inputs
from calibrate.scales.derive import Quantization, check_finite
from calibrate.scales.folding import Folding, find_folds, shifted
from calibrate.simulate.predict import Prediction, expected_divergence
from calibrate.solve import Solution, solve
from calibrate.write_report import PAGE, keep_evidence, report_files, report_on
from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import GoldenSet
from octet.artifacts.manifest import Manifest, software
from octet.artifacts.provenance import ModelIdentity
from octet.errors import ArtifactError, ConfigError, GateError, SampleError
from octet.hardware.support import used_of
from octet.model.folding import describe_folds
from octet.progress import progress_bar

__all__ = ["run"]

LAYERS = "layers"  # the journal's directory, below `options.progress`


@gpu_failures()
@full_gpu(
    "stop what else uses the GPU, leave out what holds the whole model there (--sensitivity,"
    " --budget, --max-kl, --max-ppl-change, --algorithm; `octet recover` does if it fits), or give"
    " --device cpu --restart"
)
def run(options: Options, *, console: Console | None = None) -> Calibration | None:
    """Calibrates a checkpoint on samples, and writes `options.out`.

    Finished work is kept in `options.progress` until then: a run that was killed continues from
    there and writes the same bytes.

    Raises a subclass of OctetError for anything that the user can correct, and leaves `out`
    unchanged. GateError means that the recipe costs more than the accuracy gate allows: its report
    is then in `<out>.refused`, and the next call continues without observing. Of the processes that
    torchrun starts, the first writes `out`; the others return None.
    """
    checkpoint = validate(options)
    require_runnable(checkpoint)
    inputs = read_inputs(checkpoint, options)
    _check_evaluation(options, inputs)
    dtype = resolve_dtype(options.dtype, checkpoint)
    with process_group(options.device) as (group, device):
        if options.algorithm not in (None, "recover") and group.world > 1:
            raise ConfigError(f"{options.algorithm} runs in one process: start it without torchrun")
        shown = console if group.rank == 0 else None
        resumed = group.on_first(partial(_resumes, options, inputs, dtype, device, shown))
        weights = LayerWeights(checkpoint, device, say=partial(_say, shown))
        job = Job(options, checkpoint, inputs, dtype, device, weights, group, shown)
        _announce(job, resumed)
        check_finite(checkpoint, shown, group)  # also hashes the files, on which the steps depend
        steps = _steps(job)
        changed = _changed(job, steps)
        golden, changed, solved, seconds = _observe(job, changed, steps)
        group.attempt(lambda: _judge(job, solved, golden))
        prediction, report = _predict(job, changed, golden, solved, steps)
        if solved is None or report is None:
            return None
        calibration = _write(job, solved, golden, report, prediction)
    if console is not None:
        print_report(
            console,
            report,
            tokens=inputs.plan.tokens,
            seconds=None if resumed else seconds,
            page=options.out / PAGE,
        )
    return calibration


def _check_evaluation(options: Options, inputs: Inputs) -> None:
    """Raises ConfigError if held-out samples are too few for the budget or the gate.

    Raises SampleError if a training could see them.
    """
    if options.training is not None and (shared := inputs.split.shared):
        raise SampleError(
            f"{shared} of the held-out samples are also training samples, on which the result would"
            " look better than it is: give others with --held-out, or a smaller --count"
        )
    if options.algorithm == "auto":
        check_held_out(inputs.evaluated_on)
    if options.budget is not None:
        check_samples(options.budget, inputs.evaluation)
    if options.gate is not None:
        lengths = [length for batch in inputs.evaluation for length in batch.lengths]
        remedy = "give more with --held-out, or a smaller --count"
        options.gate.check_samples(lengths, inputs.evaluated_on, remedy)


def _resumes(
    options: Options,
    inputs: Inputs,
    dtype: ComputeDtype,
    device: torch.device,
    console: Console | None,
) -> bool:
    """Decides whether there is a journal to continue from, before any weight is read.

    Raises ArtifactError for one of another run, unless --restart or --force discards it.
    """
    if options.restart or not options.progress.exists():
        return False
    identity = setting_identity(
        inputs.plan.batches,
        dtype,
        device,
        queries=options.recipe.kv_cache == "e4m3",
    )
    reason = stale(_journal(options), identity)
    if reason is None:
        return True
    if not options.force:
        raise ArtifactError(reason)
    _say(console, f"starting over: {reason.partition(';')[0]}")
    return False


def _announce(job: Job, resumed: bool) -> None:
    _say(job.console, job.inputs.plan.summary())
    if resumed:
        _say(job.console, f"continuing from {job.options.progress}")
    if job.device.type == "cuda":
        _say(job.console, str(job.weights))


def _say(console: Console | None, line: str) -> None:
    if console is not None:
        console.print(line, highlight=False, markup=False)


def _changed(job: Job, steps: Steps) -> ChangedModel:
    """Changes the weights if an algorithm is wanted."""
    if job.options.algorithm != "auto":
        return _apply_algorithm(job, steps, job.options.algorithm, "algorithm")

    def change(name: str) -> ChangedModel:
        return _apply_algorithm(job, steps, None if name == UNCHANGED else name, name)

    def quantize(plain: Job, changed: ChangedModel) -> Quantization:
        observed, _ = _count(plain, changed, plain.group)
        assert observed is not None  # one process
        return _solve(plain, changed, observed, steps).solution.quantization

    return choose_algorithm(job, steps, change, quantize)


def _apply_algorithm(job: Job, steps: Steps, algorithm: str | None, directory: str) -> ChangedModel:
    options, training = job.options, job.options.training
    return changed_model(
        job.checkpoint,
        algorithm,
        options.recipe,
        job.inputs.plan.batches,
        options.progress / directory,
        dtype=job.dtype,
        device=job.device,
        restart=options.restart,
        force=options.force,
        console=job.console,
        compute=None if training is None else partial(recover, job, training, steps),
        settings=_settings(job),
        group=job.group,
    )


def _settings(job: Job) -> str:
    """Identifies what a training's result depends on, and the text that its gain is measured on."""
    training = job.options.training
    if training is None:
        return ""
    weight_only = "".join(job.options.weight_only)
    return training.key + weight_only + digest_of_batches(job.inputs.evaluation)


@dataclass(frozen=True)
class Solved:
    """Holds what rank 0 derives: the model with folded cache scales, its counts, and the scales."""

    folding: Folding
    changed: ChangedModel
    observed: Observed
    solution: Solution


def _observe(
    job: Job, changed: ChangedModel, steps: Steps
) -> tuple[GoldenSet, ChangedModel, Solved | None, float]:
    """Computes golden records, counts activations and derives the scales.

    Returns the golden records; the model with folded cache scales, for all later steps; what rank 0
    derived (None on other ranks); and the seconds of counting.

    If there are several ranks, the last one computes the golden records, and counts nothing, while
    the others count. Scales that need no run of the model are derived meanwhile, too.
    """
    prompts, group = job.inputs.prompts, job.group
    inputs = json.dumps(prompts)
    kept = group.on_first(partial(steps.load, "golden", inputs))
    apart = group.world > 1 and not kept
    observers: Group | None = group
    if apart:
        observers = group.without_last()
        _say(job.console, "the last process computes golden records, while the others count")
    seconds = 0.0

    def solved_by_first(observed: Observed | None) -> Solved | None:
        if observed is None or group.rank != 0:
            return None
        return _solve(job, changed, observed, steps)

    def work() -> tuple[GoldenSet | None, Observed | None, Solved | None]:
        nonlocal seconds
        observed = solved = None
        golden = GoldenSet.model_validate_json(kept[0]) if kept else None
        if observers is not None:
            observed, seconds = _count(job, changed, observers)
        if apart and not job.options.measures:
            solved = solved_by_first(observed)
        if golden is None and (observers is None or not apart):
            golden = _golden_records(job)
            # Kept before ranks wait for each other: another one may fail or be stopped.
            steps.keep("golden", inputs, text=golden.model_dump_json(), arrays={})
        return golden, observed, solved

    golden, observed, solved = group.attempt(work)
    golden = group.gather(golden)[-1]
    assert golden is not None
    golden = described(golden, job.inputs.scope, job.inputs.lists)
    solved = group.attempt(lambda: solved or solved_by_first(observed))
    folding = group.gather(solved and solved.folding)[0]
    for line in describe_folds(job.checkpoint.spec, folding.folds):
        _say(job.console, line)
    return golden, _folded(changed, folding), solved, seconds


def _count(job: Job, changed: ChangedModel, observers: Group) -> tuple[Observed, float]:
    """Counts activations, as one of `observers`; also returns the seconds that it took."""
    options, plan = job.options, job.inputs.plan
    make_counter(job.device, 1).close()  # compiles now, so that the timing is of counting alone
    with progress_bar(job.console, "Calibrating", plan.tokens) as advance:
        started = time.perf_counter()
        observed = observe_checkpoint(
            changed.checkpoint,
            plan.batches,
            dtype=job.dtype,
            device=job.device,
            weights=job.weights.of(changed.checkpoint),
            chunks=len(plan.chunk_ends),
            queries=options.recipe.kv_cache == "e4m3",
            spill=options.spill,
            journal=_journal(options, changed),
            restart=options.restart,
            force=options.force,
            group=observers,
            advance=advance,
        )
    seconds = time.perf_counter() - started
    return replace(observed, facts=observed.facts | {"processes": job.group.world}), seconds


def _journal(options: Options, changed: ChangedModel | None = None) -> Path:
    """Returns the directory for counts; with --algorithm auto, each algorithm has its own."""
    if options.algorithm != "auto":
        return options.progress / LAYERS
    algorithm = {} if changed is None else changed.details.get("algorithm", {})
    return options.progress / f"{LAYERS}-{algorithm.get('name', UNCHANGED)}"


def _golden_records(job: Job) -> GoldenSet:
    prompts = job.inputs.prompts
    console = job.console if job.group.world == 1 else None
    tokens = sum(len(ids) for _, ids in prompts)
    with progress_bar(console, "Golden records", tokens) as advance:
        return golden_set(
            job.checkpoint, prompts, device=job.device, weights=job.weights, advance=advance
        )


def _solve(job: Job, changed: ChangedModel, observed: Observed, steps: Steps) -> Solved:
    """Folds cache scales, if there are any, into the weights, and derives all scales."""
    folding = find_folds(
        changed.checkpoint, observed.histograms, observed.observations, changed.scales
    )
    changed = _folded(changed, folding)
    if folding.folds:
        counts = shifted(folding.folds, observed.histograms, observed.observations)
        observed = replace(observed, histograms=counts)
    return Solved(folding, changed, observed, solve(job, changed, observed, steps))


def _folded(changed: ChangedModel, folding: Folding) -> ChangedModel:
    changed = replace(changed, unfolded=folding.refused)
    if not folding.folds:
        return changed
    return replace(
        changed,
        checkpoint=changed.checkpoint.with_folds(folding.folds),
        details=changed.details | {"folded": folding.folds},
    )


def _steps(job: Job) -> Steps:
    """Returns the store of finished steps, which lasts until the artifact is written."""
    directory = job.options.progress / "steps"
    if job.options.restart:
        job.group.on_first(partial(shutil.rmtree, directory, ignore_errors=True))
    identity = run_identity(job.checkpoint, (), "float32", job.device)
    job.group.on_first(partial(record_threads, directory, identity))
    return Steps(directory, identity)


def _report(job: Job, solved: Solved) -> Report:
    return report_on(job, solved.changed, solved.solution, solved.observed)


def _judge(job: Job, solved: Solved | None, golden: GoldenSet) -> None:
    """Raises GateError, and keeps the report, if the recipe costs more than the gate allows."""
    if solved is None or solved.solution.gate is None or solved.solution.gate.met:
        return
    raise _refused(job, solved.solution, _report(job, solved), golden)


def _refused(job: Job, solution: Solution, report: Report, golden: GoldenSet) -> GateError:
    """Keeps the report of a failed gate, and returns the error to raise."""
    options, gate = job.options, solution.gate
    assert gate is not None
    refused = refused_directory(options.out)
    scales = solution.quantization.scales
    page = keep_evidence(refused, report, solution.convergence, scales, golden, gate)
    if job.console is not None:
        print_report(job.console, report, page=page)
    command = "calibrate"
    again = f"calibrate again (it continues from {options.progress}, without observing)"
    if options.training is not None:  # recover itself has no --exclude, --kv-cache and --budget
        command, again = "recover", "recover from what `octet calibrate` writes"
    budget = None if options.algorithm == "gptq" else again
    return gate.error(options.out, refused, again=again, budget=budget, command=command)


def _predict(
    job: Job, changed: ChangedModel, golden: GoldenSet, solved: Solved | None, steps: Steps
) -> tuple[Prediction | None, Report | None]:
    """Predicts the divergence of each serving path, and builds the report meanwhile.

    There is no prediction for an unknown architecture, or if none is wanted. The ranks share the
    scenarios; rank 0 builds the report.
    """
    with ThreadPoolExecutor(1) as pool:
        building = None if solved is None else pool.submit(_report, job, solved)
        prediction = _prediction(job, changed, golden, solved, steps)
    report = job.group.attempt(lambda: None if building is None else building.result())
    if report is not None:
        expected = prediction.expected if prediction else None
        report = replace(report, expected=expected, examined=examined(golden))
    return prediction, report


def _prediction(
    job: Job, changed: ChangedModel, golden: GoldenSet, solved: Solved | None, steps: Steps
) -> Prediction | None:
    if not job.options.predict:
        return None
    found = None if solved is None else solved.solution.quantization
    recipe = job.group.gather(None if found is None else found.recipe)[0]
    scales = job.group.share({} if found is None else found.scales)
    return expected_divergence(
        changed.checkpoint,
        recipe,
        scales,
        golden,
        device=job.device,
        layers=job.weights.of(changed.checkpoint),
        steps=steps,
        group=job.group,
        console=job.console,
    )


def _write(
    job: Job,
    solved: Solved,
    golden: GoldenSet,
    report: Report,
    prediction: Prediction | None,
) -> Calibration:
    """Writes the artifact, and removes the work that was kept for a continued run."""
    options, solution = job.options, solved.solution
    changed, observed = solved.changed, solved.observed
    details: dict[str, Any] = {
        "source": str(options.model.absolute()),
        "compute_dtype": job.dtype,
        **observed.facts,
        **changed.details,
        **({"prediction": arithmetic_of(job.device)} if options.predict else {}),
        "predicted": prediction is not None,
        "held_out": job.inputs.split.facts,
        "warnings": list(report.warnings),
    }
    if options.chosen is not None:
        details["chosen"] = dict(options.chosen)
    if exact := used_of(options.weight_only, solution.quantization.recipe):
        details["runs_weight_only"] = list(exact)
    if solution.budget is not None:
        kept = ("metric", "limit", "reached", "bound", "met", "evaluated_on")
        details["budget"] = {key: solution.budget[key] for key in kept}
    if solution.gate is not None:
        details["gate"] = solution.gate.details()
    calibration = Calibration.save(
        options.out,
        Manifest(
            kind="calibration",
            model=ModelIdentity.of(job.checkpoint, options.name),
            recipe=solution.quantization.recipe,
            samples=job.inputs.sample_set,
            details=details,
            software=software("numpy", "torch", "transformers", "tokenizers", "numba"),
        ),
        observed.observations,
        observed.histograms,
        solution.quantization.scales,
        golden,
        mean_squares=observed.mean_squares,
        extra_files=report_files(report, solution.convergence, prediction) | changed.files,
        force=options.force,
    )
    discard(options.progress)
    if solution.gate is not None:
        drop_refused(refused_directory(options.out))
    return calibration
