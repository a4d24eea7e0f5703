"""Golden records: prompts with the unquantized model's answers, kept with every artifact of it.

A served model is compared with them by the Kullback-Leibler divergence of its next-token
distribution from the reference's, over the few top log-probabilities that an API returns.
"""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from octet.storage.files import read_document

__all__ = [
    "FIRST",
    "GOLDEN_FILE",
    "POSITIONS",
    "GoldenRecord",
    "GoldenSet",
    "Scope",
    "Top",
    "spread",
]

GOLDEN_FILE = "golden.json"
POSITIONS = 8  # next-token distributions per record: the first after the prompt, then decoding
FIRST = 24  # records that an admission sends first, and on which faults are simulated


Token: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 31)]


class Top(BaseModel):
    """The most likely next tokens at one position, most likely first."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    token_ids: tuple[Token, ...]
    logprobs: tuple[float, ...]  # natural logarithm, of the full softmax

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError("as many token ids as logprobs are needed")
        return self

    @property
    def mapping(self) -> dict[int, float]:
        return dict(zip(self.token_ids, self.logprobs, strict=True))


class GoldenRecord(BaseModel):
    """One prompt and the reference model's answer to it.

    `tops[j]` is the reference's distribution after the prompt and the first j tokens of the
    continuation, for j below `POSITIONS`. A server that has generated the same j tokens is at the
    same position. All but `tops[0]` come from decode steps, which read the cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str  # decodes from, and encodes to, prompt_token_ids
    prompt_token_ids: Annotated[tuple[Token, ...], Field(min_length=1)]
    continuation_token_ids: tuple[Token, ...]  # greedy
    tops: Annotated[tuple[Top, ...], Field(min_length=1)]
    # Negative log-likelihood in nats of the prompt's tokens except the first, each given the tokens
    # before it. None for a list of token ids, which is not text.
    prompt_nll: float | None = None
    # Experts that the prompt's tokens were routed to: a number with a bit for each, in hexadecimal.
    experts: Annotated[str, Field(pattern="^[0-9a-f]*$")] = ""

    @property
    def top(self) -> dict[int, float]:
        """The distribution after the prompt."""
        return self.tops[0].mapping


class Scope(BaseModel):
    """All that golden prompts could examine, and how frequent their token ids are in text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocabulary: Annotated[int, Field(ge=1)]
    context: Annotated[int, Field(ge=1)]  # positions of the model
    experts: Annotated[int, Field(ge=0)]  # in all layers; 0: no mixture of experts
    held_out: Annotated[int, Field(ge=1)]  # tokens of the samples that prompts are chosen from
    counts: dict[Token, int]  # how often each token id of a prompt occurs among those tokens


class GoldenSet(BaseModel):
    """The golden records of one model, and how they were computed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[2] = 2
    weights_sha256: str  # identity of the checkpoint that the reference was computed from
    compute_dtype: str  # arithmetic of the reference forward pass, such as float32
    software: dict[str, str]
    records: tuple[GoldenRecord, ...]
    scope: Scope | None = None  # None: an earlier release made it

    def save(self, directory: Path) -> None:
        (directory / GOLDEN_FILE).write_text(self.model_dump_json(), "utf-8")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Loads the golden set; ArtifactError if it is missing or invalid.

        Schema 1, which had no `tops`, is not read.
        """
        return read_document(directory / GOLDEN_FILE, cls, "a golden set of this release")

    @property
    def texts(self) -> list[GoldenRecord]:
        """The records whose prompts are text, not lists of token ids.

        All records if none has a likelihood, as those of earlier releases.
        """
        return [x for x in self.records if x.prompt_nll is not None] or list(self.records)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt: the fullest cache that decoding reads."""
        return max((len(record.prompt_token_ids) for record in self.records), default=0)


def spread(count: int, most: int) -> list[int]:
    """Returns up to `most` of the numbers below `count`, evenly spaced, with the first and last."""
    most = min(count, most)
    return [round(n * (count - 1) / max(most - 1, 1)) for n in range(most)]
