"""calibration + checkpoint → the ONNX decoder: FP8 weights and inputs, an E5M2 cache.

manifest.json, model.onnx (model.onnx.data above 2 GB), config.json, tokenizer, golden.json
"""

from pathlib import Path

from export.graph import OPSET
from export.onnx_cache import CACHES
from export.onnx_decoder import build_decoder
from export.source import Source, require_space
from octet.artifact import Manifest, check_destination, write_artifact
from octet.errors import UnsupportedError

__all__ = ["export_onnx"]


def export_onnx(
    calibration: Path,
    out: Path,
    *,
    model: Path | None = None,
    kv_cache: str | None = None,
    quantize: bool = True,
    force: bool = False,
) -> Manifest:
    """Writes the ONNX directory `out`; `model` overrides where the checkpoint is.

    `kv_cache` defaults to the recipe's. `quantize=False` builds the same graph with the
    checkpoint's own weights and unrounded activations, to compare with; its cache defaults to
    float16. The arithmetic is float32: ONNX Runtime must be told `session.disable_quant_qdq=1`.
    """
    check_destination(out, force=force, inputs=[calibration])
    source = Source.open(calibration, model)
    cache = _cache_of(source, kv_cache, quantize)
    graph = build_decoder(source, CACHES[cache], quantize=quantize)
    require_space(out, graph.weight_bytes)
    details = {"opset": OPSET, "kv_cache": cache, "quantized": quantize}
    with write_artifact(out, force=force) as writer:
        source.copy_side_files(writer.path)
        graph.save(writer.path)
        return writer.finish(source.manifest("onnx", details, "onnx"))


def _cache_of(source: Source, asked: str | None, quantize: bool) -> str:
    if asked is None and not quantize:
        return "float16"
    name = asked or source.recipe.kv_cache
    if name not in CACHES:
        raise UnsupportedError(
            f"kv_cache '{name}' is not supported by the ONNX export;"
            f" use --kv-cache {' or '.join(CACHES)}"
        )
    return name
