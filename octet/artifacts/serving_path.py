"""Predicts the divergence of a quantized model for each way of serving it.

Engines compute different logits from the same checkpoint. One rounds activations before its GEMMs,
another runs weight-only; one writes an E5M2 cache rounded to nearest, another toward zero; one
computes in bfloat16, another in float32. So each prediction belongs to a `ServingPath`, and a
served model is compared with the prediction for the path that its engine executes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from octet.recipe import KvCacheDtype, Recipe
from octet.storage.files import read_document

__all__ = [
    "EXPECTED_FILE",
    "Expectation",
    "ExpectedSet",
    "Power",
    "ServingPath",
    "bound_of",
    "power_text",
    "prompts_for",
]

EXPECTED_FILE = "expected.json"
# Half of the faults are refused between an estimate and this multiple of it: measured with random
# faults in two models, see docs/explanation/power.md.
_UNCERTAIN = 2
# In nats, for models without a prediction. Chosen, not derived: they detect a broken export, not a
# slightly inaccurate one.
_BOUNDS = {"fp8": 0.1, "mxfp8": 0.1, "nvfp4": 1.0, "mxfp4": 1.0, "no quantization": 0.01}


def bound_of(recipe: Recipe, *, quantized: bool = True) -> tuple[float, str]:
    """Returns the mean divergence, in nats, accepted without a prediction, and its description.

    The bound is the largest among the kinds of weights that the recipe uses.
    """
    kinds = [weights.kind for weights, _ in recipe.pairs]
    kind = max(kinds, key=lambda kind: _BOUNDS[kind]) if quantized else "no quantization"
    return _BOUNDS[kind], f"the bound of {kind}, without a prediction"


class ServingPath(BaseModel):
    """The roundings of a recipe that an engine executes, and the dtype that it computes in.

    `weights`: whether they are quantized as in the recipe. `activations`: whether the linear
    layers' activations are, too; if not, weights are decoded and multiplied in `compute` (W8A16,
    W4A16). `power_scales`: whether scales of FP8 blocks are rounded up to powers of two, as vLLM's
    DeepGEMM has them by default: those of activations, and of weights, which are then quantized
    again (not those of experts). `kv_rounding` is the rounding of the cache's writer. `queries`:
    whether attention runs in E4M3 (queries, keys and probabilities), as in FlashAttention 3 with an
    E4M3 cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: bool = True
    activations: bool = True
    power_scales: bool = False
    kv_cache: KvCacheDtype
    kv_rounding: Literal["nearest", "truncate"] = "nearest"
    queries: bool = False
    compute: Literal["float32", "bfloat16"] = "bfloat16"

    @model_serializer(mode="wrap")
    def _without_default(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out `power_scales` where it is False, so that earlier versions read the rest."""
        found: dict[str, Any] = handler(self)
        if not self.power_scales:
            found.pop("power_scales", None)
        return found

    @property
    def label(self) -> str:
        """A label such as "weights+activations, e5m2 (nearest), bfloat16"."""
        parts = [name for name in ("weights", "activations") if getattr(self, name)]
        scales = " (e8m0)" if self.power_scales else ""
        cache: str = self.kv_cache
        if cache != "float16":
            cache += f" ({self.kv_rounding}{', queries too' if self.queries else ''})"
        return f"{'+'.join(parts) or 'nothing'}{scales}, {cache}, {self.compute}"


class Expectation(BaseModel):
    """The expected mean top-k KL of `path` from the reference over the golden prompts, in nats.

    `mean` is the simulated value. A conforming server of that path lies within `low` and `high`
    with 95 % confidence (`octet.proof.expected_range`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: ServingPath
    mean: float
    low: float
    high: float
    prompts: int

    def holds(self, measured: float) -> bool:
        """Returns whether `measured`, in nats, is in the range."""
        return self.low <= measured <= self.high


class Power(BaseModel):
    """The relative change of perplexity by which faults are refused (`octet.proof.power`).

    `middle` is the median over estimates; `low` and `high` are the quantiles of 0.1 and 0.9. They
    say how the estimates differ, and not how far they are from the truth, which is `largest`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: int  # that are answered
    low: float
    middle: float
    high: float
    # What happens to faults of that change: half of them are refused. Artifacts without this field
    # are of earlier versions, which estimated where faults begin to show.
    meaning: Literal["half_refused", "begin_to_show"] = "begin_to_show"

    @property
    def largest(self) -> float:
        """The largest change that half of the faults may need: `middle` may be too small."""
        return self.middle * (_UNCERTAIN if self.meaning == "half_refused" else 1)

    def __str__(self) -> str:
        most = f" to {100 * self.largest:.2g}" if self.largest > self.middle else ""
        return f"{100 * self.middle:.2g}{most} %"


def power_text(power: Sequence[Power]) -> str:
    """Describes how small a fault that was not simulated can be and still be refused."""
    limits = [f"{x} after {x.prompts}" for x in power]
    limits[0] += " prompts"
    sizes = " and ".join(limits)
    if power[0].meaning == "begin_to_show":
        return (
            f"faults that were not simulated begin to show if they change perplexity by {sizes}, as"
            " an earlier version of Octet estimated; half of them are refused only at about three"
            " times as much"
        )
    return (
        "about half of the faults that were not simulated are refused if they change perplexity by"
        f" {sizes}; most smaller ones pass, and some up to five times the lower figure"
    )


def prompts_for(power: Sequence[Power], change: float) -> int | None:
    """Returns the number of prompts after which half of the faults of this change are refused.

    That is by the upper end of what is stated. It falls with a power of the number of prompts,
    which is fitted to the first and the last of `power`. None if it is not known or does not fall.
    """
    if not power:
        return None
    first, last = power[0], power[-1]
    if change >= first.largest:
        return first.prompts
    if last.middle >= first.middle or last.prompts <= first.prompts:
        return None
    exponent = math.log(first.middle / last.middle) / math.log(last.prompts / first.prompts)
    more = math.pow(first.largest / change, 1 / exponent)
    return math.ceil(first.prompts * more - 1e-9)


class ExpectedSet(BaseModel):
    """The expectations of one calibration, on its own golden records."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    recipe: str  # its name
    expectations: tuple[Expectation, ...]
    power: tuple[Power, ...] = ()  # of the path that a GPU takes; empty: not estimated
    # Why no server can be proven with these golden records. Left out of the file if one can.
    unprovable: str | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        if self.unprovable is None:
            return ()
        return (f"no server of this model can be proven: {self.unprovable}",)

    def find(self, path: ServingPath) -> Expectation | None:
        """Returns the expectation of `path`; None if it was not predicted."""
        return next((x for x in self.expectations if x.path == path), None)

    def save(self, directory: Path) -> None:
        (directory / EXPECTED_FILE).write_text(self.to_json(), "utf-8")

    def to_json(self) -> str:
        return self.model_dump_json(indent=1, exclude_none=True) + "\n"

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Loads the expectations; ArtifactError if they are missing or invalid."""
        return read_document(directory / EXPECTED_FILE, cls, "a set of expectations")
