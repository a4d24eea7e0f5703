"""Verifies the scales of the cache in an ONNX graph: no weight shows them, and 1 leaves no trace.

| cache, for     | a cached row is read as                | a new row is stored as              |
|----------------|----------------------------------------|-------------------------------------|
| any, ORT       | Cast, Mul by s                         | Div by s, Cast                      |
| e4m3, TensorRT | DequantizeLinear by s                  | QuantizeLinear by s                 |
| e5m2, TensorRT | Gather in the 256 values of E5M2, · s  | Mul by 1 / s, rounded by arithmetic |

New rows are read back within the step, by s as well. A scale of 1 has no operator but Q and DQ.
"""

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.calibration import Calibration
from octet.model.spec import ModelSpec
from octet.recipe import KvCacheDtype
from verify.checks.findings import Verification
from verify.reader.onnx import WrittenGraph

__all__ = ["check_graph_cache"]

_ONE = 0x3C  # the code of 1 in E5M2, which is the upper byte of FP16
_ON_THE_WAY = ("Cast", "Clip", "Identity", "Round")  # between a scale and what is stored


def check_graph_cache(
    graph: WrittenGraph,
    spec: ModelSpec,
    kv_cache: KvCacheDtype,
    calibration: Calibration,
    found: Verification,
) -> None:
    """Adds to `found` each key or value that is stored or read with another scale."""
    for index in range(spec.layers):
        for kind in ("key", "value"):
            attention = f"{spec.layer(index)}.self_attn"
            wanted = calibration.cache_scale(attention, kind[0], kv_cache)
            if wanted is None:
                continue
            scale = np.float32(wanted)
            past, present = f"past_key_values.{index}.{kind}", f"present.{index}.{kind}"
            if present not in graph.maker:
                found.problem("names", present, "missing: no node of the graph makes it")
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
    """What the values of `rows` are multiplied by; NaN for a table that is not E5M2's."""
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
    """s, of a table of all values of E5M2 times s, which is in the precision of the arithmetic."""
    values = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = (values * wanted).astype(table.dtype)
    if np.array_equal(table, exact, equal_nan=True):
        return wanted
    one = np.float32(table[_ONE]) if table.shape == (256,) else np.float32(np.nan)
    return one if one != exact[_ONE] else np.float32(np.nan)


def _stored_as(graph: WrittenGraph, present: str, wanted: np.float32) -> np.float32:
    """What new rows are divided by."""
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
    """The value that new rows are read back from: the output, or what it was made of."""
    maker = graph.maker[present]
    if present in graph.readers or maker.op_type != "Cast":
        return present
    return str(maker.input[0])


def _constant(graph: WrittenGraph, name: str) -> np.float32 | None:
    """The number, where it is one of the graph's and no more than one."""
    if name not in graph.initializers:
        return None
    values = graph.values(name)
    return _first(values) if values.size == 1 else None


def _first(values: NDArray[np.float32]) -> np.float32:
    return np.float32(values.reshape(-1)[0])


def _outputs(graph: WrittenGraph) -> set[str]:
    return {value.name for value in graph.graph.output}
