"""Perplexity of a trained reference model in every recipe and cache, beside ModelOpt's.

Calibrates a model that `examples/reference/train.py` made, derives every other recipe from the
counts, and simulates each on held-out text with each cache, in BF16 on the whole model. With
`--modelopt`, ModelOpt calibrates the same model on the same samples with its default configuration
of each format. Its own simulated quantization runs on the same text, with a cache in BF16; there
q, k and v have a scale each, which they share in an export. The difference between the two is over
the same samples, with a 95 % interval: ours is worse only if that is above zero.

    python benchmarks/reference_models.py --model DIR [--modelopt] [--output FILE]
"""

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from card import conditions, report

from calibrate.decoder.loading import load_model
from calibrate.observe.histogram import Histograms
from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.quality.divergence import Reference, Sums, Tally
from calibrate.samples.batches import Batch, make_batches, real
from calibrate.scales.derive import derive_scales
from calibrate.scales.expert_fallback import with_fallback
from calibrate.simulate.model import simulate
from octet.artifacts.manifest import software
from octet.model.checkpoint import Checkpoint
from octet.recipe import PRESETS, KvCacheDtype
from octet.statistics import moments
from verify.evaluation.targets.checkpoint import CheckpointTarget

CACHES: tuple[KvCacheDtype, ...] = ("float16", "e5m2", "e4m3")
COUNT = 256  # calibration samples, of up to 512 tokens
HELD_OUT, LENGTH = 128, 1024  # held-out samples, and tokens of each, at most
Z = 1.96
PEERS = {  # of our recipes: ModelOpt's configuration of the same format
    "fp8-static": "FP8_DEFAULT_CFG",
    "fp8": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "mxfp4": "MXFP4_DEFAULT_CFG",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--modelopt", action="store_true", help="run it beside ours")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = Checkpoint.open(options.model)
    samples = options.model / "samples"
    text = CheckpointTarget(options.model).sequences(
        samples / "heldout.jsonl", count=HELD_OUT, max_length=LENGTH
    )
    batches = make_batches(text.ids, text.origins, batch_size=8)
    model = load_model(checkpoint, "bfloat16").to(device)
    reference = Reference(model, checkpoint.spec, batches)
    card = conditions(
        gpu=torch.cuda.get_device_name() if device.type == "cuda" else None,
        model=f"{checkpoint.spec.architecture}, trained by examples/reference/train.py",
        training=(options.model / "training.json").name,
        calibration=f"{COUNT} samples of up to 512 tokens",
        held_out=f"{len(text.ids)} samples, {sum(map(len, text.ids))} tokens of other packages",
        peer=software("nvidia-modelopt") if options.modelopt else None,
        figures="simulated in BF16; intervals of 95 %, over samples",
    )
    rows: list[dict[str, Any]] = []
    ours: dict[str, Sums] = {}
    for recipe, cache, tally in quantized(checkpoint, model, reference, samples, device):
        if cache == "float16":
            ours[recipe] = tally.sums()
        rows.append(figures(f"octet {recipe}", cache, tally))
        write(card, rows, options.output)
    for recipe, name in PEERS.items() if options.modelopt else ():
        rows.append(peer(checkpoint, reference, samples, device, name, ours[recipe]))
        write(card, rows, options.output)
    report("reference_models", card, rows, options.output)


def write(card: dict[str, Any], rows: list[dict[str, Any]], output: Path | None) -> None:
    """Writes what there is so far, in case the machine goes away."""
    print({key: value for key, value in rows[-1].items() if value is not None}, flush=True)
    if output is not None:
        report("reference_models", card, rows, output)


def quantized(
    checkpoint: Checkpoint, model: Any, reference: Reference, samples: Path, device: torch.device
) -> Iterator[tuple[str, KvCacheDtype, Tally]]:
    """Yields each recipe and cache with the comparison of its simulation with the reference."""
    with tempfile.TemporaryDirectory(prefix="octet-") as name:
        calibration = run(
            Options(
                model=checkpoint.path,
                samples=samples / "calibration.jsonl",
                held_out=samples / "heldout.jsonl",
                count=COUNT,
                out=Path(name) / "calibration",
                recipe=PRESETS["fp8"],
                device=device.type,
                predict=False,
            )
        )
        assert calibration is not None
        counts, _ = with_fallback(checkpoint.spec, calibration.histograms)
        histograms = Histograms(counts, calibration.observations)
    for recipe, preset in PRESETS.items():
        found = derive_scales(checkpoint, preset, histograms)
        for cache in CACHES:
            used = found.with_cache(cache)
            with simulate(model, checkpoint.spec, used.recipe, used.scales):
                yield recipe, cache, reference.tally()


def peer(
    checkpoint: Checkpoint,
    reference: Reference,
    samples: Path,
    device: torch.device,
    name: str,
    ours: Sums,
) -> dict[str, Any]:
    """Measures ModelOpt's configuration `name`, and the difference of our recipe from it."""
    import modelopt.torch.quantization as mtq

    model = load_model(checkpoint, "bfloat16").to(device)
    text = CheckpointTarget(checkpoint.path).sequences(samples / "calibration.jsonl", count=COUNT)
    calibration = make_batches(text.ids, text.origins, batch_size=8)

    def decode(batch: Batch) -> torch.Tensor:
        ids = batch.token_ids.to(device)
        hidden: torch.Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return real(hidden, batch)

    def forward(_: Any) -> None:
        for batch in calibration:
            decode(batch)

    try:
        with torch.inference_mode():
            mtq.quantize(model, getattr(mtq, name), forward_loop=forward)
            tally = reference.tally(states=lambda index: decode(reference.batches[index]))
            theirs = tally.sums()
    except Exception as error:  # a peer that fails does not end the comparison
        return {"what": f"modelopt {name}", "cache": f"{type(error).__name__}: {error}"[:200]}
    difference = moments(ours.change - theirs.change, ours.predicted)
    margin = Z * float(difference.error)
    return figures(f"modelopt {name}", "bfloat16", tally) | {
        "ours minus theirs, nats a token": float(difference.mean),
        "low": float(difference.mean) - margin,
        "high": float(difference.mean) + margin,
        "ours worse": float(difference.mean) - margin > 0,
    }


def figures(what: str, cache: str, tally: Tally) -> dict[str, Any]:
    found = tally.divergence()
    margin = Z * found.log_ratio_error
    return {
        "what": what,
        "cache": cache,
        "perplexity": found.perplexity,
        "unquantized": found.reference_perplexity,
        "change %": 100 * found.change,
        "change low %": 100 * math.expm1(found.log_ratio - margin),
        "change high %": 100 * math.expm1(found.log_ratio + margin),
        "kl, nats": found.kl,
        "kl error": found.kl_error,
        "tokens": found.tokens,
        "ours minus theirs, nats a token": None,
        "low": None,
        "high": None,
        "ours worse": None,
    }


if __name__ == "__main__":
    main()
