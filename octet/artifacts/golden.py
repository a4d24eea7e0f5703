"""Golden records: what the unquantized model answers, kept with every artifact made from it.

A served model is compared with them by the Kullback-Leibler divergence of its next-token
distribution from the reference's, over what an API returns: the top few log-probabilities.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from octet.storage.files import read_document

__all__ = ["GOLDEN_FILE", "POSITIONS", "GoldenRecord", "GoldenSet", "Top", "top_k_divergence"]

GOLDEN_FILE = "golden.json"
POSITIONS = 8  # next-token distributions of a record: after the prompt, and while decoding


class Top(BaseModel):
    """The most likely next tokens at one position, most likely first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # natural logarithm, of the full softmax

    @property
    def mapping(self) -> dict[int, float]:
        return dict(zip(self.token_ids, self.logprobs, strict=True))


class GoldenRecord(BaseModel):
    """One prompt and the reference model's answer to it.

    `tops[j]` is the reference's distribution after the prompt and the first j tokens of the
    continuation, for the first `POSITIONS` of them: a server that has generated those j tokens is
    at the same position. All but `tops[0]` are of decoding, which reads the cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str  # decodes from, and encodes to, prompt_token_ids
    prompt_token_ids: tuple[int, ...]
    continuation_token_ids: tuple[int, ...]  # greedy
    tops: tuple[Top, ...]
    # -Σ ln p of the prompt's tokens but the first, each given those before, in nats.
    prompt_nll: float | None = None

    @property
    def top(self) -> dict[int, float]:
        """After the prompt."""
        return self.tops[0].mapping


class GoldenSet(BaseModel):
    """The golden records of one model, with how they were made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[2] = 2
    weights_sha256: str  # Checkpoint identity that the reference was computed from
    compute_dtype: str  # arithmetic of the reference forward pass, such as float32
    software: dict[str, str]
    records: tuple[GoldenRecord, ...]

    def save(self, directory: Path) -> None:
        (directory / GOLDEN_FILE).write_text(self.model_dump_json())

    @classmethod
    def load(cls, directory: Path) -> Self:
        """ArtifactError if there is none, or no such file; the first schema had no `tops`."""
        return read_document(directory / GOLDEN_FILE, cls, "a golden set of this release")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt: how well-filled a cache decoding reads."""
        return max((len(record.prompt_token_ids) for record in self.records), default=0)


def top_k_divergence(reference: Mapping[int, float], served: Mapping[int, float]) -> float:
    """KL(reference ‖ served) in nats, as far as the most likely tokens of both tell.

    Both map token id to log-probability under a full softmax. Tokens of the reference that are not
    in `served`, n of them, are one outcome, and all others another. That one is served with at most
    n times the least probability in `served`, for else it would hold one of them; of the
    probabilities that this leaves, those of the least divergence are taken. So this is a lower
    bound of the full divergence (the data-processing inequality). Infinite if the served model
    gives no mass to what the reference gives some.
    """
    shared = reference.keys() & served.keys()
    divergence = sum(math.exp(reference[t]) * (reference[t] - served[t]) for t in shared)
    # Rounding of the log-probabilities leaves ±1e-6 where nothing is left.
    p_rest = 1.0 - sum(map(math.exp, reference.values()))
    p_rest = p_rest if p_rest > 1e-6 else 0.0
    q_left = max(1.0 - sum(math.exp(served[t]) for t in shared), 0.0)
    missing = reference.keys() - shared
    p_missing = sum(math.exp(reference[t]) for t in missing)
    q_missing = 0.0
    if missing:
        most = len(missing) * math.exp(min(served.values(), default=0.0))
        q_missing = min(most, q_left * p_missing / (p_missing + p_rest))
    divergence += _term(p_missing, q_missing) + _term(p_rest, q_left - q_missing)
    return max(divergence, 0.0)


def _term(p: float, q: float) -> float:
    if p == 0:
        return 0.0
    return p * math.log(p / q) if q > 0 else math.inf
