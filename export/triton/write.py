"""calibration + checkpoint → entries of a Triton model repository.

An entry is a directory with its model's name. It has manifest.json, golden.json, config.pbtxt, the
inputs in `warmup`, and the version `1`, which holds the whole model:
  python       1/model.py and 1/onnx, or 1/engine: Octet's embedded engine
  vllm         1/model.py, 1/model.json and 1/checkpoint: Triton's vLLM backend
  onnxruntime  1/model.onnx: one step of the decoder, in ONNX Runtime
  tensorrt     1/model.plan: one step of the decoder, in TensorRT
The first two have the vLLM backend's inputs and outputs, so that one client works with either.
Triton ignores the files that it does not know.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export.accuracy_gate import Judge
from export.source import Source, require_space
from export.triton.config_text import pbtxt
from export.triton.contents import WRITERS, Backend, Inputs, Job, Plan, check_kernels
from export.triton.entries import Tuning
from octet.artifacts.golden import GOLDEN_FILE
from octet.artifacts.manifest import Manifest, check_destination, write_artifact
from octet.artifacts.scenarios import SCENARIOS_FILE
from octet.errors import ConfigError, UnsupportedError

__all__ = ["Backend", "Entries", "all_entries", "export_all", "export_triton"]

VERSION = "1"
_DEFAULT = Tuning()
CONFIG_FILE = "config.pbtxt"

# The entries of `export_all`, by suffix of the name: (backend, True if it runs an engine).
_ALL: dict[str, tuple[Backend, bool]] = {
    "": ("python", False),
    "-vllm": ("vllm", False),
    "-onnxruntime": ("onnxruntime", False),
    "-engine": ("python", True),
    "-tensorrt": ("tensorrt", True),
}
# Details copied from the content's manifest to the entry's.
_KEPT = ("warnings", "algorithm", "folded", "expected_divergence", "predicted", "gate")
_NO_ENGINE = "no engine was given: --engine ENGINE, written by `octet build-engine`"


@dataclass(frozen=True)
class Entries:
    """The result for each entry of a repository: its manifest, or why it was left out."""

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
    tuning: Tuning = _DEFAULT,
    force: bool = False,
    judge: Judge | None = None,
) -> Manifest:
    """Writes the entry `out`, a directory with its model's name, in a model repository.

    `engine` is a directory of `build-engine` from the same calibration. `tensorrt` serves it, and
    `python` runs it in place of the ONNX export. `judge` may refuse the entry's content. Raises
    ConfigError if `name` is not that of the directory (Triton would not load such an entry), and
    UnsupportedError for a model that the backend cannot run.
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
    paths = [calibration] if engine is None else [calibration, engine]
    check_destination(out, force=force, inputs=paths)
    plan = None if engine is None else Plan.open(engine, calibration)
    inputs = Inputs(calibration, model, plan, judge)
    return _write_entry(out, backend, inputs, tuning=tuning, force=force)


def _write_entry(
    out: Path, backend: Backend, inputs: Inputs, *, tuning: Tuning = _DEFAULT, force: bool
) -> Manifest:
    with write_artifact(out, force=force) as writer:
        version = writer.path / VERSION
        version.mkdir()
        write = WRITERS[backend]
        entry, content, where = write(Job(out, inputs, version))
        config = tuning.applied(entry.config)
        (writer.path / CONFIG_FILE).write_text(pbtxt(config), "utf-8")
        for file, data in entry.warmup.items():
            (writer.path / "warmup").mkdir(exist_ok=True)
            (writer.path / "warmup" / file).write_bytes(data)
        for file in (GOLDEN_FILE, SCENARIOS_FILE):
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
    """Fills `repository` with every entry that can be written from the inputs.

    They are `name` (default: the model's) for the Python backend, and with suffixes `-vllm`,
    `-onnxruntime` and, with an `engine`, `-engine` (the Python backend on it) and `-tensorrt`. An
    entry that its backend cannot run is left out, with the reason. A refusal by `judge` ends the
    export; entries written before it stay. The inputs, the destinations and the space for all
    entries are checked before the first is written.
    """
    repository = repository.absolute()
    name = name or Manifest.load(calibration, "calibration", verify=False).model.name
    paths = [calibration] if engine is None else [calibration, engine]
    for entry in all_entries(calibration, repository, name):
        check_destination(entry, force=force, inputs=paths)
    plan = None if engine is None else Plan.open(engine, calibration)
    # Shards are not hashed here, because each entry hashes them itself.
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
        inputs = Inputs(calibration, model, plan if on_engine else None, judge)
        out = repository / f"{name}{suffix}"
        try:
            entries.manifests[out.name] = _write_entry(out, backend, inputs, force=force)
        except UnsupportedError as error:
            entries.left_out[out.name] = str(error)
    return entries


def all_entries(calibration: Path, repository: Path, name: str | None = None) -> list[Path]:
    """Lists the entries that `export_all` may write."""
    name = name or Manifest.load(calibration, "calibration", verify=False).model.name
    return [repository.absolute() / f"{name}{suffix}" for suffix in _ALL]


def _nbytes(source: Source, backend: Backend, plan: Plan | None, *, on_engine: bool) -> int:
    """Returns the entry's size without small files.

    Raises UnsupportedError if there can be no such entry.
    """
    if on_engine:
        if plan is None:
            raise UnsupportedError(_NO_ENGINE)
        return plan.nbytes
    if backend == "vllm":
        return source.stored_nbytes()
    from export.onnx.cache import CACHES
    from export.onnx.decoder import build_decoder

    if backend == "onnxruntime":
        check_kernels(source.calibration.manifest)
    return build_decoder(source, CACHES[source.kv_cache]).weight_bytes


def _manifest(content: Manifest, backend: Backend, name: str, where: str) -> Manifest:
    details: dict[str, Any] = {"backend": backend, "name": name}
    details["content"] = f"{VERSION}/{where}".rstrip("/")
    details |= {key: content.details[key] for key in _KEPT if key in content.details}
    return content.model_copy(update={"kind": "triton", "details": details})
