"""Proof: what a backend's numbers must match before it serves a token, and tiers of precision."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from serve.config.section import Count, Fraction, Number, Seconds, Section

__all__ = ["Proof", "Tier"]


class Proof(Section):
    """The golden records that every backend of a pool must answer as its artifact should."""

    # What an export or a calibration wrote. Left out: an embedded backend's own; others are served
    # unproven, and it is said loudly.
    golden: Path | None = None
    enabled: bool = True
    # What the backends are said to serve: "quantized" as the artifact's recipe says, or the
    # "original" checkpoint in BF16.
    weights: Literal["quantized", "original"] = "quantized"
    kv_cache: Literal["e5m2", "e4m3", "float16"] | None = None  # null: what the artifact is for
    # Which engine computes, where that is known: then only what it honestly does is accepted.
    engine: Literal["vllm-gpu", "vllm-cpu", "tensorrt", "onnxruntime"] | None = None
    # A backend that returns no log-probabilities cannot be proven: "admit" has it serve unproven.
    without_logprobs: Literal["refuse", "admit"] = "refuse"
    every_s: Seconds = 300.0  # between two probes of a backend that serves, at least
    share: Fraction = 0.01  # of a backend's tokens that probes may be, its admission included
    timeout_s: Seconds = 60.0  # for one probe; then it is inconclusive, and tried again
    # Golden prompts asked at once; of a backend that has clients' requests, a quarter of that.
    concurrency: Count = 24


class Tier(Section):
    """A precision that requests may ask for by name, in the header X-Octet-Tier or by an alias."""

    # Nats from the reference on the golden prompts, as measured: what a pool of it may show.
    max_kl: Annotated[Number, Field(gt=0)]
    # Whether a less exact pool may answer when none that fits can.
    allow_less_exact: bool = False
