"""The decoder graph for TensorRT: FP16 arithmetic, FP8 or FP4 GEMMs, its own caches.

Inputs and outputs are those of decoder.py; the cache's types are in tensorrt_cache.py, the GEMMs'
forms in tensorrt_linear.py. `check_recipe` refuses the recipes that TensorRT has no operators for.
"""

from dataclasses import dataclass

from onnx import TensorProto

from export.onnx.attention import Concatenated
from export.onnx.decoder import build_decoder
from export.onnx.graph import Graph
from export.onnx.tensorrt_cache import cache_of
from export.onnx.tensorrt_linear import EngineLinears
from export.source import Source
from octet.errors import UnsupportedError

__all__ = [
    "INLINE_LIMIT_BYTES",
    "EngineGraph",
    "build_engine_graph",
    "check_recipe",
    "engine_graph",
]

INLINE_LIMIT_BYTES = 100_000_000  # of weights; more are streamed to a separate file


@dataclass(frozen=True)
class EngineGraph:
    """The graph, and the MatMul node of each quantized linear."""

    graph: Graph
    products: dict[str, str]  # module name -> name of its MatMul


def engine_graph(
    source: Source, compute: int = TensorProto.FLOAT16, *, quantize: bool = True
) -> EngineGraph:
    """Builds the graph in `compute`; FLOAT is for comparing its results with ONNX Runtime's graph.

    `quantize=False` builds it with the checkpoint's own weights, to compare with. Raises
    UnsupportedError for a recipe or an architecture that has no such graph.
    """
    if quantize:
        check_recipe(source)
    made: list[EngineLinears] = []

    def linears(graph: Graph, source: Source, quantize: bool, compute: int) -> EngineLinears:
        made.append(EngineLinears(graph, source, quantize, compute))
        return made[0]

    cache = cache_of(source.kv_cache, compute)
    order = Concatenated()
    graph = build_decoder(
        source, cache, quantize=quantize, compute=compute, order=order, linears=linears
    )
    return EngineGraph(graph, made[0].products)


def build_engine_graph(
    source: Source, compute: int = TensorProto.FLOAT16, *, quantize: bool = True
) -> Graph:
    """Builds the very graph that `build-engine` compiles."""
    return engine_graph(source, compute, quantize=quantize).graph


def check_recipe(source: Source) -> None:
    """Raises UnsupportedError naming a linear whose scheme TensorRT has no operators for."""
    for name, linear in source.quantized_linears().items():
        kinds = {scheme.kind for scheme in source.schemes(linear) or ()}
        if "mxfp4" in kinds:
            raise UnsupportedError(
                f"recipe {source.recipe.name}: {name} is mxfp4, and TensorRT has no operator that"
                " rounds inputs to it; nvfp4 is the FP4 that TensorRT multiplies"
            )
