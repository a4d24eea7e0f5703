"""Reports of a made-up model of two layers, with every section that a report can have."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.observe.histogram import Histogram
from calibrate.report.document import Report, build_report
from calibrate.scales.convergence import convergence
from calibrate.scales.derive import Quantization, input_scales, kv_scales
from calibrate.scales.weights import WeightScale
from octet.artifacts.calibration import Observation
from octet.model.spec import ModelSpec
from octet.recipe import Recipe
from tests.calibrate.contents import count_reference

COUNTS = (32, 64, 128)
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    layers=2,
    hidden_size=64,
    intermediate_size=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=256,
    max_positions=128,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    eos_token_ids=(0,),
    bos_token_id=None,
)


def observations() -> dict[str, Observation]:
    found: dict[str, Observation] = {}
    linears = list(SPEC.linears())
    for linear in linears:
        consumers = tuple(x.name for x in linears if x.input == linear.input)
        found[linear.input] = observation("input", consumers)
        attention = linear.name.rpartition(".")[0]
        if linear.name.endswith("q_proj"):
            found[f"{attention}.key"] = observation("key", (attention,))
            found[f"{attention}.value"] = observation("value", (attention,))
    return found


def observation(kind: Any, consumers: tuple[str, ...]) -> Observation:
    return Observation(kind=kind, consumers=consumers, observed_dtype="float32")


def chunks(
    outlier: Mapping[str, float] | None = None, late: Mapping[str, float] | None = None
) -> dict[str, NDArray[np.int64]]:
    """Normal values, int64[3, 32768] a tensor.

    `outlier` multiplies a few values of every span of a tensor, `late` those of the last alone.
    """
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in observations():
        spans = [torch.randn(size, generator=generator) for size in (4_000, 4_000, 8_000)]
        # A 16th of an octave is fine enough, and 200 magnitudes are searched sooner than 2,000.
        spans = [torch.exp2((span.abs().log2() * 16).round() / 16) for span in spans]
        for span in spans:
            span[0] = 5.0  # all spans reach as far
            span[:4] *= (outlier or {}).get(name, 1.0)
        spans[-1][:4] *= (late or {}).get(name, 1.0)
        found[name] = np.stack([count_reference(span) for span in spans])
    return found


def make_report(
    recipe: str | Recipe = "fp8-static",
    *,
    counts: Mapping[str, NDArray[np.int64]] | None = None,
    weights_db: float = 31.5,
    spec: ModelSpec = SPEC,
    **sections: Any,
) -> Report:
    """As `calibrate.pipeline` would, from made-up activations."""
    chosen = Recipe.load(recipe) if isinstance(recipe, str) else recipe
    spans = chunks() if counts is None else counts
    histograms = {name: Histogram(span.sum(axis=0), "bfloat16") for name, span in spans.items()}
    checkpoint: Any = SimpleNamespace(spec=spec)  # all that scales of activations need
    scales = input_scales(checkpoint, chosen, histograms)
    scales |= kv_scales(checkpoint, chosen, histograms)
    weights = {
        linear.name: WeightScale(np.float32(0.01), "e4m3", weights_db)
        for linear in SPEC.linears()
        if chosen.scheme_of(linear.name)
    }
    sections.setdefault("convergence", convergence(spans, observations(), chosen, COUNTS))
    sections = {"samples": COUNTS[-1], "tokens": 16_000} | sections
    return build_report(
        Quantization(checkpoint, chosen, histograms, scales, weights),
        observations(),
        model="made-up",
        **sections,
    )


def sensitivity(perplexity: float = 10.05) -> dict[str, Any]:
    """In the shape of `calibrate.quality.measure.Measured.sensitivity`; 10 before quantization."""
    groups: dict[str, list[str]] = {}
    for linear in SPEC.linears():
        groups.setdefault(linear.input, []).append(linear.name)
    units = [
        {
            "name": name.removesuffix(".input"),
            "linears": linears,
            "weights": 8_192,
            "format": "e4m3",
            "kl": 1e-4 * (index + 1),
            "kl_error": 1e-5,
            "input_sqnr_db": 30.0 - index,
            "input_small_sqnr_db": 29.0 - index / 4,
            "weight_sqnr_db": 31.5,
            "output_sqnr_db": 28.0 - index,
        }
        for index, (name, linears) in enumerate(groups.items())
    ]
    return {
        "samples": 16,
        "tokens": 4_096,
        "small_quantile": 0.9,
        "reference_perplexity": 10.0,
        "all": {"kl": 0.004, "kl_error": 1e-4, "perplexity": perplexity},
        "evaluated_on": "held-out samples",
        "units": units,
    }


def budget() -> dict[str, Any]:
    """In the shape of `calibrate.quality.budget.Budget.as_json`."""
    return {
        "metric": "kl",
        "limit": 0.005,
        "reached": 0.004,
        "bound": 0.0045,
        "met": True,
        "curve": [
            {
                "promoted": None,
                "to": None,
                "weight_bytes": 100_000,
                "kl": 0.02,
                "perplexity": 10.2,
                "bound": 0.021,
            },
            {
                "promoted": "model.layers.0.self_attn.q_proj",
                "to": "bfloat16",
                "weight_bytes": 116_384,
                "kl": 0.004,
                "perplexity": 10.05,
                "bound": 0.0045,
            },
        ],
        "tokens": 16_384,
        "evaluated_on": "held-out samples",
        "chosen": [{"unit": "model.layers.0.self_attn.q_proj", "to": "bfloat16"}],
        "units": 8,
    }


def training() -> dict[str, Any]:
    """In the shape of the details of `calibrate.recover.recover`."""
    return {
        "name": "recover",
        "train": ["weights", "norms"],
        "epochs": 1,
        "steps": 16,
        "learning_rate": 1.5e-5,
        "tokens": 16_000,
        "loss": [0.05],
        "held_out": {
            "before": 0.05,
            "after": 0.04,
            "less": {"mean": 0.01, "low": 0.009, "high": 0.011},
            "tokens": 16_400,
            "on": "held-out samples",
        },
    }


def experts() -> dict[str, Any]:
    """In the shape of the facts of `calibrate.scales.expert_fallback.with_fallback`."""
    return {
        "min_tokens": 256,
        "rule": "the sum of the histograms of all experts of the same layer and projection",
        "layers": {"model.layers.0": {"tokens": [4_000, 0, 120, 9_000]}},
        "fallback": [
            {"name": "model.layers.0.mlp.experts.1", "tokens": 0},
            {"name": "model.layers.0.mlp.experts.2", "tokens": 120},
        ],
    }
