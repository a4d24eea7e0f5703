"""Measures what observing costs: a forward pass with exact histograms against the bare one.

The claims it checks: under 20 % of an FP32 forward pass and 40 % of a BF16 one, and faster than the
max calibration of NVIDIA ModelOpt. Each round runs the same batches bare, observed, watched by
`x.abs().amax()` (what a max calibrator keeps, for scale), bare again, calibrated by ModelOpt and
bare once more, so that a change of the machine's speed meets all of them; the figure is the median
over rounds of each pass over the mean of the bare passes of its round. The bare pass is the decoder
without its logits, as calibration runs it; against the whole forward pass the share is smaller, and
is given too. `noise` is the median distance of the first two bare passes from each other.

ModelOpt's FP8 max calibration watches what its default configuration does: the inputs of all
linears (those of q, k and v apart) and the weights, not K and V. Its conversion of the model is
timed apart, and so is the share of the weights, which every calibration of its own repeats. It
takes part where it is installed: `make integration` makes such an environment.

    .integration/modelopt/bin/python benchmarks/calibration_overhead.py [--output FILE]
    python benchmarks/calibration_overhead.py [--model DIR] [--samples FILE] [--output FILE]
"""

import argparse
import copy
import importlib.util
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from card import conditions, report
from observing import observing

from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.observe.counting_cpu import Counter, CpuCounter, make_counter
from calibrate.samples.batches import Batch, make_batches, tokenize
from calibrate.samples.source import load_samples
from calibrate.samples.tokens import load_tokenizer
from octet.model.checkpoint import Checkpoint

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"
MAX_LENGTH = 512
DTYPES: tuple[ComputeDtype, ...] = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model")
    parser.add_argument("--samples", type=Path, default=EXAMPLE / "samples" / "calibration.jsonl")
    parser.add_argument("--count", type=int, default=24, help="samples in a pass")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    peer = importlib.util.find_spec("modelopt") is not None
    checkpoint = Checkpoint.open(options.model)
    batches = read_batches(checkpoint, options)
    card = conditions(
        model=f"{options.model.resolve().parent.name}/{options.model.name},"
        f" {checkpoint.spec.layers} layers of {checkpoint.spec.hidden_size}",
        recipe="none: observation is the same for every recipe",
        workload=f"{options.count} samples, {sum(b.tokens for b in batches)} tokens,"
        f" batches of {options.batch_size}",
        rounds=options.rounds,
        modelopt=version("nvidia-modelopt") if peer else "not installed here, so not compared",
        torch_threads=torch.get_num_threads(),
        figures="seconds are medians; overheads are medians over rounds, in % of the bare pass",
    )
    rows = [measure(checkpoint, batches, dtype, options.rounds, peer=peer) for dtype in DTYPES]
    report("calibration_overhead", card, rows, options.output)


def read_batches(checkpoint: Checkpoint, options: argparse.Namespace) -> list[Batch]:
    samples = load_samples(options.samples).samples[: options.count]
    tokenizer = load_tokenizer(checkpoint)
    sequences = tokenize(
        samples, tokenizer, max_length=MAX_LENGTH, vocab_size=checkpoint.spec.vocab_size
    )
    origins = [sample.origin for sample in samples]
    return make_batches(sequences, origins, batch_size=options.batch_size)


class AbsmaxCounter(CpuCounter):
    """Keeps the largest magnitude only; padding is not left out."""

    def add(
        self,
        slot: int,
        x: torch.Tensor,
        lengths: Sequence[int] | None = None,
        *,
        squares: bool = False,
    ) -> None:
        self._counts[slot, 0] = max(self._counts[slot, 0], x.abs().amax().item())


@torch.inference_mode()
def measure(
    checkpoint: Checkpoint,
    batches: Sequence[Batch],
    dtype: ComputeDtype,
    rounds: int,
    *,
    peer: bool,
) -> dict[str, Any]:
    model = load_model(checkpoint, dtype)

    def forward(module: Any) -> Callable[[], None]:
        def run() -> None:
            for batch in batches:
                module(batch.token_ids, use_cache=False)

        return run

    def observed(counter_of: Callable[[int], Counter]) -> float:
        with observing(model, checkpoint.spec, counter_of) as (run, _):
            return seconds(lambda: run(batches))

    bare, whole = forward(model.base_model), forward(model)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):  # the first round warms up
        times["bare"].append(seconds(bare))
        times["observed"].append(observed(lambda slots: make_counter(model.device, slots)))
        times["absmax"].append(observed(lambda slots: AbsmaxCounter(slots, 1)))
        times["again"].append(seconds(bare))
        if peer:
            for name, taken in modelopt(model, forward).items():
                times[name].append(taken)
            times["once more"].append(seconds(bare))
        times["whole"].append(seconds(whole))
    kept = {name: values[1:] for name, values in times.items()}
    passes = [kept[name] for name in ("bare", "again", "once more") if name in kept]
    base: list[float] = [statistics.mean(own) for own in zip(*passes, strict=True)]

    def over(name: str, reference: Sequence[float]) -> float:
        extra = zip(kept[name], base, reference, strict=True)
        return 100 * statistics.median((x - bare) / ref for x, bare, ref in extra)

    apart = zip(kept["bare"], kept["again"], base, strict=True)
    row = {
        "dtype": dtype,
        "bare s": statistics.median(base),
        "observed s": statistics.median(kept["observed"]),
        "overhead %": over("observed", base),
        "of forward %": over("observed", kept["whole"]),
        "absmax %": over("absmax", base),
        "noise %": 100 * statistics.median(abs(a - b) / mean for a, b, mean in apart),
    }
    if peer:
        row |= {
            "modelopt s": statistics.median(kept["modelopt"]),
            "modelopt %": over("modelopt", base),
            "its weights s": statistics.median(kept["weights"]),
            "its conversion s": statistics.median(kept["conversion"]),
        }
    return row


def modelopt(model: Any, forward: Callable[[Any], Callable[[], None]]) -> dict[str, float]:
    """Seconds of ModelOpt's max calibration of a copy that shares the weights, and of its parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers is newer than those it was tested with
        import modelopt.torch.quantization as mtq
        from modelopt.torch.utils.logging import no_stdout

        converted = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        config = {**mtq.FP8_DEFAULT_CFG, "algorithm": None}
        run = forward(converted.base_model)
        with no_stdout():
            return {
                "conversion": seconds(lambda: mtq.quantize(converted, config)),
                "modelopt": seconds(lambda: mtq.calibrate(converted, "max", lambda _: run())),
                "weights": seconds(lambda: mtq.calibrate(converted, "max")),
            }


def seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
