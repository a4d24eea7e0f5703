"""Verifies an ONNX export: what its initializers hold, as its own graph dequantizes it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np

from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError
from octet.recipe import KvCacheDtype, TensorScheme
from verify.checks.findings import Verification
from verify.checks.numbers import measure
from verify.checks.onnx_cache import check_graph_cache
from verify.checks.onnx_products import check_products
from verify.checks.original import Original
from verify.checks.tensors import compare_copies, judge, row_of
from verify.reader.onnx import GraphWeight, WrittenGraph

__all__ = ["verify_onnx"]


def verify_onnx(
    path: Path,
    manifest: Manifest,
    original: Original | None,
    found: Verification,
    advance: Callable[[int], None] = lambda elements: None,
) -> None:
    """Adds everything about the graph at `path` to `found`."""
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
    reference = original.read(name)
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
    """A static scale of inputs is in the graph under the first linear that shares the input."""
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
