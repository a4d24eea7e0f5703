"""calibration + checkpoint → the ONNX decoder: quantized weights and activations, an FP8 cache.

Writes manifest.json, model.onnx (model.onnx.data above 2 GB), config.json, tokenizer, golden.json.

The graph has two forms:

- `onnxruntime`: float32 arithmetic, a cache of FLOAT8E5M2, FLOAT8E4M3FN or FLOAT16. ONNX Runtime
  needs the option `session.disable_quant_qdq=1`. Its CPU kernels lack FLOAT4E2M1: a graph with
  NVFP4 or MXFP4 runs in `octet serve`, which rewrites it in memory, and in onnx.reference.
- `tensorrt`: the very graph that `octet build-engine` compiles, FP16 arithmetic. An E5M2 cache is
  uint8 codes, looked up in a table, because TensorRT has no E5M2. That saves capacity, not
  bandwidth: every step rebuilds an FP16 cache of what it reads.
"""

from pathlib import Path
from typing import Any, Literal, TypeAlias

from onnx import TensorProto

from export.accuracy_gate import Judge, finish
from export.onnx.cache import CACHES
from export.onnx.decoder import build_decoder
from export.onnx.graph import E8M0_OPSET, Graph
from export.onnx.tensorrt_decoder import build_engine_graph
from export.source import Source, require_space
from octet.artifacts.manifest import Manifest, check_destination, write_artifact
from octet.recipe import KvCacheDtype

__all__ = ["Target", "export_onnx"]

Target: TypeAlias = Literal["onnxruntime", "tensorrt"]

_LOOKUP = (
    "The cache inputs are codes, looked up: this saves capacity, not bandwidth, for every step"
)
_LOOKUP += " rebuilds an FP16 cache of what it reads."


def export_onnx(
    calibration: Path,
    out: Path,
    *,
    model: Path | None = None,
    target: Target = "onnxruntime",
    kv_cache: KvCacheDtype | None = None,
    quantize: bool = True,
    force: bool = False,
    judge: Judge | None = None,
) -> Manifest:
    """Writes the ONNX directory `out`; `model` overrides the path of the checkpoint.

    `kv_cache` defaults to the recipe's. `quantize=False` builds the same graph with the
    checkpoint's own weights and unrounded activations, to compare with; its cache defaults to
    float16, and the recipe's expected cost is left out. `judge` may refuse what was written.

    Raises UnsupportedError for a model, a recipe or a cache that `target` cannot express, and
    ArtifactError for a file that is altered while it is read.
    """
    check_destination(out, force=force, inputs=[calibration])
    if not quantize and kv_cache is None:
        kv_cache = "float16"
    source = Source.open(calibration, model, kv_cache=kv_cache)
    graph = _graph(source, target, quantize)
    require_space(out, graph.weight_bytes)
    graph.document = _document(source, target, quantize)
    details: dict[str, Any] = {
        "opset": graph.opset,
        "target": target,
        "kv_cache": source.kv_cache,
        "quantized": quantize,
    }
    if target == "onnxruntime":
        details["least_onnxruntime"] = _least_onnxruntime(graph)
    with write_artifact(out, force=force) as writer:
        source.copy_side_files(writer.path, quantized=quantize)
        graph.save(writer.path)
        source.require_unaltered()
        manifest = source.manifest("onnx", details, "onnx", quantized=quantize)
        return finish(writer, manifest, out, judge)


def _graph(source: Source, target: Target, quantize: bool) -> Graph:
    if target == "onnxruntime":
        return build_decoder(source, CACHES[source.kv_cache], quantize=quantize)
    return build_engine_graph(source, quantize=quantize)


def _least_onnxruntime(graph: Graph) -> str | None:
    """Returns the first release whose CPU kernels run the file as it is; None if none does yet."""
    if any(weight.elem_type == TensorProto.FLOAT4E2M1 for weight in graph.weights.values()):
        return None
    return "1.27" if graph.opset == E8M0_OPSET else "1.23"


def _document(source: Source, target: Target, quantize: bool) -> str:
    """Returns the text that a viewer of the graph shows first."""
    recipe = f"recipe {source.recipe.name}" if quantize else "full precision"
    cache = f"KV cache {source.kv_cache}"
    text = f"{source.calibration.manifest.model.name}: {recipe}, {cache}, for {target}."
    looked_up = target == "tensorrt" and source.kv_cache == "e5m2"
    return f"{text} {_LOOKUP}" if looked_up else text
