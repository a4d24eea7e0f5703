"""Verifies an ONNX export: the values of its initializers, as its own graph dequantizes them.

Also verifies the scales of the KV cache: no weight shows them, and a scale of 1 leaves no trace.

| cache, for     | a cached row is read as                | a new row is stored as              |
|----------------|----------------------------------------|-------------------------------------|
| any, ORT       | Cast, Mul by s                         | Div by s, Cast                      |
| e4m3, TensorRT | DequantizeLinear by s                  | QuantizeLinear by s                 |
| e5m2, TensorRT | Gather in the 256 values of E5M2, · s  | Mul by 1 / s, rounded by arithmetic |

New rows are read back within the step, also by s. A scale of 1 has no operator but Q and DQ.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError
from octet.model.spec import ModelSpec
from octet.recipe import KvCacheDtype, TensorScheme
from verify.checks.findings import Verification
from verify.checks.numbers import measure
from verify.checks.onnx_products import check_products
from verify.checks.original import Original
from verify.checks.tensors import compare_copies, judge, row_of
from verify.reader.onnx import GraphWeight, WrittenGraph

__all__ = ["verify_onnx"]

_ONE = 0x3C  # the code of 1 in E5M2, which is the upper byte of FP16
_ON_THE_WAY = ("Cast", "Clip", "Identity", "Round")  # between a scale and the stored value


def check_graph_cache(
    graph: WrittenGraph,
    spec: ModelSpec,
    kv_cache: KvCacheDtype,
    calibration: Calibration,
    found: Verification,
) -> None:
    """Adds to `found` each key or value whose scale in the graph differs from the calibration's."""
    for index in range(spec.layers):
        for kind in ("key", "value"):
            attention = f"{spec.layer(index)}.self_attn"
            wanted = calibration.cache_scale(attention, kind[0], kv_cache)
            if wanted is None:
                continue
            scale = np.float32(wanted)
            past, present = f"past_key_values.{index}.{kind}", f"present.{index}.{kind}"
            if present not in graph.maker:
                found.problem("names", present, "missing: no node of the graph computes it")
                continue
            for name, way, value in (
                (past, "read", _read_as(graph, past, scale)),
                (present, "stored", _stored_as(graph, present, scale)),
                (present, "read back", _read_as(graph, _rows_of(graph, present), scale)),
            ):
                if value != scale:
                    what = f"{way} with scale {value:.9g}, and calibration has {scale:.9g}"
                    found.problem("scales", name, f"{what} for {kv_cache}")


def _read_as(graph: WrittenGraph, rows: str, wanted: np.float32) -> np.float32:
    """Returns the scale that multiplies `rows`: 1 if there is none, NaN for a table not of E5M2."""
    for node in graph.readers.get(rows, []):
        if node.op_type == "DequantizeLinear" and node.input[0] == rows:
            return _first(graph.values(node.input[1]))
        if node.op_type == "Gather" and node.input[1] == rows:
            return _table_scale(graph.raw(node.input[0]), wanted)
        if node.op_type == "Mul":
            constant = _constant(graph, node.input[1])
            if constant is not None:
                return constant
        if node.op_type in ("Cast", "Identity") and node.output[0] not in _outputs(graph):
            found = _read_as(graph, node.output[0], wanted)
            if found != 1:
                return found
    return np.float32(1)


def _table_scale(table: NDArray[np.floating], wanted: np.float32) -> np.float32:
    """Returns s of a table with all values of E5M2 times s; NaN for another table.

    The table is in the precision of the arithmetic.
    """
    values = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = (values * wanted).astype(table.dtype)
    if np.array_equal(table, exact, equal_nan=True):
        return wanted
    one = np.float32(table[_ONE]) if table.shape == (256,) else np.float32(np.nan)
    return one if one != exact[_ONE] else np.float32(np.nan)


def _stored_as(graph: WrittenGraph, present: str, wanted: np.float32) -> np.float32:
    """Returns the scale that divides new rows; 1 if there is none."""
    node = graph.maker[present]
    if node.op_type == "QuantizeLinear":
        return _first(graph.values(node.input[1]))
    while node.op_type in ("Div", "Mul", *_ON_THE_WAY):
        constant = _constant(graph, node.input[1]) if len(node.input) > 1 else None
        if constant is not None and node.op_type == "Div":
            return constant
        if constant is not None and node.op_type == "Mul":
            inverse = np.float32(1 / float(wanted))
            return wanted if constant == inverse else np.float32(1 / float(constant))
        if node.input[0] not in graph.maker:
            break
        node = graph.maker[node.input[0]]
    return np.float32(1)


def _rows_of(graph: WrittenGraph, present: str) -> str:
    """Returns the value that new rows are read back from: the output, or the input of its Cast."""
    maker = graph.maker[present]
    if present in graph.readers or maker.op_type != "Cast":
        return present
    return str(maker.input[0])


def _constant(graph: WrittenGraph, name: str) -> np.float32 | None:
    """Returns the single number of the initializer `name`; None if it is not one."""
    if name not in graph.initializers:
        return None
    values = graph.values(name)
    return _first(values) if values.size == 1 else None


def _first(values: NDArray[np.float32]) -> np.float32:
    return np.float32(values.reshape(-1)[0])


def _outputs(graph: WrittenGraph) -> set[str]:
    return {value.name for value in graph.graph.output}


def verify_onnx(
    path: Path,
    manifest: Manifest,
    original: Original | None,
    found: Verification,
    advance: Callable[[int], None] = lambda elements: None,
) -> None:
    """Checks the graph at `path` and adds to `found`."""
    try:
        graph = WrittenGraph.open(path)
    except ArtifactError as error:
        found.problem("files", "model.onnx", str(error))
        return
    quantized = bool(manifest.details.get("quantized", True))
    versions = {item.domain or "onnx": item.version for item in graph.opsets}
    found.format = (
        f"{manifest.details.get('target', 'onnxruntime')} graph,"
        f" opset {versions.get('onnx')}{'' if quantized else ', full precision'}"
    )
    for name in graph.unread():
        found.problem("names", name, "no node of the graph reads it: an engine drops it in silence")
    spec = manifest.model.spec
    schemes = {
        linear.name: manifest.recipe.scheme_of(linear.name) if quantized else None
        for linear in spec.linears()
    }
    check_products(graph, spec.linears(), schemes, found)
    for module, scheme in schemes.items():
        _check_linear(graph, module, scheme, original, found)
        if scheme is not None and original is not None:
            advance(math.prod(original.shapes[f"{module}.weight"]))
    if original is None:
        return
    for cache in get_args(KvCacheDtype):
        if cache == manifest.details.get("kv_cache") and original.calibration is not None:
            check_graph_cache(graph, spec, cache, original.calibration, found)
    for name in original.shapes:
        module = name.removesuffix(".weight")
        if schemes.get(module) is not None and name != module:
            continue
        if name not in graph.initializers:
            if not _left_out(name, spec.tied_embeddings):
                found.problem("names", name, "missing: the original has it")
            continue
        before, after = original.read(name), graph.tensor(name)
        compare_copies(name, before, after, found, release=original.release)
        advance(math.prod(original.shapes[name]))
        original.release()


def _check_linear(
    graph: WrittenGraph,
    module: str,
    scheme: tuple[TensorScheme, TensorScheme] | None,
    original: Original | None,
    found: Verification,
) -> None:
    name = f"{module}.weight"
    if name not in graph.initializers:
        found.problem("names", name, "missing: the graph has no initializer of that name")
        return
    if scheme is None:
        if graph.codes_of(name) is not None:
            found.problem("configuration", name, "quantized, and the recipe leaves it as it was")
        return
    if graph.codes_of(name) != scheme[0].format:
        found.problem(
            "configuration",
            name,
            f"stored as {graph.tag(name)}, and the recipe has {scheme[0].format} weights",
        )
        return
    try:
        weight = graph.weight(name)
    except (ValueError, KeyError) as error:
        found.problem("scales", name, str(error))
        return
    if not _scales_fit(weight, name, scheme[0], found):
        return
    if original is not None:
        _compare(weight, name, module, original, found)
        _check_input_scale(graph, module, scheme[1], original, found)


def _scales_fit(weight: GraphWeight, name: str, scheme: TensorScheme, found: Verification) -> bool:
    scale = weight.coded.scale
    bad = int(np.count_nonzero(~(np.isfinite(scale) & (scale >= 0))))
    zeros = 0 if weight.scales == "e4m3" else int(np.count_nonzero(scale == 0))
    if bad or zeros:
        what = "not finite or negative" if bad else "zero"
        found.problem("scales", f"{name}_scale", f"{bad or zeros} of {scale.size} are {what}")
        return False
    if weight.scales != scheme.scale_format:
        found.problem(
            "configuration",
            f"{name}_scale",
            f"stored as {weight.scales}, and the recipe has {scheme.scale_format} scales",
        )
        return False
    return True


def _compare(
    weight: GraphWeight, name: str, module: str, original: Original, found: Verification
) -> None:
    reference = original.weight(module)
    if reference.shape != weight.coded.codes.shape:
        shape = list(weight.coded.codes.shape)
        found.problem("numbers", name, f"is {shape}, the original {list(reference.shape)}")
        return
    numbers = measure(weight.coded, reference, weight.scales)
    found.rows.append(row_of(name, weight.label, numbers))
    others = original.others(module, original.checkpoint.spec)
    why = judge(weight.coded, reference, numbers, ours=True, others=others)
    if why is not None:
        found.problem("numbers", name, why)
    original.release()


def _check_input_scale(
    graph: WrittenGraph,
    module: str,
    scheme: TensorScheme,
    original: Original,
    found: Verification,
) -> None:
    """Compares a static activation scale with the calibration's.

    The graph has it under the name of the first linear that shares the input.
    """
    key = "input_scale" if not scheme.dynamic else "input_global_scale"
    name = f"{module}.{key}"
    if name not in graph.initializers or original.calibration is None:
        return
    wanted = original.calibration.scales.get(name)
    value = float(graph.values(name).reshape(-1)[0])
    if wanted is not None and value != float(wanted):
        found.problem("scales", name, f"{value:.9g}, and calibration has {float(wanted):.9g}")


def _left_out(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and tied)
