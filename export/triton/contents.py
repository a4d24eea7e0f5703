"""Fills the version directory of a Triton entry: one writer for each backend.

A `Plan` is the engine directory that an entry of a Triton model repository copies.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from export.accuracy_gate import Judge
from export.source import require_space
from export.triton.entries import SLOTS, Entry, python_entry, vllm_engine, vllm_entry
from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import ArtifactError, UnsupportedError

__all__ = ["WRITERS", "Backend", "Inputs", "Job", "Plan", "check_kernels"]


@dataclass(frozen=True)
class Plan:
    """An engine directory whose files were verified, and that was built from the calibration."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, engine: Path, calibration: Path) -> "Plan":
        manifest = Manifest.load(engine, "engine")
        if manifest.calibration != Manifest.load(calibration, "calibration", verify=False).identity:
            raise ArtifactError(
                f"{engine}: was not built from {calibration}; build it with"
                f" `octet build-engine {calibration}`"
            )
        return cls(engine, manifest)

    def copy(self, destination: Path) -> Manifest:
        """Copies the files that the manifest lists; `destination` may exist."""
        require_space(destination, self.nbytes)
        for name in self._names:
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.path / name, destination / name)
        return self.manifest

    @property
    def _names(self) -> list[str]:
        return [*self.manifest.files, MANIFEST_FILE]

    @property
    def nbytes(self) -> int:
        return sum((self.path / name).stat().st_size for name in self._names)

    @property
    def limits(self) -> tuple[int, int]:
        """Returns the sequences in one decoding step, and the tokens of the longest."""
        return self.manifest.details["max_batch"], self.manifest.details["max_length"]


Backend = Literal["python", "vllm", "tensorrt", "onnxruntime"]


@dataclass(frozen=True)
class Inputs:
    """The inputs from which an entry is made."""

    calibration: Path
    model: Path | None = None  # overrides the path of the checkpoint
    plan: Plan | None = None
    judge: Judge | None = None


@dataclass(frozen=True)
class Job:
    """The entry `out` to be written."""

    out: Path
    inputs: Inputs
    version: Path  # the directory to fill

    @property
    def name(self) -> str:
        return self.out.name

    @property
    def judge(self) -> Judge | None:
        """Returns the judge of the entry's content; its errors name the entry, not the content."""
        judge = self.inputs.judge
        if judge is None:
            return None
        return lambda directory, manifest, _content: judge(directory, manifest, self.out)

    def copied_plan(self, directory: Path) -> Manifest:
        """Copies the plan to `directory`; returns its manifest with the details of the judge."""
        assert self.inputs.plan is not None
        manifest = self.inputs.plan.copy(directory)
        judged = {} if self.judge is None else self.judge(directory, manifest, directory)
        return manifest.model_copy(update={"details": manifest.details | judged})


# The entry, the manifest of its content, and the path of the content in the version directory.
_Written = tuple[Entry, Manifest, str]


def _write_python(job: Job) -> _Written:
    template = files("export.triton").joinpath("triton_model.py.txt")
    (job.version / "model.py").write_text(template.read_text("utf-8"), "utf-8")
    if job.inputs.plan is not None:
        batch, length = job.inputs.plan.limits
        entry = python_entry(job.name, on_gpu=True, slots=min(SLOTS, batch), context=length)
        return entry, job.copied_plan(job.version / "engine"), "engine"
    from export.onnx.write import export_onnx

    given = job.inputs
    content = export_onnx(
        given.calibration, job.version / "onnx", model=given.model, judge=job.judge
    )
    context = content.model.spec.max_positions
    return python_entry(job.name, context=context), content, "onnx"


def _write_vllm(job: Job) -> _Written:
    from export.checkpoint.write import export_checkpoint

    given = job.inputs
    content = export_checkpoint(
        given.calibration, job.version / "checkpoint", model=given.model, judge=job.judge
    )
    # A path relative to model.json, to whose directory model.py changes. Without "./", vLLM would
    # take it for a model on the Hub.
    arguments = vllm_engine("./checkpoint", content.model.spec, content.recipe.kv_cache)
    (job.version / "model.json").write_text(json.dumps(arguments, indent=2) + "\n", "utf-8")
    template = files("export.triton").joinpath("triton_vllm_model.py.txt")
    (job.version / "model.py").write_text(template.read_text("utf-8"), "utf-8")
    return vllm_entry(job.name), content, "checkpoint"


def _write_onnxruntime(job: Job) -> _Written:
    from export.onnx.write import export_onnx
    from export.triton.step_entries import onnxruntime_entry, read_graph

    given = job.inputs
    check_kernels(Manifest.load(given.calibration, "calibration", verify=False))
    job.version.rmdir()  # the export becomes the version directory itself
    content = export_onnx(
        given.calibration, job.version, model=given.model, kv_cache="float16", judge=job.judge
    )
    return onnxruntime_entry(job.name, *read_graph(job.version / "model.onnx")), content, ""


def check_kernels(calibration: Manifest) -> None:
    """Raises UnsupportedError for weights that ONNX Runtime cannot read as written (FP4)."""
    recipe = calibration.recipe
    schemes = [recipe.scheme_of(linear.name) for linear in calibration.model.spec.linears()]
    if any(scheme is not None and scheme[0].format == "e2m1" for scheme in schemes):
        raise UnsupportedError(
            f"recipe {recipe.name} has FP4, for which ONNX Runtime has no kernel;"
            " --backend python runs it, and mxfp8 or an fp8 recipe runs here"
        )


def _write_tensorrt(job: Job) -> _Written:
    from export.triton.step_entries import plan_tensors, tensorrt_entry

    plan = job.inputs.plan
    assert plan is not None
    facts = plan.manifest.details
    builder = facts["builder"]["name"]
    if "rtx" in builder.lower():
        raise UnsupportedError(
            f"{plan.path}: Triton's tensorrt backend loads no plan of {builder};"
            " use --backend python, or build with --builder tensorrt on the GPU that will serve"
        )
    inputs, outputs = plan_tensors(plan.manifest.model.spec, facts["kv_cache"]["dtype"])
    if facts["profiles"]["decode"].keys() != {tensor.name for tensor in inputs}:
        raise UnsupportedError(f"{plan.path}: its inputs are not this release's; build it again")
    batch, length = plan.limits
    entry = tensorrt_entry(job.name, inputs, outputs, max_batch=batch, max_length=length)
    return entry, job.copied_plan(job.version), ""


WRITERS: dict[Backend, Callable[[Job], _Written]] = {
    "python": _write_python,
    "vllm": _write_vllm,
    "onnxruntime": _write_onnxruntime,
    "tensorrt": _write_tensorrt,
}
