"""Builds an ONNX graph and writes it to a file.

Weights are declared with their size, and read one at a time while the file is written. Up to 2 GB
(protobuf's limit) they are inside `model.onnx`; a larger model has them in `model.onnx.data`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from octet.errors import ExportError

__all__ = ["E8M0_OPSET", "MODEL_FILE", "OPSET", "Graph", "Weight", "unused_inputs"]

OPSET = 23  # the first with RMSNormalization, RotaryEmbedding and Attention
E8M0_OPSET = 24  # the first with FLOAT8E8M0: only a graph that has it needs this opset
IR_VERSION = 11  # that of ONNX 1.18, which defined opset 23
_IR_VERSIONS = {OPSET: IR_VERSION, E8M0_OPSET: 12}
MODEL_FILE = "model.onnx"
INLINE_LIMIT_BYTES = 1_800_000_000  # a protobuf message ends at 2 GiB, structure included
_ALIGNMENT = 4096  # of a tensor in the external file, so that it can be mapped
_SMALL_BYTES = 1024  # smaller tensors are always inside: shape inference reads shapes and axes
_COMPARED_BYTES = 1 << 16  # tensors up to this size are compared if a name is added twice
_MESSAGE_LENGTH = 400  # of onnx.checker's message, which may have a line for every node

Shape = Sequence[int | str]


@dataclass(frozen=True)
class Weight:
    """An initializer: `read` returns its content in the container dtype, `nbytes` long."""

    name: str
    elem_type: int  # TensorProto.DataType
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], npt.NDArray[Any]]


class Graph:
    """Nodes, inputs, outputs and weights in the order given; names of nodes and values are unique.

    `document` is the text that a viewer shows about the model.
    """

    def __init__(self, name: str, document: str = "") -> None:
        self.name = name
        self.document = document
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.weights: dict[str, Weight] = {}
        self._values: set[str] = set()

    def input(self, name: str, elem_type: int, shape: Shape) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, elem_type, list(shape)))
        return self._define(name)

    def output(self, name: str, elem_type: int, shape: Shape) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, elem_type, list(shape)))

    def node(self, op: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Adds a node whose one output has the node's name; returns that name.

        The attribute `domain` is the operator's, if it is not ONNX's own.
        """
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return self._define(name)

    def split(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attr: Any) -> None:
        """Adds a node with several outputs, named after the first."""
        node = helper.make_node(op, list(inputs), list(outputs), name=outputs[0], **attr)
        self.nodes.append(node)
        for name in outputs:
            self._define(name)

    def weight(self, weight: Weight) -> str:
        """Adds an initializer; if the name exists already, it must be the same (tied) weight."""
        known = self.weights.get(weight.name)
        if known is None:
            self.weights[weight.name] = weight
            return self._define(weight.name)
        if (known.elem_type, known.shape) != (weight.elem_type, weight.shape) or (
            weight.nbytes <= _COMPARED_BYTES
            and _content(known).tobytes() != _content(weight).tobytes()
        ):
            raise ValueError(f"the graph's weight {weight.name} is another one")
        return weight.name

    def array(self, name: str, array: npt.NDArray[Any], elem_type: int | None = None) -> str:
        """Adds an initializer from an array in memory; `elem_type` if numpy lacks the type."""
        array = np.ascontiguousarray(array).reshape(array.shape)
        kind = elem_type or helper.np_dtype_to_tensor_dtype(array.dtype)
        return self.weight(Weight(name, kind, array.shape, array.nbytes, lambda: array))

    @property
    def opset(self) -> int:
        """Returns the lowest opset that has every type in the graph."""
        kinds = {weight.elem_type for weight in self.weights.values()}
        kinds |= {item.i for node in self.nodes for item in node.attribute if item.name == "to"}
        return E8M0_OPSET if TensorProto.FLOAT8E8M0 in kinds else OPSET

    def _define(self, name: str) -> str:
        if name in self._values:
            raise ValueError(f"the graph defines {name} twice")
        self._values.add(name)
        return name

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    def save(self, directory: Path, *, inline_limit: int = INLINE_LIMIT_BYTES) -> Path:
        """Writes `model.onnx` (and `model.onnx.data`), checks it, returns its path.

        The bytes depend only on the graph. Raises ExportError for a graph input that no node reads
        (an engine would silently drop it) or a graph that onnx.checker refuses.
        """
        unused = unused_inputs(self.nodes, [value.name for value in self.inputs])
        if unused:
            raise ExportError(f"{self.name}: no node reads the graph input {', '.join(unused)}")
        path = directory / MODEL_FILE
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs)
        domains = sorted({node.domain for node in self.nodes} - {""})
        model = helper.make_model(
            graph,
            opset_imports=[
                helper.make_opsetid("", self.opset),
                *(helper.make_opsetid(domain, 1) for domain in domains),
            ],
            ir_version=_IR_VERSIONS[self.opset],
            producer_name="octet",
            doc_string=self.document,
        )
        # Weights go into the model itself, one at a time, because protobuf copies its arguments.
        inline = self.weight_bytes <= inline_limit
        beside = path.with_suffix(".onnx.data")
        model.graph.initializer.extend(self._inline() if inline else self._external(beside))
        path.write_bytes(model.SerializeToString(deterministic=True))
        try:
            onnx.checker.check_model(str(path), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            detail = " ".join(str(error).split())[:_MESSAGE_LENGTH]
            raise ExportError(f"{self.name}: onnx.checker refuses the graph: {detail}") from None
        return path

    def _inline(self) -> Iterator[TensorProto]:
        return (_inside(weight) for weight in self.weights.values())

    def _external(self, path: Path) -> Iterator[TensorProto]:
        with path.open("wb") as file:
            for weight in self.weights.values():
                if weight.nbytes < _SMALL_BYTES:
                    yield _inside(weight)
                    continue
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                tensor = _header(weight)
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in (
                    ("location", path.name),
                    ("offset", file.tell()),
                    ("length", weight.nbytes),
                ):
                    tensor.external_data.add(key=key, value=str(value))
                file.write(_content(weight).data)
                yield tensor


def unused_inputs(nodes: Sequence[onnx.NodeProto], inputs: Sequence[str]) -> list[str]:
    """Lists the `inputs` that no node reads."""
    read = {name for node in nodes for name in node.input}
    return [name for name in inputs if name not in read]


def _header(weight: Weight) -> TensorProto:
    return TensorProto(name=weight.name, data_type=weight.elem_type, dims=weight.shape)


def _inside(weight: Weight) -> TensorProto:
    tensor = _header(weight)
    tensor.raw_data = _content(weight).tobytes()
    return tensor


def _content(weight: Weight) -> npt.NDArray[Any]:
    array = np.ascontiguousarray(weight.read())
    if array.nbytes != weight.nbytes:
        raise ValueError(f"{weight.name} has {array.nbytes} bytes, declared {weight.nbytes}")
    return array
