"""Finds the precision of a compiled engine's GEMMs, layer by layer.

TensorRT's engine inspector returns the layers as JSON, on the GPU that runs the engine.
TensorRT-RTX logs the same facts while it builds, so they are known without a GPU. A layer lists the
ONNX nodes that it computes and the types of its inputs. A GEMM is FP8 if one layer that lists its
MatMul reads two FP8 matrices.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Layer", "from_json", "from_log", "precision_of", "precisions"]

# Layers that only move, round or scale elements; another layer beside them runs the GEMM.
_ELEMENTWISE = ("kgen", "shape_call", "copy", "reformat", "signal", "wait", "constant")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_NAMES = {"HALF": "float16", "FLOAT": "float32", "BFLOAT16": "bfloat16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Layer:
    """One layer of a compiled engine."""

    kind: str  # such as gemm or kgen
    nodes: frozenset[str]  # of the ONNX graph
    matrices: tuple[str, ...]  # types of the inputs that have two or more dimensions


def from_log(text: str) -> list[Layer]:
    """Parses TensorRT-RTX's log: "Name: …, LayerType: …, Inputs: […], …, Metadata: …" lines."""
    layers = []
    for line in text.splitlines():
        kind = re.search(r"LayerType: (\w+)", line)
        if kind is None:
            continue
        reads = line.split("Outputs: [")[0]
        found = re.findall(r"Dimensions: \[([^\]]*)\].*?Datatype: (\w+)", reads)
        matrices = tuple(_type(name) for dimensions, name in found if "," in dimensions)
        layers.append(Layer(kind[1].lower(), frozenset(_NODE.findall(line)), matrices))
    return layers


def from_json(text: str) -> list[Layer]:
    """Parses the engine inspector's JSON; a layer without details has no nodes.

    The keys are those in NVIDIA's documents; no real engine's have been read. GEMMs that are not
    found here are reported from the parsed network instead.
    """
    layers = []
    for item in json.loads(text).get("Layers", []):
        if isinstance(item, str):
            continue
        reads = [*item.get("Inputs", []), *item.get("Constants", [])]
        matrices = tuple(_type(_datatype(x)) for x in reads if len(x.get("Dimensions", [])) > 1)
        nodes = frozenset(_NODE.findall(str(item.get("Metadata", ""))))
        layers.append(Layer(str(item.get("LayerType", "")).lower(), nodes, matrices))
    return layers


def precisions(layers: Iterable[Layer], products: Mapping[str, str]) -> dict[str, str]:
    """Maps module name to the precision of its GEMM; `products` maps it to the MatMul's node name.

    A module that no layer names is left out. If each profile has its own layer, the least quantized
    one counts.
    """
    named: dict[str, list[Layer]] = {}
    for layer in layers:
        for node in layer.nodes:
            named.setdefault(node, []).append(layer)
    found = {}
    for module, node in products.items():
        candidates = named.get(node, [])
        multiplying = [item for item in candidates if item.kind not in _ELEMENTWISE] or candidates
        kinds = [precision_of(item.matrices) for item in multiplying if item.matrices]
        if kinds:
            found[module] = max(kinds, key=_rank)
    return found


def precision_of(matrices: Iterable[str]) -> str:
    """Returns "fp8" or "fp4" if two matrices are, else such as "float16" or "float16 x fp8"."""
    types = [name for name in matrices if name != "e8m0"]
    for name in ("fp4", "fp8"):
        if types.count(name) >= 2:
            return name
    wide = sorted({name for name in types if name not in ("fp4", "fp8")})
    narrow = [name for name in ("fp4", "fp8") if name in types]
    # Two matrices of 16 or 32 bits are the GEMM's operands; a narrow one is of a fused operation.
    if len([name for name in types if name in wide]) >= 2 or not narrow:
        return wide[0] if wide else "unknown"
    return " x ".join([*wide[:1], *narrow[:1]])


def _rank(precision: str) -> tuple[bool, bool]:
    """Orders precisions: both operands narrow, one of them, none."""
    return precision not in ("fp4", "fp8"), " x " not in precision


def _datatype(tensor: Mapping[str, Any]) -> str:
    """Returns the type; TensorRT 10 has one field for format and type, later releases have two."""
    return str(tensor.get("Datatype") or tensor.get("Format/Datatype", ""))


def _type(name: str) -> str:
    """Returns Octet's name of TensorRT's "FP8", "FP4E2M1", "Half" or "… FP16 format"."""
    upper = name.upper()
    for known, ours in (("UE8M0", "e8m0"), ("E8M0", "e8m0"), ("FP4", "fp4"), ("FP8", "fp8")):
        if known in upper:
            return ours
    if "FP16" in upper:
        return "float16"
    return _NAMES.get(upper, upper.lower())
