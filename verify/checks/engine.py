"""Verifies an engine directory as far as it can be read without its GPU.

A plan is a program for one GPU, and nothing in it can be decoded. The checks cover the hash of the
plan, the graph that it was built from, the precision that its builder reports, and whether it has
ever run. Its numbers are compared where it can run (`octet_cli/verify.py`).

The graph is rebuilt by `export.onnx.tensorrt_decoder`, the writer's own code. This shows that
nothing has changed since, but cannot show a mistake of the writer. All other checks are independent
of the writer.
"""

import tempfile
from pathlib import Path
from typing import Any

from export.source import Source, require_space
from octet.artifacts.manifest import PLAN_FILE, Manifest, software
from octet.model.checkpoint import sha256_file
from verify.checks.findings import Verification
from verify.checks.original import Original

__all__ = ["verify_engine"]


def verify_engine(
    path: Path, manifest: Manifest, original: Original | None, found: Verification
) -> None:
    """Adds what the engine's manifest declares to `found`, and where it contradicts itself."""
    details = manifest.details
    builder = details.get("builder")
    built = _words(builder) if isinstance(builder, dict) else "an unknown builder"
    targets = ", ".join(str(target) for target in details.get("targets") or ["?"])
    found.format = f"plan by {built} for {targets}"
    if PLAN_FILE not in manifest.files:
        found.problem("files", PLAN_FILE, "the manifest lists no plan")
    elif (path / PLAN_FILE).is_file() and (path / PLAN_FILE).stat().st_size == 0:
        found.problem("files", PLAN_FILE, "is empty")
    status = details.get("status")
    if not isinstance(status, str):
        found.problem(
            "configuration", "status", "missing: it is not known whether the engine ever ran"
        )
    else:
        found.notes.append(f"status: {status}")
    _check_precision(manifest, found)
    _check_graph(manifest, original, found)
    found.notes.append("a plan cannot be decoded: its numbers are compared where it can run")


def _check_precision(manifest: Manifest, found: Verification) -> None:
    """Checks by the builder's own report that every GEMM runs in the recipe's precision."""
    precision = manifest.details.get("precision")
    products = precision.get("products") if isinstance(precision, dict) else None
    if not isinstance(products, dict):
        found.unchecked.append(
            "precision: the manifest does not list which GEMMs run in 8 or 4 bits"
        )
        return
    if not manifest.details.get("quantized", True):
        return
    for linear in manifest.model.spec.linears():
        scheme = manifest.recipe.scheme_of(linear.name)
        if scheme is None:
            continue
        wanted = "fp4" if scheme[0].format == "e2m1" else "fp8"
        runs = products.get(linear.name, "an unknown precision")
        if runs != wanted:
            found.problem(
                "configuration",
                linear.name,
                f"runs in {runs}, and recipe {manifest.recipe.name} has {wanted}",
            )


def _check_graph(manifest: Manifest, original: Original | None, found: Verification) -> None:
    """Checks that the compiled graph is the one that the calibration gives today."""
    hashes = manifest.details.get("graph_sha256")
    if not isinstance(hashes, dict):
        found.problem(
            "configuration", "graph_sha256", "missing: it is not known which graph was compiled"
        )
        return
    if original is None or original.calibration is None:
        found.unchecked.append(
            "graph: give --calibration, to compare its graph with the one that was compiled"
        )
        return
    then = {key: manifest.software.get(key) for key in ("octet", "onnx")}
    now = {key: software("onnx").get(key) for key in then}
    if then != now:
        versions = [
            ", ".join(f"{key} {version}" for key, version in which.items()) for which in (then, now)
        ]
        found.unchecked.append(
            f"graph: it was built with {versions[0]}, and {versions[1]} may write another graph;"
            " verify with the versions that built it"
        )
        return
    from export.onnx.tensorrt_decoder import INLINE_LIMIT_BYTES, build_engine_graph  # loads onnx

    source = Source.open(
        original.calibration.path,
        original.checkpoint.path,
        kv_cache=manifest.details["kv_cache"]["dtype"],
    )
    quantized = bool(manifest.details.get("quantized", True))
    graph = build_engine_graph(source, quantize=quantized)
    with tempfile.TemporaryDirectory(prefix="octet-verify.") as directory:
        require_space(Path(directory), graph.weight_bytes)
        graph.save(Path(directory), inline_limit=INLINE_LIMIT_BYTES)
        built = {file.name: sha256_file(file) for file in Path(directory).iterdir()}
    for name in sorted(built.keys() | hashes.keys()):
        if built.get(name) != hashes.get(name):
            what = "is not the graph that the calibration gives"
            found.problem("configuration", f"graph_sha256: {name}", what)


def _words(builder: dict[str, Any]) -> str:
    return " ".join(str(builder[key]) for key in ("name", "version") if key in builder)
