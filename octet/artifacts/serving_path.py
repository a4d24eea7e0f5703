"""What a quantization is expected to cost, by how it is served: the same files, other numbers.

One checkpoint is multiplied with rounded inputs by one engine and weight-only by another; one
rounds to nearest where it writes an E5M2 cache, another toward zero; one computes in bfloat16,
another in float32. So a prediction belongs to a `ServingPath`, and a served model is held against
that of the path its engine executes.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from octet.recipe import KvCacheDtype, Recipe
from octet.storage.files import read_document

__all__ = ["EXPECTED_FILE", "Expectation", "ExpectedSet", "ServingPath", "bound_of"]

EXPECTED_FILE = "expected.json"
# Nats, where nobody predicted. Chosen, not derived: they catch an export that is broken, not one
# that is a little off.
_BOUNDS = {"fp8": 0.1, "mxfp8": 0.1, "nvfp4": 1.0, "mxfp4": 1.0, "no quantization": 0.01}


def bound_of(recipe: Recipe, *, quantized: bool = True) -> tuple[float, str]:
    """The mean divergence, in nats, that is accepted without a prediction, and what it is for.

    The latter is the kind of weights with the largest bound, among those that the recipe uses.
    """
    kinds = [recipe.weights.kind, *(override.weights.kind for override in recipe.overrides)]
    kind = max(kinds, key=lambda kind: _BOUNDS[kind]) if quantized else "no quantization"
    return _BOUNDS[kind], f"the bound of {kind}, without a prediction"


class ServingPath(BaseModel):
    """Which of a recipe's roundings an engine really does, and in what it computes between them.

    `weights`: whether they are quantized, as the recipe says. `activations`: whether the inputs of
    linears are too; without, weights are decoded and multiplied in `compute` (W8A16, W4A16).
    `kv_rounding` is that of the cache's writer. `queries`: whether attention runs in E4M3, as
    FlashAttention 3 does with an E4M3 cache: queries, keys and probabilities.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: bool = True
    activations: bool = True
    kv_cache: KvCacheDtype
    kv_rounding: Literal["nearest", "truncate"] = "nearest"
    queries: bool = False
    compute: Literal["float32", "bfloat16"] = "bfloat16"

    @property
    def label(self) -> str:
        """Such as "weights+activations, e5m2 (nearest), bfloat16"."""
        parts = [name for name in ("weights", "activations") if getattr(self, name)]
        cache: str = self.kv_cache
        if cache != "float16":
            cache += f" ({self.kv_rounding}{', queries too' if self.queries else ''})"
        return f"{'+'.join(parts) or 'nothing'}, {cache}, {self.compute}"


class Expectation(BaseModel):
    """The mean top-k KL from the reference over the golden prompts, in nats, that `path` gives.

    `mean` is what was simulated. An honest server of that path lies within `low` and `high` with
    95 % confidence (`octet.proof.expected_range` says what that allows for).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: ServingPath
    mean: float
    low: float
    high: float
    prompts: int

    def holds(self, measured: float) -> bool:
        """Whether `measured` nats are in the range."""
        return self.low <= measured <= self.high


class ExpectedSet(BaseModel):
    """The expectations of one calibration, on its own golden records."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    recipe: str  # its name
    expectations: tuple[Expectation, ...]

    def find(self, path: ServingPath) -> Expectation | None:
        """That of `path`; None if it was not predicted."""
        return next((x for x in self.expectations if x.path == path), None)

    def save(self, directory: Path) -> None:
        (directory / EXPECTED_FILE).write_text(self.to_json())

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def load(cls, directory: Path) -> Self:
        """ArtifactError if there is none, or no such file."""
        return read_document(directory / EXPECTED_FILE, cls, "a set of expectations")
