"""Verifies an engine directory as far as it can be read without its GPU.

A plan is a program for one GPU: nothing in it can be decoded, so what is checked is that it is the
one that was built, from which graph, how precise its builder says that it is, and whether it has
ever answered. Its numbers are compared where it can run (`octet/commands/verify.py`).
"""

from pathlib import Path
from typing import Any

from export.verification import Verification
from octet.artifact import Manifest

__all__ = ["verify_engine"]

PLAN_FILE = "model.plan"


def verify_engine(path: Path, manifest: Manifest, found: Verification) -> None:
    """Adds what the manifest of the engine at `path` says, and where it contradicts itself."""
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
        found.problem("configuration", "status", "missing: nobody says whether it ever ran")
    else:
        found.notes.append(f"status: {status}")
    _check_precision(manifest, found)
    found.notes.append("a plan cannot be decoded: its numbers are compared where it can run")


def _check_precision(manifest: Manifest, found: Verification) -> None:
    """Whether as many products run in 8 or 4 bits as the recipe has."""
    precision = manifest.details.get("precision")
    if not isinstance(precision, dict):
        return
    wanted = sum(
        manifest.recipe.scheme_of(linear.name) is not None
        for linear in manifest.model.spec.linears()
    )
    counts = {
        key: value
        for key, value in precision.items()
        if key in ("fp8_matmuls", "fp4_matmuls") and isinstance(value, int)
    }
    low = sum(counts.values())
    if counts and low < wanted:
        found.problem(
            "configuration",
            "precision",
            f"{low} products in 8 or 4 bits, and recipe {manifest.recipe.name} has {wanted}",
        )


def _words(builder: dict[str, Any]) -> str:
    return " ".join(str(builder[key]) for key in ("name", "version") if key in builder)
