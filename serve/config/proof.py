"""Proof of a backend before it serves a token, its judge while it serves, and tiers."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from octet.errors import ConfigError
from octet.hardware.devices import find_device
from serve.config.section import Count, Fraction, Integer, Name, Number, Seconds, Section

__all__ = ["Judge", "Proof", "Tier"]


class Proof(Section):
    """The golden records that every backend of a pool must answer as its artifact should."""

    # Written by an export or a calibration. Default: the artifact's own of an embedded backend or
    # one that is started here; other backends serve unproven, with a prominent warning.
    golden: Path | None = None
    # Ed25519 public key (PEM or OpenSSH) that must have signed the manifest of the golden records.
    key: Path | None = None
    enabled: bool = True
    # Declared weights of the backends: "quantized" by the artifact's recipe, or the "original"
    # checkpoint in BF16.
    weights: Literal["quantized", "original"] = "quantized"
    # Declared activations of the linear layers: "quantized" as in the recipe, or "original", that
    # is weight-only. Null: either.
    activations: Literal["quantized", "original"] | None = None
    kv_cache: Literal["e5m2", "e4m3", "float16"] | None = None  # null: what the artifact is for
    # Serving engine, if known. Restricts which numerics count as correct.
    engine: Literal["vllm-gpu", "vllm-cpu", "tensorrt", "onnxruntime"] | None = None
    # GPU of the backends, such as h100 or a compute capability such as 9.0. Restricts it further:
    # FP8 weight-only is correct on an A100 and wrong on an H100.
    device: str | None = None
    # A backend without log-probabilities cannot be proven: "admit" lets it serve unproven.
    without_logprobs: Literal["refuse", "admit"] = "refuse"
    every_s: Seconds = 300.0  # least time between two probes of a serving backend
    share: Fraction = 0.01  # of a backend's tokens that probes may use, its admission included
    # An admission sends golden prompts until half of the faults that change perplexity by this
    # share are refused, 0.01 being 1 %. null: until the verdict is clear.
    power: Annotated[Number, Field(gt=0)] | None = None
    timeout_s: Seconds = 60.0  # for one probe; after it, the probe is inconclusive and repeated
    # Golden prompts sent at once; a quarter of that to a backend that has clients' requests.
    concurrency: Count = 24

    @field_validator("device")
    @classmethod
    def _known(cls, device: str | None) -> str | None:
        try:
            if device is not None:
                find_device(device)
            return device
        except ConfigError as error:
            raise ValueError(str(error)) from None


class Judge(Section):
    """Compares a pool with a reference pool, on copies of a share of its model's requests."""

    reference: Name  # a pool, such as one of the BF16 checkpoint; it must be proven
    # Largest divergence from the reference in nats per token, on answers drawn at temperature 1.
    max_kl: Annotated[Number, Field(gt=0)]
    share: Fraction = 0.01  # of the model's requests
    answer_tokens: Annotated[Integer, Field(gt=0, le=1024)] = 32  # of each copy's answer, at most
    max_prompt_tokens: Count = 2048  # longer prompts are not copied
    tokens_per_minute: Count = 20_000  # of both pools together
    max_in_flight: Count = 2  # copies at once
    # Answers after which an undecided interval begins anew; one that decides ends sooner.
    window: Count = 2000


class Tier(Section):
    """A precision that requests select by name, in the header X-Octet-Tier or by an alias."""

    # Largest divergence from the reference, in nats, that a pool of the tier may show when it is
    # measured on the golden prompts.
    max_kl: Annotated[Number, Field(gt=0)]
    # Allows a less exact pool to answer when no pool of the tier can.
    allow_less_exact: bool = False
