"""calibration + checkpoint → entries of a Triton model repository.

An entry is a directory named as its model: manifest.json, golden.json, config.pbtxt, the inputs in
`warmup`, and the version `1`, which holds the whole model:
  python       1/model.py and 1/onnx, or 1/engine: Octet's embedded engine
  vllm         1/model.py, 1/model.json and 1/checkpoint: Triton's vLLM backend
  onnxruntime  1/model.onnx: one step of the decoder, in ONNX Runtime
  tensorrt     1/model.plan: one step of the decoder, in TensorRT
The first two take and give the vLLM backend's tensors, so that one client serves for either. Triton
ignores the files that it does not know.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from export.judging import Judge
from export.source import Source, require_space
from export.triton_entries import SLOTS, Entry, python_entry, vllm_engine, vllm_entry
from export.triton_plan import Plan
from export.triton_text import pbtxt
from octet.artifact import Manifest, check_destination, write_artifact
from octet.errors import ConfigError, UnsupportedError
from octet.golden import GOLDEN_FILE
from octet.hypotheses import HYPOTHESES_FILE

__all__ = ["Backend", "Entries", "all_entries", "export_all", "export_triton"]

Backend = Literal["python", "vllm", "tensorrt", "onnxruntime"]

VERSION = "1"
CONFIG_FILE = "config.pbtxt"

# What `export_all` writes, by suffix of the entry's name: the backend, and whether on an engine.
_ALL: dict[str, tuple[Backend, bool]] = {
    "": ("python", False),
    "-vllm": ("vllm", False),
    "-onnxruntime": ("onnxruntime", False),
    "-engine": ("python", True),
    "-tensorrt": ("tensorrt", True),
}
# Of the content's manifest, in that of the entry too: what is doubtful, changed and expected.
_KEPT = ("warnings", "algorithm", "expected_divergence", "gate")
_NO_ENGINE = "no engine was given: --engine ENGINE, written by `octet build-engine`"


@dataclass(frozen=True)
class Entries:
    """What became of each entry of a repository: its manifest, or why it was left out."""

    manifests: dict[str, Manifest] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def export_triton(
    calibration: Path,
    out: Path,
    *,
    backend: Backend = "python",
    engine: Path | None = None,
    model: Path | None = None,
    name: str | None = None,
    force: bool = False,
    judge: Judge | None = None,
) -> Manifest:
    """Writes the entry `out`, a directory named as its model, in a model repository.

    `engine` is a directory of `build-engine` from the same calibration: what `tensorrt` serves, and
    what `python` then runs in place of the ONNX export. `judge` may refuse what it holds. Raises
    ConfigError if `name` is not that of the directory (Triton would not load such an entry),
    UnsupportedError for what the backend cannot run.
    """
    out = out.absolute()
    name = name or out.name
    if name != out.name:
        raise ConfigError(
            f"{out}: Triton wants the directory named as its model, '{name}';"
            f" use --out {out.parent / name}"
        )
    if backend == "tensorrt" and engine is None:
        raise ConfigError(f"--backend tensorrt serves a plan; {_NO_ENGINE}")
    if engine is not None and backend not in ("python", "tensorrt"):
        raise ConfigError(f"--engine is for --backend python or tensorrt, not {backend}")
    inputs = [calibration] if engine is None else [calibration, engine]
    check_destination(out, force=force, inputs=inputs)
    plan = None if engine is None else Plan.open(engine, calibration)
    return _write_entry(out, backend, _Inputs(calibration, model, plan, judge), force=force)


def _write_entry(out: Path, backend: Backend, inputs: "_Inputs", *, force: bool) -> Manifest:
    with write_artifact(out, force=force) as writer:
        version = writer.path / VERSION
        version.mkdir()
        write = _WRITERS[backend]
        entry, content, where = write(_Job(out, inputs, version))
        (writer.path / CONFIG_FILE).write_text(pbtxt(entry.config))
        for file, data in entry.warmup.items():
            (writer.path / "warmup").mkdir(exist_ok=True)
            (writer.path / "warmup" / file).write_bytes(data)
        for file in (GOLDEN_FILE, HYPOTHESES_FILE):
            if (version / where / file).is_file():
                shutil.copyfile(version / where / file, writer.path / file)
        return writer.finish(_manifest(content, backend, out.name, where))


def export_all(
    calibration: Path,
    repository: Path,
    *,
    engine: Path | None = None,
    name: str | None = None,
    model: Path | None = None,
    force: bool = False,
    judge: Judge | None = None,
) -> Entries:
    """Fills `repository` with every entry that can be written from what is given.

    They are `name` (default: the model's) for the Python backend, and beside it `-vllm`,
    `-onnxruntime` and, with an `engine`, `-engine` (the Python backend on it) and `-tensorrt`. What
    a backend cannot run is left out, with the reason; what `judge` refuses ends it, and entries
    that are there by then stay. Before the first entry is written, all that
    can be known is raised: of both inputs, of the destinations, and of the space for all of them.
    """
    repository = repository.absolute()
    name = name or Manifest.load(calibration, "calibration", verify=False).model.name
    paths = [calibration] if engine is None else [calibration, engine]
    for entry in all_entries(calibration, repository, name):
        check_destination(entry, force=force, inputs=paths)
    plan = None if engine is None else Plan.open(engine, calibration)
    # Each entry hashes the shards of the checkpoint by itself.
    source = Source.open(calibration, model, shards=False)
    entries, sizes = Entries(), dict[str, int]()
    for suffix, (backend, on_engine) in _ALL.items():
        try:
            sizes[suffix] = _nbytes(source, backend, plan, on_engine=on_engine)
        except UnsupportedError as error:
            entries.left_out[f"{name}{suffix}"] = str(error)
    require_space(repository, sum(sizes.values()))
    for suffix in sizes:
        backend, on_engine = _ALL[suffix]
        inputs = _Inputs(calibration, model, plan if on_engine else None, judge)
        out = repository / f"{name}{suffix}"
        try:
            entries.manifests[out.name] = _write_entry(out, backend, inputs, force=force)
        except UnsupportedError as error:
            entries.left_out[out.name] = str(error)
    return entries


def all_entries(calibration: Path, repository: Path, name: str | None = None) -> list[Path]:
    """Those that `export_all` may write."""
    name = name or Manifest.load(calibration, "calibration", verify=False).model.name
    return [repository.absolute() / f"{name}{suffix}" for suffix in _ALL]


def _nbytes(source: Source, backend: Backend, plan: Plan | None, *, on_engine: bool) -> int:
    """What the entry will hold, but for small files. UnsupportedError where there can be none."""
    if on_engine:
        if plan is None:
            raise UnsupportedError(_NO_ENGINE)
        return plan.nbytes
    if backend == "vllm":
        return source.stored_nbytes()
    from export.onnx_cache import CACHES
    from export.onnx_decoder import build_decoder

    if backend == "onnxruntime":
        _check_kernels(source.calibration.manifest)
    return build_decoder(source, CACHES[source.kv_cache]).weight_bytes


@dataclass(frozen=True)
class _Inputs:
    calibration: Path
    model: Path | None = None  # where the checkpoint is, if not where it was
    plan: Plan | None = None
    judge: Judge | None = None


@dataclass(frozen=True)
class _Job:
    out: Path
    inputs: _Inputs
    version: Path  # the directory to fill

    @property
    def name(self) -> str:
        return self.out.name

    @property
    def judge(self) -> Judge | None:
        """Of what the entry holds, which is refused as the entry."""
        judge = self.inputs.judge
        if judge is None:
            return None
        return lambda directory, manifest, _content: judge(directory, manifest, self.out)

    def copied_plan(self, directory: Path) -> Manifest:
        """The manifest of the plan that it copies there, with what the judge says of it."""
        assert self.inputs.plan is not None
        manifest = self.inputs.plan.copy(directory)
        told = {} if self.judge is None else self.judge(directory, manifest, directory)
        return manifest.model_copy(update={"details": manifest.details | told})


# The entry, the manifest of what it holds, and where that is in the version.
_Written = tuple[Entry, Manifest, str]


def _write_python(job: _Job) -> _Written:
    template = files("export").joinpath("triton_model.py.txt")
    (job.version / "model.py").write_text(template.read_text())
    if job.inputs.plan is not None:
        batch, length = job.inputs.plan.limits
        entry = python_entry(job.name, on_gpu=True, slots=min(SLOTS, batch), context=length)
        return entry, job.copied_plan(job.version / "engine"), "engine"
    from export.onnx import export_onnx

    given = job.inputs
    content = export_onnx(
        given.calibration, job.version / "onnx", model=given.model, judge=job.judge
    )
    context = content.model.spec.max_positions
    return python_entry(job.name, context=context), content, "onnx"


def _write_vllm(job: _Job) -> _Written:
    from export.checkpoint import export_checkpoint

    given = job.inputs
    content = export_checkpoint(
        given.calibration, job.version / "checkpoint", model=given.model, judge=job.judge
    )
    # From the directory of model.json, where model.py goes; no name of a model on the Hub.
    arguments = vllm_engine("./checkpoint", content.model.spec, content.recipe.kv_cache)
    (job.version / "model.json").write_text(json.dumps(arguments, indent=2) + "\n")
    template = files("export").joinpath("triton_vllm_model.py.txt")
    (job.version / "model.py").write_text(template.read_text())
    return vllm_entry(job.name), content, "checkpoint"


def _write_onnxruntime(job: _Job) -> _Written:
    from export.onnx import export_onnx
    from export.triton_steps import onnxruntime_entry, read_graph

    given = job.inputs
    _check_kernels(Manifest.load(given.calibration, "calibration", verify=False))
    job.version.rmdir()  # the version itself is the export
    content = export_onnx(
        given.calibration, job.version, model=given.model, kv_cache="float16", judge=job.judge
    )
    return onnxruntime_entry(job.name, *read_graph(job.version / "model.onnx")), content, ""


def _check_kernels(calibration: Manifest) -> None:
    """Raises UnsupportedError for weights that ONNX Runtime cannot read as they are written."""
    recipe = calibration.recipe
    schemes = [recipe.scheme_of(linear.name) for linear in calibration.model.spec.linears()]
    if any(scheme is not None and scheme[0].format == "e2m1" for scheme in schemes):
        raise UnsupportedError(
            f"recipe {recipe.name} has FP4, for which ONNX Runtime has no kernel;"
            " --backend python runs it, and mxfp8 or an fp8 recipe runs here"
        )


def _write_tensorrt(job: _Job) -> _Written:
    from export.triton_steps import plan_tensors, tensorrt_entry

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


_WRITERS: dict[Backend, Callable[[_Job], _Written]] = {
    "python": _write_python,
    "vllm": _write_vllm,
    "onnxruntime": _write_onnxruntime,
    "tensorrt": _write_tensorrt,
}


def _manifest(content: Manifest, backend: Backend, name: str, where: str) -> Manifest:
    details: dict[str, Any] = {"backend": backend, "name": name}
    details["content"] = f"{VERSION}/{where}".rstrip("/")
    details |= {key: content.details[key] for key in _KEPT if key in content.details}
    return content.model_copy(update={"kind": "triton", "details": details})
