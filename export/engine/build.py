"""calibration + checkpoint → a TensorRT engine in the recipe's precision.

Writes manifest.json, model.plan, config.json, tokenizer, golden.json, expected.json.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from export.accuracy_gate import Judge, finish
from export.engine.builder import WORKSPACE_BYTES, Options, Plan, build_plan
from export.engine.library import RTX, BuilderChoice, Gpu, Name, choose, find_gpu, load
from export.engine.profiles import MAX_BATCH, longest_of, profiles_of
from export.engine.report import check_precision, precision_details, print_report
from export.engine.targets import (
    capability,
    check_names,
    check_recipe_on,
    kinds_of,
    resolve_targets,
)
from export.onnx.tensorrt_cache import describe
from export.onnx.tensorrt_decoder import INLINE_LIMIT_BYTES, EngineGraph, engine_graph
from export.source import Source, require_space
from octet.artifacts.manifest import (
    MANIFEST_FILE,
    PLAN_FILE,
    ArtifactWriter,
    Manifest,
    check_destination,
    write_artifact,
)
from octet.model.checkpoint import sha256_file
from octet.recipe import KvCacheDtype

__all__ = ["build_engine"]

PROVEN = "proven: on the golden prompts its divergence is what the recipe costs"
WEAKLY_PROVEN = "weakly proven: nothing was predicted; on the golden prompts it is within a bound"
NOT_RUN = "nothing has executed it"
REPRODUCIBLE = (
    "the graph is, byte for byte (graph_sha256); the plan is not: two builds of it differ"
)

Prove = Callable[[Path], dict[str, Any]]


def build_engine(
    calibration: Path,
    out: Path,
    *,
    model: Path | None = None,
    builder: BuilderChoice = "auto",
    targets: list[str] | None = None,
    kv_cache: KvCacheDtype | None = None,
    max_batch: int = MAX_BATCH,
    max_length: int | None = None,
    usual_batch: int | None = None,
    usual_length: int | None = None,
    quantize: bool = True,
    workspace_bytes: int = WORKSPACE_BYTES,
    timing_cache: Path | None = None,
    optimization_level: int | None = None,
    force: bool = False,
    console: Console | None = None,
    prove: Prove | None = None,
    judge: Judge | None = None,
) -> Manifest:
    """Writes the engine directory `out`; `model` overrides the path of the checkpoint.

    `targets` are compute capabilities such as "sm89". None means this machine's GPU or, without
    one, the targets that TensorRT-RTX builds the recipe for. Sequences have at most `max_length`
    tokens (default: 8192, or the model's limit). The engine is tuned for `usual_batch` sequences
    with `usual_length` cached tokens. `quantize=False` builds the unquantized model, as a baseline;
    its cache defaults to float16. `prove` executes the engine in the directory that it is given,
    and returns facts with a `status` ("proven", "weakly proven" by a bound alone, or "unproven" and
    a `reason`). `judge` may refuse the engine after that.

    Raises UnsupportedError, before anything is parsed, for a builder, a target and a recipe that
    do not go together. Raises ExportError for a graph that TensorRT refuses or would not run as
    written, ArtifactError for a file that is altered while it is read, and whatever `prove` and
    `judge` raise. On an error, nothing is left behind.
    """
    named = None if targets is None else check_names(targets)
    check_destination(out, force=force, inputs=[calibration])
    gpu = find_gpu()
    name = choose(builder, gpu, targets=named is not None)
    if named is not None:
        resolve_targets(name, named, gpu, ())
    if not quantize and kv_cache is None:
        kv_cache = "float16"
    source = Source.open(calibration, model, kv_cache=kv_cache)
    chosen = resolve_targets(name, named, gpu, kinds_of(source) if quantize else ())
    if quantize:
        check_recipe_on(name, chosen, gpu, source)
    options = Options(chosen, workspace_bytes, optimization_level, timing_cache)
    options.check(name)
    build = _Build(name, load(name, gpu, auto=builder == "auto"), gpu, options, source, quantize)
    profiles = profiles_of(
        source.spec, max_batch, max_length, usual_batch=usual_batch, usual_length=usual_length
    )
    graph = engine_graph(source, quantize=quantize)
    require_space(out, (1 + len(chosen)) * graph.graph.weight_bytes)
    with write_artifact(out, force=force) as writer:
        source.copy_side_files(writer.path, quantized=quantize)
        details = build.run(graph, profiles, writer.path, console)
        details |= {
            "profiles": profiles,
            "max_batch": max_batch,
            "max_length": longest_of(source.spec, max_length),
        }
        manifest = finish(writer, _proven(writer, build, details, prove), out, judge)
    if console is not None:
        print_report(console, manifest.details)
    return manifest


@dataclass(frozen=True)
class _Build:
    """One build, with everything decided before the first expensive byte."""

    name: Name
    trt: Any
    gpu: Gpu | None
    options: Options
    source: Source
    quantize: bool

    def run(
        self, graph: EngineGraph, profiles: Any, directory: Path, console: Console | None
    ) -> dict[str, Any]:
        """Writes the plan into `directory`; returns the facts for its manifest.

        The ONNX file is temporary, in a directory beside the plan.
        """
        with tempfile.TemporaryDirectory(prefix="onnx.", dir=directory) as onnx:
            file = graph.graph.save(Path(onnx), inline_limit=INLINE_LIMIT_BYTES)
            self.source.require_unaltered()  # the source is not read after this
            hashes = {path.name: sha256_file(path) for path in sorted(Path(onnx).iterdir())}
            self.source.checkpoint.release()  # unloads its pages: the builder needs the memory
            plan = build_plan(
                self.name, self.trt, file, profiles, self.options, graph.products, console
            )
        targets = self.options.targets
        who = f"{self.name} {self.trt.__version__} for {', '.join(targets)}"
        if self.quantize:
            check_precision(plan.precision, self.source, who)
        path = directory / PLAN_FILE
        path.write_bytes(plan.data)
        return {
            "targets": list(targets),
            "quantized": self.quantize,
            "builder": self._builder(),
            "options": {
                "workspace_bytes": self.options.workspace_bytes,
                "optimization_level": self.options.optimization_level,
                "timing_cache": self.options.timing_cache is not None,
            },
            "opset": graph.graph.opset,
            "graph_sha256": hashes,
            "reproducible": REPRODUCIBLE,
            "kv_cache": describe(self.source.kv_cache),
            **_figures(plan, path),
        }

    def _builder(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "version": self.trt.__version__}
        if self.name == RTX:
            return found | {"targets": list(self.options.targets)}
        assert self.gpu is not None
        own = {"gpu": self.gpu.name, "compute_capability": capability(self.gpu.target)}
        return found | own


def _figures(plan: Plan, path: Path) -> dict[str, Any]:
    return {
        "plan_bytes": path.stat().st_size,
        "build_seconds": round(plan.seconds, 2),
        "scratch_bytes": plan.scratch_bytes,
        "precision": precision_details(plan.precision),
    }


def _proven(
    writer: ArtifactWriter, build: _Build, details: dict[str, Any], prove: Prove | None
) -> Manifest:
    """Returns the manifest; with `prove`, writes one to load the engine, then adds the result."""
    packages = "onnx", "tensorrt_rtx" if build.name == RTX else "tensorrt"
    status = {"status": f"built, unproven: {NOT_RUN}"}
    quantized = build.quantize
    manifest = build.source.manifest("engine", status | details, *packages, quantized=quantized)
    if prove is None:
        return manifest
    writer.finish(manifest)
    proof = prove(writer.path)
    if proof["status"] == "proven":
        status = {"status": PROVEN}
    elif proof["status"] == "weakly proven":
        status = {"status": WEAKLY_PROVEN}
    else:
        status = {"status": f"built, unproven: {proof.get('reason', NOT_RUN)}"}
    (writer.path / MANIFEST_FILE).unlink()
    details = status | {"proof": proof} | details
    return build.source.manifest("engine", details, *packages, quantized=quantized)
