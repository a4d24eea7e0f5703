"""Finds the values of an ONNX export that a calibration observed: linear inputs, keys and values.

They are taken before their rounding, as in the calibration. Making such a value an output of the
graph changes no other: ONNX Runtime computes it anyway.
"""

import onnx

from octet.errors import UnsupportedError
from octet.model.spec import ModelSpec

__all__ = ["add_taps"]


def add_taps(model: onnx.ModelProto, spec: ModelSpec) -> dict[str, str]:
    """Makes the observed values outputs of `model`; returns their names, by observation.

    Raises UnsupportedError for a graph in which they are not found.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    found: dict[str, str] = {}
    for linear in spec.linears():
        product = makers.get(f"{linear.name}.product") or makers.get(linear.name)
        if product is not None and product.op_type == "MatMul":
            found.setdefault(linear.input, _before(product.input[0], ".input.", makers))
    for index in range(spec.layers):
        for kind in ("key", "value"):
            rows = _before(f"present.{index}.{kind}", "present.", makers)
            found[f"{spec.layer(index)}.self_attn.{kind}"] = rows
    missing = {linear.input for linear in spec.linears()} - found.keys()
    if missing:
        raise UnsupportedError(
            f"{min(missing)}: not found in the ONNX graph, so live activations cannot be counted;"
            " export it again, or leave out `count`"
        )
    outputs = {value.name for value in model.graph.output}
    for name in sorted(set(found.values()) - outputs):
        kind = onnx.TensorProto.FLOAT
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    return found


def _before(name: str, part: str, makers: dict[str, onnx.NodeProto]) -> str:
    """Follows first inputs from `name` to the value before the nodes that round it.

    The exporter names the results of those after what they round: with `part` in them.
    """
    while part in name:
        name = makers[name].input[0]
    return name
