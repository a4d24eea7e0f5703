"""An engine's inputs and outputs: names, element types, and the sizes that its profiles allow.

export/onnx/decoder.py describes the graph that an engine is built from.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octet.errors import ArtifactError
from octet.model.spec import ModelSpec

__all__ = ["Dtypes", "Limits", "caches_named"]


@dataclass(frozen=True)
class Limits:
    """Sizes that one optimization profile allows, or expects."""

    batch: int
    tokens: int  # new tokens per row
    cached: int  # positions per row
    logits: int  # positions with logits per row

    @classmethod
    def of(cls, engine: Any, profile: int, *, usual: bool = False) -> "Limits":
        """Reads the largest sizes; with `usual`, those that the engine was tuned for."""

        def shape(name: str) -> tuple[int, ...]:
            return tuple(engine.get_tensor_profile_shape(name, profile)[1 if usual else 2])

        batch, tokens = shape("input_ids")
        return cls(
            batch=batch,
            tokens=tokens,
            cached=shape("past_key_values.0.key")[2],
            logits=shape("logit_positions")[1],
        )


@dataclass(frozen=True)
class Dtypes:
    """Element types that the engine reads and writes."""

    indices: Any  # numpy type of token ids and positions
    cache_bytes: int  # per element of the cache that it reads
    present_bytes: int  # per element of a new row

    @classmethod
    def of(cls, trt: Any, engine: Any, spec: ModelSpec, directory: Path) -> "Dtypes":
        """Reads them. Raises ArtifactError for a graph other than this release builds."""
        kind = trt.DataType
        found = {
            name: engine.get_tensor_dtype(name)
            for name in (engine.get_tensor_name(i) for i in range(engine.num_io_tensors))
        }
        caches = {(kind.UINT8, kind.HALF): (1, 2), (kind.FP8, kind.FP8): (1, 1)}
        caches[kind.HALF, kind.HALF] = (2, 2)
        indices = {kind.INT64: np.int64, kind.INT32: np.int32}
        past, present = found.get("past_key_values.0.key"), found.get("present.0.key")
        names = set(inputs(spec)) | set(outputs(spec))
        if (
            found.keys() != names
            or (past, present) not in caches
            or found["input_ids"] not in indices
            or found["logits"] != kind.FLOAT
        ):
            raise ArtifactError(
                f"{directory}: the engine's inputs and outputs are not those that this release"
                " builds; build it again"
            )
        return cls(indices[found["input_ids"]], *caches[past, present])


def caches_named(spec: ModelSpec, prefix: str) -> list[str]:
    return [f"{prefix}.{i}.{kind}" for i in range(spec.layers) for kind in ("key", "value")]


def inputs(spec: ModelSpec) -> list[str]:
    step = ["input_ids", "position_ids", "attention_mask", "logit_positions"]
    return step + caches_named(spec, "past_key_values")


def outputs(spec: ModelSpec) -> list[str]:
    return ["logits", *caches_named(spec, "present")]
