"""Stores the log-probabilities expected under each scenario, including known faults.

A scenario (`Scenario`) is one way to serve the artifact: a `ServingPath`, or a path with a fault,
such as an engine that drops the scales of keys. Calibration simulates each, and keeps its
log-probabilities of the golden records' likeliest tokens. With these, `octet.proof` finds the
scenario that explains a server's answers, without a model.

FP8 rounding is chaotic, so each scenario is simulated several times, from embeddings that differ in
the last bit: a conforming server of a path is one more repeat of it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from octet.artifacts.golden import GoldenSet
from octet.artifacts.manifest import SCENARIOS_FILE
from octet.artifacts.serving_path import ServingPath
from octet.errors import ArtifactError
from octet.storage.files import parse_json, refuse_newer
from octet.storage.tensors import Tensor, TensorFile, write_tensors

__all__ = ["SCENARIOS_FILE", "Fault", "FaultKind", "Scenario", "ScenarioSet"]

SCHEMA_VERSION = 1

FaultKind = Literal[
    "k_scale_dropped",  # keys are stored undivided: k_scale taken as 1
    "v_scale_dropped",
    "kv_scales_dropped",  # both
    "kv_scales_swapped",  # the path's 8-bit cache, with the scales of the other 8-bit format
    "kv_scales_exchanged",  # k_scale used for values, v_scale for keys
    "kv_bytes_reread",  # written in the path's format and read in the other 8-bit format
    "input_scales_dropped",  # static activation scales taken as 1
    "weight_scales_dropped",  # of every linear: taken as 1
    "weight_scales_scaled",  # of every linear of `layer`: multiplied by `factor`
    "fused_scales_merged",  # q/k/v and gate/up given the largest of their scales, codes unchanged
    "fused_scales_smallest",  # NVFP4: given the smallest of their global scales
    "fused_scales_in_one_slot",  # given to the first of them; of the others, taken as 1
    "expert_scales_permuted",  # each expert has the scales of the next
    "nibbles_swapped",  # FP4: the even column is read from the high nibble
    "global_scales_inverted",  # NVFP4 weights' global scale: multiplied by instead of divided by
    "rope_parameters_dropped",  # RoPE with theta 10,000, its frequencies unscaled
    "rope_scaling_dropped",  # RoPE with the model's theta, its frequencies unscaled
]


class Fault(BaseModel):
    """A fault in an otherwise conforming path."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: FaultKind
    layer: int | None = None
    factor: float | None = None

    @property
    def label(self) -> str:
        """A label such as "weight_scales_scaled, layer 3, x0.5"."""
        parts: list[str] = [self.kind]
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        if self.factor is not None:
            parts.append(f"x{self.factor:g}")
        return ", ".join(parts)


class Scenario(BaseModel):
    """A scenario: a path, served correctly or with a fault."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: ServingPath
    fault: Fault | None = None

    @property
    def label(self) -> str:
        """A label that is unique in a set."""
        return self.path.label + (f"; {self.fault.label}" if self.fault else "")


@dataclass(frozen=True)
class ScenarioSet:
    """The simulated scenarios and their log-probabilities on the golden records.

    `logprobs[h]` is float32 [repeats, records, positions, tokens], in nats (natural logarithm): of
    the tokens of `GoldenRecord.tops[position]`, in their order, under the full softmax, given the
    golden continuation. NaN where a record has no such position or token, and for records that a
    scenario was not simulated on (faults run on some of them). Repeats are at least 1 for faults
    and 2 for paths.
    """

    weights_sha256: str  # of the GoldenSet that they belong to
    recipe: str  # its name
    logprobs: Mapping[Scenario, NDArray[np.float32]]

    @property
    def paths(self) -> tuple[ServingPath, ...]:
        """The paths that were simulated without a fault."""
        return tuple(h.path for h in self.logprobs if h.fault is None)

    def save(self, directory: Path) -> None:
        """Writes SCENARIOS_FILE into `directory`."""
        header = {
            "schema_version": SCHEMA_VERSION,
            "weights_sha256": self.weights_sha256,
            "recipe": self.recipe,
            "hypotheses": [h.model_dump(mode="json") for h in self.logprobs],
        }
        tensors = {str(n): Tensor.of(x) for n, x in enumerate(self.logprobs.values())}
        write_tensors(directory / SCENARIOS_FILE, tensors, {"octet": json.dumps(header)})

    @classmethod
    def load(cls, directory: Path, golden: GoldenSet) -> Self:
        """Loads the set; ArtifactError if it is damaged or belongs to other golden records."""
        path = directory / SCENARIOS_FILE
        file = TensorFile.open(path)
        try:
            header = parse_json(file.metadata["octet"].encode())
            refuse_newer(path, header["schema_version"], SCHEMA_VERSION)
            if header["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema version {header['schema_version']}")
            names = [Scenario.model_validate(item) for item in header["hypotheses"]]
            found = {name: file.read(str(n)).float32() for n, name in enumerate(names)}
            weights, recipe = str(header["weights_sha256"]), str(header["recipe"])
        except (KeyError, TypeError, ValueError, ValidationError) as error:
            detail = str(error).splitlines()[0]
            raise ArtifactError(f"{path}: not a set of scenarios ({detail})") from None
        records = len(golden.records)
        if weights != golden.weights_sha256 or any(
            x.ndim != 4 or x.shape[1] != records for x in found.values()
        ):
            raise ArtifactError(
                f"{path}: belongs to other golden records than those beside it; export again"
            )
        return cls(weights, recipe, found)
