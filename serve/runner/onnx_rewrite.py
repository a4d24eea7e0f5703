"""Rewrites an ONNX export in memory so that ONNX Runtime's CPU kernels can run it, and run it fast.

The file keeps the FP8 and FP4 types. The results stay the same, bit for bit, which a test checks.
ONNX Runtime 1.31 casts to and from FP8 one element at a time: 7.5 ns to E4M3, 2.4 ns from E5M2.

ONNX Runtime 1.31 knows the type FLOAT4E2M1 but has no kernel for it. Every E2M1 value is also an
E4M3 value, so the codes of FP4 weights are exchanged one for one, and the DequantizeLinear that
reads them stays. A weight takes one byte while the session is made; the session then folds it to
float32, as it does FP8 weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from octet.errors import ArtifactError
from octet.numerics.bits import unpack_e2m1
from octet.numerics.formats import E2M1, E4M3, decode, encode

__all__ = ["read_past_as_float16", "round_in_float32", "store_e2m1_as_e4m3"]


@dataclass(frozen=True)
class _Grid:
    """Constants for rounding a magnitude to a format of p significant bits in float32 arithmetic.

    Veltkamp's splitting (Dekker, Numer. Math. 18, 1971): for c = a·(2^(24-p) + 1), c - (c - a) is a
    rounded to p bits. Below the smallest normal, where the format is fixed-point with quantum q,
    c = a + 1.5·2^23·q does the same; the larger c is the right one. Checked for every float32 up to
    the format's largest value: the result is the nearest, ties to even.
    """

    name: str
    split: np.float32
    magic: np.float32
    max: np.float32 | None  # where it saturates; None if the rounded values never exceed it


_E4M3 = _Grid("e4m3", np.float32(2**20 + 1), np.float32(1.5 * 2**14), None)
_E2M1 = _Grid("e2m1", np.float32(2**22 + 1), np.float32(1.5 * 2**22), np.float32(6))
# Nodes that compute a scale which leaves nothing above 448, backwards from the division by it: for
# float32 scales, and for scales that are powers of two (rounded up).
_SCALED = (
    ("Div", "Max", "Div", "ReduceMax", "Abs"),
    ("Div", "Cast", "Cast", "Div", "ReduceMax", "Abs"),
)


def read_past_as_float16(model: onnx.ModelProto) -> int | None:
    """Retypes the E5M2 cache inputs as FLOAT16: a code is the top byte of its FLOAT16 value.

    Returns their new type, or None if there are none. Raises ArtifactError if a node other than
    Cast and Shape reads one.
    """
    readers, retyped = _readers(model), None
    for value in model.graph.input:
        tensor = value.type.tensor_type
        if tensor.elem_type != TensorProto.FLOAT8E5M2:
            continue
        reading = [node.op_type for node in readers.get(value.name, [])]
        if not {"Cast", "Shape"}.issuperset(reading):
            raise ArtifactError(
                f"{value.name} of the ONNX graph is read by {', '.join(reading)}, not a Cast alone;"
                " export it again with this release"
            )
        tensor.elem_type = retyped = TensorProto.FLOAT16
    return retyped


def round_in_float32(model: onnx.ModelProto) -> int:
    """Replaces casts of activations to E2M1, or to E4M3 by a dynamic scale, and the casts back.

    Casts to E4M3 by a static scale stay: ONNX Runtime folds their multiplication into the GEMM that
    follows, which then rounds differently than behind a DequantizeLinear. Returns the number of
    replaced pairs.
    """
    graph = model.graph
    readers = _readers(model)
    makers = {name: node for node in graph.node for name in node.output}
    replaced: dict[str, list[onnx.NodeProto]] = {}
    dropped: set[str] = set()
    grids: set[_Grid] = set()
    for there in graph.node:
        grid = _grid(there, makers)
        back = readers.get(there.output[0], [])
        if grid is not None and len(back) == 1 and _casts_to(back[0], TensorProto.FLOAT):
            replaced[there.output[0]] = list(_rounding(there.input[0], back[0].output[0], grid))
            dropped.add(back[0].output[0])
            grids.add(grid)
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.output[0] in replaced:
            kept += replaced[node.output[0]]
        elif node.output[0] not in dropped:
            kept.append(node)
    if replaced:
        del graph.node[:]
        graph.node.extend(kept)
    for grid in sorted(grids, key=lambda item: item.name):
        for name, value in (("split", grid.split), ("magic", grid.magic), ("max", grid.max)):
            if value is not None:
                constant = numpy_helper.from_array(np.array(value), f"round.{grid.name}.{name}")
                graph.initializer.append(constant)
    return len(replaced)


def _grid(cast: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> _Grid | None:
    """Returns the grid that a Cast rounds to, or None if the Cast is not to be replaced."""
    if _casts_to(cast, TensorProto.FLOAT4E2M1):
        return _E2M1
    if _casts_to(cast, TensorProto.FLOAT8E4M3FN) and _is_scaled(cast, makers):
        return _E4M3
    return None


def _rounding(scaled: str, rounded: str, grid: _Grid) -> Iterator[onnx.NodeProto]:
    """Yields nodes that compute `rounded`, the value of the grid that is nearest to `scaled`."""
    magnitude, bounded, shifted, fixed, c, rest, result, sign = (
        f"{rounded}.{part}"
        for part in ("abs", "bounded", "split", "fixed", "c", "rest", "magnitude", "sign")
    )
    yield _node("Abs", [scaled], magnitude)
    if grid.max is not None:
        yield _node("Min", [magnitude, f"round.{grid.name}.max"], bounded)
        magnitude = bounded
    yield _node("Mul", [magnitude, f"round.{grid.name}.split"], shifted)
    yield _node("Add", [magnitude, f"round.{grid.name}.magic"], fixed)
    yield _node("Max", [shifted, fixed], c)
    yield _node("Sub", [c, magnitude], rest)
    yield _node("Sub", [c, rest], result)
    yield _node("Sign", [scaled], sign)
    yield _node("Mul", [result, sign], rounded)


def _node(op: str, inputs: list[str], output: str) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=output)


def _is_scaled(cast: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> bool:
    """Decides whether the Cast's input was divided by its own absmax over 448, or by more."""
    return any(_is_made_by(steps, cast, makers) for steps in _SCALED)


def _is_made_by(
    steps: tuple[str, ...], cast: onnx.NodeProto, makers: dict[str, onnx.NodeProto]
) -> bool:
    node = makers.get(cast.input[0])
    for index, op in enumerate(steps):
        if node is None or node.op_type != op:
            return False
        if any(item.name == "round_mode" and item.s != b"up" for item in node.attribute):
            return False
        # The divisor is the second input of the first Div; all later steps follow the first input.
        node = makers.get(node.input[1 if index == 0 else 0])
    return True


def _casts_to(node: onnx.NodeProto, elem_type: int) -> bool:
    return node.op_type == "Cast" and any(
        attribute.name == "to" and attribute.i == elem_type for attribute in node.attribute
    )


def _readers(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


_E4M3_CODES = encode(decode(np.arange(16, dtype=np.uint8), E2M1), E4M3)


def store_e2m1_as_e4m3(model: onnx.ModelProto, directory: Path) -> dict[str, Any]:
    """Turns the FLOAT4E2M1 initializers of `model` into E4M3; returns the external ones, by name.

    A tensor with its data in a file of `directory` keeps its reference to it, which no longer fits:
    the session must get its OrtValue instead (`add_external_initializers`). Raises ArtifactError
    for a reference that leaves the directory or its file.
    """
    outside: dict[str, Any] = {}
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT4E2M1:
            continue
        tensor.data_type = TensorProto.FLOAT8E4M3FN
        if tensor.data_location != TensorProto.EXTERNAL:
            packed = np.frombuffer(tensor.raw_data, np.uint8)
            tensor.raw_data = _E4M3_CODES[unpack_e2m1(packed)].tobytes()
            continue
        codes = _E4M3_CODES[unpack_e2m1(_external(tensor, directory))].reshape(tuple(tensor.dims))
        outside[tensor.name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            codes, TensorProto.FLOAT8E4M3FN
        )
    return outside


def _external(tensor: onnx.TensorProto, directory: Path) -> NDArray[np.uint8]:
    """Reads the packed codes of a tensor whose data is in a file."""
    place = {item.key: item.value for item in tensor.external_data}
    name, nbytes = place.get("location", ""), int(np.prod(tensor.dims)) // 2
    offset = int(place.get("offset", 0))
    path = directory / name
    if Path(name).name != name or not path.is_file() or path.stat().st_size < offset + nbytes:
        raise ArtifactError(f"{directory}: {tensor.name} is not in {name!r}; export it again")
    return np.fromfile(path, np.uint8, nbytes, offset=offset)
