"""Perplexity of a trained reference model in every recipe and cache, beside ModelOpt's exports.

Calibrates a model that `examples/reference/train.py` made, derives every recipe from the counts,
and simulates each with each cache on held-out text: weights, activations and cache are rounded, and
everything else is computed in `--dtype`. With `--modelopt`, ModelOpt calibrates the same model on
the same token rows and exports it. The rows of an export have its codes and scales, read by
Octet's reader, in the same simulation and with our cache scales. If it left linears in full
precision, ours are measured once more with the same linears. The scales of our 4-bit weights have
the least error of the output, weighted by the inputs' mean squares; rows "least error of the
weights" have those of plain squared error, as a calibration for an 8-bit recipe gives.

Intervals are of 95 %, over samples. Changes of the loss are compared pair by pair in nats a token;
those of the perplexity are their exponentials. Ours is worse only if the interval of the difference
is above zero; that of the KL divergence shows much smaller differences. Of 20 comparisons without
any difference, one interval excludes zero by chance.

The rounding errors of one choice of scales are one draw. So `fp8-static` is also measured with its
static scales multiplied by random factors from 1 to 2 (`--draws`), which give the grids another
phase and saturate nothing: a difference within their spread says nothing about how scales are
chosen.

    python benchmarks/reference_models.py --model DIR [--modelopt] [--output FILE]
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from card import conditions, report

from calibrate.decoder.loading import load_model
from calibrate.observe.histogram import Histograms
from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.quality.divergence import Reference, Sums
from calibrate.samples.batches import make_batches
from calibrate.samples.inputs import read_inputs
from calibrate.scales.derive import derive_scales
from calibrate.scales.expert_fallback import of_enough_tokens, with_fallback
from calibrate.simulate.cache import CacheRounding
from calibrate.simulate.model import LayerSimulator, Schemes, module_schemes, replace_weights
from calibrate.simulate.scales import DeviceScales, Scales
from octet.errors import OctetError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.numerics import scaling
from octet.numerics.formats import E4M3
from octet.recipe import PRESETS, KvCacheDtype
from octet.statistics import interval
from verify.evaluation.targets.checkpoint import CheckpointTarget
from verify.reader.checkpoint import Written

CACHES: tuple[KvCacheDtype, ...] = ("float16", "e5m2", "e4m3")
COUNT = 256  # calibration samples, of up to 512 tokens
HELD_OUT, LENGTH = 128, 1024  # held-out samples, and tokens of each, at most
WAIT_S = 300  # for ModelOpt, after our own rows
PEERS = {  # of our recipes: ModelOpt's configuration of the same format
    "fp8-static": "FP8_DEFAULT_CFG",
    "fp8": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "mxfp4": "MXFP4_DEFAULT_CFG",
}


def main() -> None:
    options = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = Checkpoint.open(options.model)
    samples = options.model / "samples"
    with tempfile.TemporaryDirectory(prefix="octet-") as name:
        scratch = Path(name)
        sampling = Options(
            model=checkpoint.path,
            samples=samples / "calibration.jsonl",
            held_out=samples / "heldout.jsonl",
            count=COUNT,
            out=scratch / "calibration",
            recipe=PRESETS["nvfp4"],  # for the mean squares of inputs, which 4-bit recipes observe
            device="cuda" if device.type == "cuda" else "cpu",
            predict=False,
        )
        rows = calibration_rows(checkpoint, sampling)
        peer = Peer(options, rows, scratch) if options.modelopt else None
        bench = Bench(checkpoint, options, device, rows)
        found = measure_ours(bench, sampling, options.draws)
        if peer is not None:
            for recipe, config in PEERS.items():
                measure_theirs(bench, found[recipe], config, peer)
            bench.card["peer"] = peer.about()
    bench.finish()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--modelopt", action="store_true", help="export with it, beside ours")
    parser.add_argument("--modelopt-python", default=sys.executable, help="interpreter that has it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--draws", type=int, default=8, help="random scales of fp8-static")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.modelopt:
        check = "import importlib.util as u, sys; sys.exit(not u.find_spec('modelopt'))"
        try:
            missing = subprocess.run([options.modelopt_python, "-c", check], check=False).returncode
        except OSError as error:
            raise SystemExit(
                f"--modelopt-python {options.modelopt_python}: {error.strerror}"
            ) from None
        if missing:
            raise SystemExit(
                f"{options.modelopt_python} has no modelopt: install nvidia-modelopt, give the"
                " interpreter that has it with --modelopt-python, or leave out --modelopt"
            )
    return options


def calibration_rows(checkpoint: Checkpoint, sampling: Options) -> list[list[int]]:
    """Returns the token ids of the samples that our calibration runs, without padding."""
    return [
        batch.token_ids[row, :length].tolist()
        for batch in read_inputs(checkpoint, sampling).plan.batches
        for row, length in enumerate(batch.lengths)
    ]


@dataclass(frozen=True)
class Served:
    """The simulated model: the schemes of the quantized linears, their scales and exported weights.

    Without an exported weight, the model's own is quantized by its scheme.
    """

    name: str
    schemes: Schemes
    scales: Scales
    weights: Mapping[str, np.ndarray[Any, Any]] | None = None

    def only(self, linears: set[str], name: str) -> "Served":
        schemes = {key: pair for key, pair in self.schemes.items() if key in linears}
        return replace(self, name=name, schemes=schemes)


class Bench:
    """The model in memory, its unquantized output on the held-out text, and the rows so far."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: argparse.Namespace,
        device: torch.device,
        rows: list[list[int]],
    ) -> None:
        self.checkpoint, self.spec, self.output = checkpoint, checkpoint.spec, options.output
        held_out = options.model / "samples" / "heldout.jsonl"
        text = CheckpointTarget(options.model).sequences(
            held_out, count=HELD_OUT, max_length=LENGTH
        )
        batches = make_batches(text.ids, text.origins, batch_size=8)
        self.model = load_model(checkpoint, options.dtype).to(device)
        self.reference = Reference(self.model, self.spec, batches)
        self.rows: list[dict[str, Any]] = []
        self.began = time.perf_counter()
        self.card = conditions(
            gpu=torch.cuda.get_device_name() if device.type == "cuda" else None,
            cuda=torch.version.cuda,
            model=f"{self.spec.architecture}, trained by examples/reference/train.py",
            training=training_facts(options.model),
            calibration=f"{len(rows)} samples, {sum(map(len, rows))} tokens",
            held_out=f"{len(text.ids)} samples, {sum(map(len, text.ids))} tokens of other packages",
            sha256={path.name: digest(path) for path in sorted(held_out.parent.glob("*.jsonl"))},
            arithmetic=f"rounding simulated, everything else in {options.dtype}",
            perplexity_unquantized=None,
            peer=None,
            seconds=None,
        )

    def measure(
        self,
        served: Served,
        caches: tuple[KvCacheDtype, ...] = CACHES,
        beside: Mapping[KvCacheDtype, Sums] | None = None,
    ) -> dict[KvCacheDtype, Sums]:
        """Adds a row for each cache; with `beside`, our sums, also the difference from them."""
        found = {}
        scales = DeviceScales(served.scales, self.model.device)
        exported = None if served.weights is None else served.weights.get
        simulator = LayerSimulator(self.spec, served.schemes, scales, exported)
        with quantized_weights(self.model, simulator):
            for cache in caches:
                with rounding(self.model, simulator, cache):
                    tally = self.reference.tally()
                found[cache] = tally.sums()
                divergence = tally.divergence()
                self.card["perplexity_unquantized"] = divergence.reference_perplexity
                row = {"what": served.name, "cache": cache} | counted(self.spec, served.schemes)
                row |= figures(found[cache], divergence.perplexity, divergence.kl_p90)
                self.add(row | difference(beside[cache] if beside else None, found[cache]))
        return found

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, and writes what there is so far, in case the machine goes away."""
        self.rows.append(row)
        self.card["seconds"] = round(time.perf_counter() - self.began, 1)
        print({key: value for key, value in row.items() if value is not None}, flush=True)
        if self.output is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            result = {"benchmark": "reference_models", "conditions": self.card}
            self.output.write_text(json.dumps(result | {"results": self.rows}, indent=1) + "\n")

    def finish(self) -> None:
        report("reference_models", self.card, self.rows, self.output)


@contextmanager
def quantized_weights(model: Any, simulator: LayerSimulator) -> Iterator[None]:
    """While active, the quantized linears of `model` hold their weights as served."""
    spec = simulator.spec
    with ExitStack() as stack:
        for index in range(spec.layers):
            layer = model.get_submodule(spec.layer(index))
            weights = simulator.weights(layer, index, simulator.of_layer(index))
            stack.enter_context(replace_weights(layer, spec.layer(index), spec, weights))
        yield


@contextmanager
def rounding(model: Any, simulator: LayerSimulator, cache: KvCacheDtype) -> Iterator[None]:
    """While active, `model` rounds activations, keys and values."""
    with ExitStack() as stack:
        for index in range(simulator.spec.layers):
            layer = model.get_submodule(simulator.spec.layer(index))
            how = CacheRounding(cache, own=False)
            stack.enter_context(simulator.rounding(layer, index, simulator.of_layer(index), how))
        yield


@dataclass(frozen=True)
class Ours:
    served: Served
    sums: dict[KvCacheDtype, Sums]


def measure_ours(bench: Bench, sampling: Options, draws: int) -> dict[str, Ours]:
    """Calibrates, and measures each recipe with each cache."""
    calibration = run(sampling)
    assert calibration is not None
    counts, experts = with_fallback(bench.spec, calibration.histograms)
    mean_squares = of_enough_tokens(calibration.mean_squares, experts)
    plain = Histograms(counts, calibration.observations)
    weighted = Histograms(counts, calibration.observations, mean_squares)

    def derived(recipe: str) -> list[Served]:
        """Returns our recipe and, if its weights have 4 bits, the one with plain squared error."""
        schemes, served = module_schemes(bench.spec, PRESETS[recipe]), []
        for histograms, kind in ((weighted, ""), (plain, ", least error of the weights")):
            if not kind or PRESETS[recipe].weighs_inputs:
                scales = derive_scales(bench.checkpoint, PRESETS[recipe], histograms).scales
                served.append(Served(f"octet {recipe}{kind}", schemes, scales))
        return served

    found = {}
    with ThreadPoolExecutor(1) as pool:  # the CPU derives the next while the GPU measures
        for recipe, (ours, *others) in zip(PRESETS, pool.map(derived, PRESETS), strict=True):
            found[recipe] = Ours(ours, bench.measure(ours))
            for other in others:
                bench.measure(other, beside=found[recipe].sums)
    for seed in range(draws):
        served = found["fp8-static"].served
        name = f"octet fp8-static, scales times 1 to 2, draw {seed}"
        drawn = replace(served, name=name, scales=other_phases(served.scales, seed))
        bench.measure(drawn, ("float16",))
    return found


def other_phases(scales: Scales, seed: int) -> Scales:
    """Multiplies the scales of weights and activations by factors of 1 to 2.

    Linears that share a scale, as q, k and v do, go on sharing it.
    """
    generator = np.random.default_rng(seed)
    factors: dict[tuple[str, float], np.float32] = {}
    found = dict(scales)
    for name, scale in scales.items():
        kind = name.rpartition(".")[2]
        if kind in ("weight_scale", "input_scale"):
            key = (kind, float(scale))
            if key not in factors:
                factors[key] = np.float32(2 ** generator.random())
            found[name] = np.asarray(scale * factors[key], np.float32)
    return found


class Peer:
    """ModelOpt's exports, which a process of its own makes while ours are measured."""

    def __init__(self, options: argparse.Namespace, rows: list[list[int]], scratch: Path) -> None:
        self._out = scratch / "modelopt"
        (scratch / "rows.json").write_text(json.dumps(rows))
        script = Path(__file__).with_name("reference_modelopt.py")
        where = (str(options.model), str(scratch / "rows.json"), str(self._out))
        command = [options.modelopt_python, str(script), *where, *PEERS.values()]
        self._process = subprocess.Popen(command)

    def export(self, config: str) -> Path | str:
        """Waits for the exports; returns the checkpoint of `config`, or why there is none."""
        try:
            code = self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        failed = self._out / f"{config}.failed"
        if failed.exists():
            return failed.read_text()[:200]
        found = self._out / config
        return found if (found / "config.json").exists() else f"its process ended with {code}"

    def about(self) -> dict[str, Any]:
        path = self._out / "about.json"
        return json.loads(path.read_text()) if path.exists() else {}


def measure_theirs(bench: Bench, ours: Ours, config: str, peer: Peer) -> None:
    """Measures an export of ModelOpt with each cache, beside our recipe of the same format."""
    path = peer.export(config)
    if isinstance(path, str):
        bench.add({"what": f"modelopt {config}", "cache": path})
        return
    theirs = exported(path, config, ours.served)
    linears = set(theirs.schemes)
    beside = ours.sums
    if linears != set(ours.served.schemes):
        same = ours.served.only(linears, f"{ours.served.name}, linears of modelopt {config} only")
        beside = bench.measure(same)
    bench.measure(theirs, beside=beside)
    if config == "FP8_DEFAULT_CFG":  # which of the scales makes a difference, if one does
        bench.measure(fused(theirs, bench.spec), beside=beside)
        inputs = {key: scale for key, scale in theirs.scales.items() if "input" in key}
        name = "octet fp8-static, modelopt's activation scales"
        mixed = replace(ours.served.only(linears, name), scales={**ours.served.scales, **inputs})
        bench.measure(mixed, ("float16",), beside)


def exported(path: Path, config: str, ours: Served) -> Served:
    """Reads an export: its weights as an engine decodes them, its activation scales.

    The cache has our scales. Linears that ModelOpt left in full precision are missing.
    """
    written = Written.open(path)
    assert written.quantization is not None
    weights, scales = {}, {k: s for k, s in ours.scales.items() if ".self_attn." in k}
    for name, (_, inputs) in ours.schemes.items():
        weight = written.dequantized(name)
        if weight is None or written.dtype(f"{name}.weight") in ("BF16", "F16", "F32"):
            continue
        weights[name] = weight
        scales[f"{name}.weight_scale"] = written.values(f"{name}.weight_scale")
        scales.pop(f"{name}.input_scale", None)
        if f"{name}.input_scale" in written:
            kind = "input_global_scale" if inputs.two_level else "input_scale"
            given = written.values(f"{name}.input_scale")
            scales[f"{name}.{kind}"] = np.asarray(given.reshape(()), np.float32)
    written.release()
    return Served(f"modelopt {config}", {n: ours.schemes[n] for n in weights}, scales, weights)


def fused(served: Served, spec: ModelSpec) -> Served:
    """Returns an FP8 export as vLLM 0.32 computes it: q, k and v share a scale, and gate and up.

    ModelOpt stores one for each. vLLM decodes them to FP16 and quantizes them again with the
    largest (`requantize_with_max_scale`). The experts' gate and up share one in the export.
    """
    assert served.weights is not None
    groups: dict[str, list[str]] = {}
    for linear in spec.linears():
        if linear.name in served.weights and ".experts." not in linear.name:
            groups.setdefault(linear.input, []).append(linear.name)
    weights = dict(served.weights)
    for names in groups.values():
        largest = max(served.scales[f"{name}.weight_scale"].reshape(()) for name in names)
        for name in names if len(names) > 1 else ():
            decoded = weights[name].astype(np.float16).astype(np.float32)
            weights[name] = scaling.fake_quantize(decoded, largest, E4M3, scaling.TENSOR)
    return replace(served, name=f"{served.name}, as vLLM fuses it", weights=weights)


def counted(spec: ModelSpec, schemes: Schemes) -> dict[str, str]:
    """Returns how many linears are quantized, of how many: those of experts, and the others."""
    names = {True: [0, 0], False: [0, 0]}
    for linear in spec.linears():
        kind = names[".experts." in linear.name]
        kind[0] += linear.name in schemes
        kind[1] += 1
    return {
        "linears": "{} of {}".format(*names[False]),
        "expert linears": "{} of {}".format(*names[True]),
    }


def figures(sums: Sums, perplexity: float, kl_p90: float) -> dict[str, Any]:
    """Returns the figures against the unquantized model."""
    used = sums.predicted > 0
    nats = interval(sums.change[used], sums.predicted[used])
    change = nats.map(math.expm1)
    kl = interval(sums.kl, sums.tokens)
    return {
        "perplexity": perplexity,
        "nats": nats.mean,
        "nats low": nats.low,
        "nats high": nats.high,
        "change %": 100 * change.mean,
        "change low %": 100 * change.low,
        "change high %": 100 * change.high,
        "kl": kl.mean,
        "kl low": kl.low,
        "kl high": kl.high,
        "kl p90": kl_p90,
    }


def difference(ours: Sums | None, theirs: Sums) -> dict[str, Any]:
    """Returns our change of the loss, and our KL, minus theirs: nats a token, paired by sample."""
    keys = (
        *("ours minus this, nats", "low", "high", "ours worse"),
        *("ours minus this, kl", "kl diff low", "kl diff high", "ours worse by kl"),
    )
    if ours is None:
        return dict.fromkeys(keys)
    used = ours.predicted > 0
    loss = interval((ours.change - theirs.change)[used], ours.predicted[used])
    kl = interval(ours.kl - theirs.kl, ours.tokens)
    found = [x for one in (loss, kl) for x in (one.mean, one.low, one.high, one.low > 0)]
    return dict(zip(keys, found, strict=True))


def training_facts(model: Path) -> dict[str, Any] | None:
    """Returns what training.json records of the model's origin."""
    path = model / "training.json"
    if not path.is_file():
        return None
    log = json.loads(path.read_text())
    keys = ("model", "parameters", "seed", "tokens trained", "held-out perplexity", "device")
    text = {part: facts["sha256"] for part, facts in log["text"].items()}
    return {key: log[key] for key in keys} | {"outliers": log["outliers folded in"], "text": text}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    try:
        main()
    except OctetError as error:
        sys.exit(f"error: {error}")
