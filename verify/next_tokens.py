"""Compares the next tokens of an export with the original's, on the golden prompts.

It joins two stages, because no stage may import another.

| artifact                 | how its next tokens are computed                                      |
|--------------------------|-----------------------------------------------------------------------|
| checkpoint of Octet      | `calibrate.simulate.predict` with the weights and scales of its files |
| ONNX for ONNX Runtime    | by the graph itself, in ONNX Runtime, through its own cache           |
| engine                   | by the plan itself, if this machine can run it                        |
| Triton entry             | as for the model that it holds                                        |

What cannot be computed here is added to `unchecked`, with the reason, so an exit code of 0 means
that the next tokens are right. Another tool's checkpoint has no golden records to compare with, so
this promise does not cover it.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from octet.artifacts.golden import GOLDEN_FILE, GoldenSet
from octet.artifacts.manifest import MANIFEST_FILE, PLAN_FILE, Manifest
from octet.artifacts.serving_path import (
    EXPECTED_FILE,
    Expectation,
    ExpectedSet,
    ServingPath,
    bound_of,
)
from octet.errors import ExportError
from octet.model.spec import ModelSpec
from octet.progress import progress_bar
from octet.recipe import KvCacheDtype
from verify.checks.cache import cache_of
from verify.checks.findings import Divergence, Verification
from verify.checks.names import cache_scale_of
from verify.checks.original import Original
from verify.checks.triton import held_models
from verify.reader.checkpoint import Written

__all__ = ["add_divergence", "written_scales", "written_weight"]

_BLOCKING = ("files", "names", "configuration")  # problems that leave nothing to run


def add_divergence(found: Verification, *, console: Console | None = None) -> None:
    """Adds the divergence of the next tokens from the original's, or the reason it is left out."""
    if found.kind in ("calibration", "pack") or not (found.path / MANIFEST_FILE).is_file():
        return
    if blocking := {problem.check for problem in found.problems} & {*_BLOCKING}:
        found.notes.append(
            f"next tokens are left out: problems of {' and '.join(sorted(blocking))} come first"
        )
        return
    manifest = Manifest.load(found.path, verify=False)
    directory = found.path
    if manifest.kind == "triton":
        held = next((d for d in held_models(found.path) if (d / MANIFEST_FILE).is_file()), None)
        if held is None:
            if not found.unchecked:
                found.unchecked.append(
                    f"next tokens: what the entry holds has no {MANIFEST_FILE} of its own"
                )
            return
        directory, manifest = held, Manifest.load(held, verify=False)
    if not (directory / GOLDEN_FILE).is_file():
        found.unchecked.append(f"next tokens: it holds no golden records ({GOLDEN_FILE})")
        return
    if manifest.kind in ("onnx", "engine"):
        _of_runner(directory, manifest, found)
    elif found.original is not None:  # otherwise `unchecked` already says so
        _of_checkpoint(directory, manifest, found.original, found, console)


def _of_checkpoint(
    directory: Path,
    manifest: Manifest,
    original: Original,
    found: Verification,
    console: Console | None,
) -> None:
    from calibrate.decoder.arithmetic import fit_threads
    from calibrate.simulate.predict import predict

    fit_threads()
    written = Written.open(directory)
    exported = manifest.details.get("kv_cache")
    cache: KvCacheDtype = cache_of(written, manifest.recipe.kv_cache, exported)
    if manifest.model.spec.generic:
        cache = "float16"
        found.notes.append(
            "an architecture that Octet does not know: the cache is not rounded in the simulation"
        )
    # Prefers the prediction in float32: most CPUs are slower in bfloat16.
    wanted = _expectation(directory, ServingPath(kv_cache=cache, compute="float32"))
    golden = GoldenSet.load(directory)
    total = sum(len(record.prompt_token_ids) for record in golden.records)
    with progress_bar(console, "Predicting next tokens", total, transient=True) as advance:
        predicted = predict(
            original.checkpoint,
            manifest.recipe,
            written_scales(written, manifest.model.spec),
            golden,
            [wanted.path if isinstance(wanted, Expectation) else wanted],
            weights=lambda name: written_weight(written, name),
            advance=advance,
        )
    measured = predicted.expectations[0]
    how = f"simulated: {measured.path.label}"
    found.divergence = _judged(measured.mean, wanted, manifest, len(golden.records), how)
    if not found.divergence.inside:
        accepted = f"{found.divergence.low:.3g} to {found.divergence.high:.3g}"
        what = f"KL {measured.mean:.3g} nats, outside {accepted} ({found.divergence.source})"
        if not isinstance(wanted, Expectation):
            what += (
                ": the export is broken, or the recipe costs this model more (`octet rescale`"
                " predicts how much)"
            )
        found.problem("divergence", "next tokens", what)


def written_weight(written: Written, module: str) -> NDArray[np.float32]:
    """Returns a weight as stored, in float32: decoded if it is quantized."""
    weight = written.dequantized(module)
    weight = written.values(f"{module}.weight") if weight is None else weight
    written.release()
    return weight


def written_scales(written: Written, spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    """Returns the stored scales of activations and of the cache, under a calibration's names."""
    found: dict[str, NDArray[np.float32]] = {}
    for linear in spec.linears():
        group = written.quantization.group_of(linear.name) if written.quantization else None
        if group is None or group.stored.input_scale is None:
            continue
        value = written.values(f"{linear.name}.{group.stored.input_scale}").reshape(-1)[0]
        key = "input_global_scale" if group.stored.global_scale else "input_scale"
        scale = np.float32(1) / value if group.stored.divides else value
        found[f"{linear.name}.{key}"] = np.asarray(scale, np.float32)
    one = np.ones((), np.float32)  # the default of engines for a missing scale
    for index in range(spec.layers):
        for kind in "kv":
            _cache_scale(found, f"{spec.layer(index)}.self_attn", kind, one)
    dialect = written.quantization.dialect if written.quantization else None
    for name in written.names:
        known = cache_scale_of(name, dialect)
        if known is not None:
            _cache_scale(found, *known, written.values(name).reshape(-1)[0])
    return found


def _cache_scale(
    found: dict[str, NDArray[np.float32]], attention: str, kind: str, scale: Any
) -> None:
    for suffix in ("", "_e4m3", "_e5m2"):
        found[f"{attention}.{kind}_scale{suffix}"] = np.asarray(scale, np.float32)


def _of_runner(directory: Path, manifest: Manifest, found: Verification) -> None:
    """Runs a graph or plan on the golden prompts (prefill, decoding); judges it like a backend."""
    if manifest.kind == "onnx" and manifest.details.get("target", "onnxruntime") != "onnxruntime":
        found.unchecked.append(
            "next tokens: the graph is for TensorRT, which has to build an engine of it first;"
            " `octet build-engine` builds and proves one"
        )
        return
    from serve.engine.golden_check import prove

    file = "model.onnx" if manifest.kind == "onnx" else PLAN_FILE
    try:
        facts = prove(directory)
    except ExportError as error:
        found.problem("divergence", file, str(error).removeprefix(f"{directory}: "))
        return
    if facts["status"] == "unproven":
        found.unchecked.append(f"next tokens: {facts.get('reason', 'it cannot run here')}")
        return
    accepted = facts["accepted"]
    how = "the graph itself, in ONNX Runtime" if manifest.kind == "onnx" else "the plan itself"
    found.divergence = Divergence(
        facts["kl"], accepted["low"], accepted["high"], facts["prompts"], how, accepted["from"]
    )
    found.notes.append(
        f"decoding the last tokens of each prompt instead: KL {facts['kl_decoding']:.3g};"
        f" {facts['tokens_agree']} of {facts['tokens']} greedy tokens are the original's"
    )


def _expectation(directory: Path, path: ServingPath) -> Expectation | ServingPath:
    """Returns the prediction for `path`, else for the same path in bfloat16, else `path` itself."""
    if not (directory / EXPECTED_FILE).is_file():
        return path
    known = ExpectedSet.load(directory)
    same = path.model_copy(update={"compute": "bfloat16"})
    return known.find(path) or known.find(same) or path


def _judged(
    mean: float, wanted: Expectation | ServingPath, manifest: Manifest, prompts: int, how: str
) -> Divergence:
    """Judges a divergence by twice its predicted range in logarithms, as `golden_check` does.

    A conforming repetition falls outside a 95 % range once in twenty times. Without a prediction,
    the bound is that of `serve.engine.golden_check`.
    """
    if isinstance(wanted, Expectation) and wanted.mean > 0:
        low, high = wanted.low**2 / wanted.mean, wanted.high**2 / wanted.mean
        return Divergence(mean, low, high, prompts, how, "twice the predicted range")
    bound, source = bound_of(manifest.recipe)
    return Divergence(mean, 0.0, bound, prompts, how, source)
