"""Measures which faults drawn at random an admission detects, and what it refuses wrongly.

    python benchmarks/proof_study_random.py --model examples/python-lm/model
        --samples examples/python-lm/samples --tokens 4096 --sets 3 --processes 2 --output FILE
    python benchmarks/proof_study_random.py --join PART ... --output FILE

A model of `examples/reference/train.py` needs one H100 or H200, which several processes can share:
calibrate it with `octet calibrate`, give each `--calibration` and another `--seed`, and join them.

Calibrates the model as `fp8` with an E5M2 cache, then serves it in this process: weights,
activations and cache are rounded, everything else is computed in the path's dtype, in batches of
other prompts than the simulations of the calibration. Each draw takes golden prompts (one of each
length, from `--sets` golden sets with scenarios of their own), and is judged as at an
admission by the gateway, and once more on all 64 answers, as regular probes do in time.

- Conforming draws differ in prompts, path of the declared configuration, batches, attention and
  threads. None may be refused.
- Faulty draws change the served model (`random_faults.py`). Their cost is the change of perplexity
  on held-out text, and on text that the reference would write: the difference of the mean
  KL(reference || served) at the positions of the held-out text. The first has the larger error.
  A cause is right if it names the simulated fault that was planted; withheld if it names none.

The curve has the share of faults that are refused by size, with Wilson's intervals of 95 %, beside
the power that the calibration states, and by size in multiples of that power. `--join` of one
result computes the same from its rows again.
"""

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from card import conditions, report
from random_faults import KINDS, Planted, Served
from torch import Tensor

from calibrate.decoder.arithmetic import linear
from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.golden import described, golden_set
from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.quality.divergence import Reference
from calibrate.samples.batches import make_batches, real, tokenize
from calibrate.samples.golden_prompts import READ, choose_prompts
from calibrate.samples.source import load_samples
from calibrate.samples.tokens import load_tokenizer
from calibrate.simulate.faults import as_fused, cache_rounding
from calibrate.simulate.model import LayerSimulator, module_schemes, replace_weights
from calibrate.simulate.predict import scenarios
from calibrate.simulate.scales import DeviceScales
from calibrate.simulate.scenarios import serving_paths
from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import FIRST, GoldenSet
from octet.artifacts.scenarios import Scenario, ScenarioSet
from octet.artifacts.serving_path import ServingPath
from octet.errors import NumericsError
from octet.model.checkpoint import Checkpoint
from octet.proof.causes import cause_of
from octet.proof.declared import declared_paths
from octet.proof.judge import judge
from octet.proof.power import power
from octet.proof.reference import load_proofs
from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from octet.recipe import PRESETS, KvCacheDtype
from serve.proof.plan import order, parts_of, simulated

RECIPE = PRESETS["fp8"]
CACHE: KvCacheDtype = "e5m2"
LENGTH = 512  # tokens of a held-out sample, at most
TOP = 20
MULTIPLES = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, math.inf)  # of the stated power
PLACES = {  # kinds of faults by where they are; the others are at a few places, or in no weights
    "everywhere": ("noise in all linears", "embedding noise"),
    "one place": (
        *("scale of a linear", "scales of rows permuted", "rows zeroed", "columns zeroed"),
        *("rows permuted", "pairs of codes swapped", "noise in a linear", "a norm scaled"),
        *("heads zeroed", "attention scale", "scales of a layer"),
        "scales of a layer, halved or doubled",
    ),
}
BINS = (0.0, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, math.inf)  # % of perplexity
REFUSED = ("better", "worse")
WITHHELD = ("another_model", "partly_wrong", "closer")


def main() -> None:
    options = parse_arguments()
    if options.join:
        parts = [json.loads(path.read_text()) for path in options.join]
        conforming, faulty = (
            [x for p in parts for x in p[key]] for key in ("conforming", "faulty")
        )
        card = parts[0]["conditions"]
        if len(parts) > 1:
            for name in ("seed", "seconds", "text", "usual", "power of all sets %"):
                card[name] = [part["conditions"][name] for part in parts]
        write(options.output, card, conforming, faulty)
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="octet-") as scratch:
        calibration = options.calibration or calibrated(options, Path(scratch) / "calibration")
        bench = Bench(options, calibration)
    say(f"{len(bench.sets)} golden sets: {time.perf_counter() - began:.0f} s")
    left = options.seconds - (time.perf_counter() - began)
    bench.until = time.perf_counter() + 0.4 * left
    conforming = bench.shared("conforming", options.draws, options.processes)
    say(f"{len(conforming)} conforming draws: {time.perf_counter() - began:.0f} s")
    bench.until = began + options.seconds
    faulty = bench.shared("faulty", options.faults, options.processes)
    bench.card["seconds"] = round(time.perf_counter() - began)
    write(options.output, bench.card, conforming, faulty)


def write(
    output: Path | None,
    card: dict[str, Any],
    conforming: list[dict[str, Any]],
    faulty: list[dict[str, Any]],
) -> None:
    """Prints the curve; writes it with every draw, a line each.

    Exits with 1 if a conforming server is refused.
    """
    card |= summarized(conforming, faulty)
    card["refused by multiples of the stated power"] = by_power(faulty, card["power stated %"])
    report("proof_study_random", card, curve(faulty), output)
    if output is not None:
        text = output.read_text().removesuffix("\n}\n")
        for name, rows in (("conforming", conforming), ("faulty", faulty)):
            lines = ",\n  ".join(map(json.dumps, rows))
            text += f',\n "{name}": [\n  {lines}\n ]'
        output.write_text(text + "\n}\n")
    if wrong := [row for row in conforming if row["admission"] in REFUSED]:
        sys.exit(f"conforming servers refused: {wrong}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--samples", type=Path, help="directory; default: DIR/samples")
    parser.add_argument("--calibration", type=Path, help="made before, as fp8 for an E5M2 cache")
    parser.add_argument("--sets", type=int, default=8, help="golden sets that prompts come from")
    parser.add_argument("--draws", type=int, default=200, help="conforming servers")
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=8192, help="of held-out text")
    parser.add_argument("--processes", type=int, default=1, help="on a CPU, a thread each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which none is drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--join", type=Path, nargs="*", help="results to put together")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not options.join and options.model is None:
        parser.error("--model or --join is needed")
    options.samples = options.samples or (options.model and options.model / "samples")
    return options


def say(line: str) -> None:
    print(line, flush=True)


def calibrated(options: argparse.Namespace, out: Path) -> Path:
    run(
        Options(
            model=options.model,
            samples=options.samples / "calibration.jsonl",
            held_out=options.samples / "heldout.jsonl",
            count=128,
            out=out,
            recipe=RECIPE,
        )
    )
    return out


@dataclass(frozen=True)
class Setting:
    """How a conforming server computes: nothing of it may matter."""

    path: ServingPath
    attention: str
    threads: int


class Bench:
    """The model as it is served, its reference on held-out text, and the golden sets."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.seed = options.seed
        self.until = math.inf
        self.random = np.random.default_rng(options.seed)
        torch.set_num_threads(1)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        calibration = Calibration.load(directory)
        checkpoint = calibration.applied_to(Checkpoint.open(options.model))
        self.checkpoint, self.spec = checkpoint, checkpoint.spec
        self.schemes = module_schemes(self.spec, RECIPE)
        self.scales = DeviceScales(calibration.scales, self.device)
        self.models: dict[ComputeDtype, Any] = {}
        self.reference = self._reference(options)
        self.sets = [*self._sets(options, directory, calibration)]
        self.paths = [x for x in serving_paths(RECIPE) if x.kv_cache == CACHE]
        self.power = load_proofs(directory).power
        tokens = sum(batch.tokens for batch in self.reference.batches)
        with self._served(self.paths[0]):
            self.usual = self._cost(self.paths[0])
        self.card = conditions(
            gpu=torch.cuda.get_device_name() if self.device.type == "cuda" else None,
            model=f"{self.spec.architecture}, {self.spec.layers} layers of {self.spec.hidden_size}",
            artifact=f"{RECIPE.name} with an {CACHE} cache",
            server="simulated in this process, in batches of other prompts than the scenarios",
            prompts=f"64 a draw, one of each length, from {len(self.sets)} golden sets",
            text=f"{tokens} tokens of held-out samples",
            usual={"kl": self.usual[1], "perplexity %": 100 * math.expm1(self.usual[0])},
            seed=options.seed,
        )
        self.card["power stated %"] = {x.prompts: 100 * x.middle for x in self.power}
        self.card["power of all sets %"] = [list(self._stated(*x)) for x in self.sets]

    def _stated(self, golden: GoldenSet, known: ScenarioSet) -> Iterator[float]:
        """Yields the change of perplexity, in %, that passes after 24 and after all prompts."""
        for prompts in (FIRST, len(golden.records)):
            found = power(golden, known, self.paths[0], prompts)
            yield math.nan if found is None else 100 * found.middle

    def shared(self, what: str, draws: int, processes: int) -> list[dict[str, Any]]:
        """Returns `draws` rows of a method; forked processes take turns in them."""
        turns = [range(first, draws, processes) for first in range(processes)]
        if processes == 1:
            return self.rows(what, turns[0])
        _shared.append(self)  # with the forked processes
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            return [row for part in pool.map(partial(_rows, what), turns) for row in part]

    def rows(self, what: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Returns a row for each number, which seeds it, and prints it when it is there."""
        found = []
        for number in numbers:
            if time.perf_counter() > self.until:
                break
            self.random = np.random.default_rng([self.seed, what == "faulty", number])
            found.append(getattr(self, what)(number))
            say(json.dumps({"number": number} | found[-1]))
        return found

    def conforming(self, _number: int) -> dict[str, Any]:
        """Returns the verdicts on a conforming server."""
        setting = Setting(
            path=self.paths[self.random.integers(len(self.paths))],
            attention=str(self.random.choice(["sdpa", "eager"])),
            threads=1 + int(self.random.integers(8) == 0),  # more wait for each other
        )
        golden, known = self._draw()
        with self._set(setting), self._served(setting.path):
            at_first, in_all = self._verdicts(setting.path, golden, known)
        return {
            "path": setting.path.label,
            "attention": setting.attention,
            "threads": setting.threads,
            "kl": in_all.measure.kl_mean,
            "admission": at_first.outcome,
            "prompts": at_first.measure.prompts,
            "all prompts": in_all.outcome,
            "reason": None if at_first.outcome == "as_expected" else at_first.reason,
        }

    def faulty(self, number: int) -> dict[str, Any]:
        """Returns the cost of a random fault, and the verdicts on a server that has it.

        Kinds take turns. The server is the path that a GPU takes, whose power is stated.
        """
        path, names = self.paths[0], [*KINDS]
        kind = names[number % len(names)]
        golden, known = self._draw()
        with self._served(path) as served:
            planted = KINDS[kind](served, self.random)
            change, own = self._cost(path)
            at_first, in_all = self._verdicts(path, golden, known)
        return {
            "kind": kind,
            "where": planted.where,
            "size": planted.size,
            "perplexity %": _percent(change - self.usual[0]),
            "own text %": _percent(own - self.usual[1]),
            "admission": at_first.outcome,
            "prompts": at_first.measure.prompts,
            "all prompts": in_all.outcome,
            "cause": None if in_all.cause is None else in_all.cause.name,
            "named": named(in_all, planted),
        }

    def _reference(self, options: argparse.Namespace) -> Reference:
        """Runs the unquantized model on held-out text; its memory is freed."""
        samples, _ = load_samples(options.samples / "heldout.jsonl").first(None)
        tokenizer = load_tokenizer(self.checkpoint)
        ids = tokenize(samples, tokenizer, max_length=LENGTH, vocab_size=self.spec.vocab_size)
        self.random.shuffle(ids)
        lengths = np.cumsum([len(x) for x in ids])
        ids = ids[: int(np.searchsorted(lengths, options.tokens)) + 1]
        batches = make_batches(ids, [str(n) for n in range(len(ids))], batch_size=8)
        return Reference(self.model("float32"), self.spec, batches)

    def _sets(
        self, options: argparse.Namespace, directory: Path, calibration: Calibration
    ) -> Iterator[tuple[GoldenSet, ScenarioSet]]:
        """Yields the calibration's golden set, then others of other pieces of held-out text."""
        proofs = load_proofs(directory)
        assert proofs.scenarios is not None
        yield proofs.golden, proofs.scenarios
        assert proofs.golden.scope is not None
        samples, _ = load_samples(options.samples / "heldout.jsonl").first(None)
        tokenizer = load_tokenizer(self.checkpoint)
        vocabulary = self.spec.vocab_size
        whole = tokenize(samples, tokenizer, max_length=READ, vocab_size=vocabulary)
        for _ in range(options.sets - 1):
            starts = [int(self.random.integers(max(1, len(ids) - LENGTH))) for ids in whole]
            pieces = [ids[start:] for ids, start in zip(whole, starts, strict=True)]
            self.random.shuffle(pieces)
            chosen = choose_prompts(pieces, tokenizer, self.spec.max_positions, vocabulary)
            golden = golden_set(self.checkpoint, chosen.prompts, device=self.device)
            golden = described(golden, proofs.golden.scope, chosen.lists)
            yield (
                golden,
                scenarios(self.checkpoint, RECIPE, calibration.scales, golden, device=self.device),
            )

    def _draw(self) -> tuple[GoldenSet, ScenarioSet]:
        """Draws a golden set: each prompt from one of the sets, the shortest first."""
        count = min(len(golden.records) for golden, _ in self.sets)
        chosen = self.random.integers(len(self.sets), size=count)
        records = tuple(self.sets[which][0].records[n] for n, which in enumerate(chosen))
        logprobs = {}
        for scenario in self.sets[0][1].logprobs:
            values = [known.logprobs.get(scenario) for _, known in self.sets]
            if any(x is None for x in values):
                continue
            parts = [values[which][:, n] for n, which in enumerate(chosen)]
            logprobs[scenario] = np.stack(parts, 1)
        golden = self.sets[0][0].model_copy(update={"records": records})
        return golden, ScenarioSet(golden.weights_sha256, RECIPE.name, logprobs)

    def model(self, dtype: ComputeDtype) -> Any:
        if dtype not in self.models:
            self.models[dtype] = load_model(self.checkpoint, dtype).to(self.device)
        return self.models[dtype]

    @contextmanager
    def _set(self, setting: Setting) -> Iterator[None]:
        model = self.model(setting.path.compute)
        before = model.config._attn_implementation, torch.get_num_threads()
        model.set_attn_implementation(setting.attention)
        torch.set_num_threads(setting.threads)
        try:
            yield
        finally:
            model.set_attn_implementation(before[0])
            torch.set_num_threads(before[1])

    @contextmanager
    def _served(self, path: ServingPath) -> Iterator[Served]:
        """While active, the model computes as served on `path`."""
        model, spec = self.model(path.compute), self.spec
        simulator = LayerSimulator(spec, self.schemes, self.scales)
        rounding = cache_rounding(Scenario(path=path), RECIPE)
        with torch.no_grad(), ExitStack() as stack:
            for index in range(spec.layers):
                prefix, mine = spec.layer(index), simulator.of_layer(index)
                layer = model.get_submodule(prefix)
                weights = as_fused(simulator.weights(layer, index, mine), mine, self.scales, spec)
                stack.enter_context(replace_weights(layer, prefix, spec, weights))
                rounded = mine if path.activations else {}
                stack.enter_context(simulator.rounding(layer, index, rounded, rounding))
            yield Served(model, spec, self.schemes, self.scales, path, stack)

    def _states(self, path: ServingPath, token_ids: Tensor) -> Tensor:
        decoder = self.model(path.compute).base_model
        found: Tensor = decoder(
            input_ids=token_ids.to(self.device), use_cache=False
        ).last_hidden_state
        return found

    @torch.no_grad()
    def _cost(self, path: ServingPath) -> tuple[float, float]:
        """Returns the change of log-perplexity and the mean KL on held-out text, in nats.

        Infinity where a logit is NaN.
        """
        batches = self.reference.batches
        head = self.model(path.compute).get_output_embeddings().weight.float()

        def states(index: int) -> Tensor:
            return real(self._states(path, batches[index].token_ids), batches[index])

        try:
            found = self.reference.tally(states=states, head=lambda x: linear(x, head))
            sums = found.sums()
        except NumericsError:
            return math.inf, math.inf
        change = sums.change.sum() / sums.predicted.sum()
        return float(change), float(sums.kl.sum() / sums.tokens.sum())

    @torch.no_grad()
    def _answers(
        self, path: ServingPath, golden: GoldenSet, records: Sequence[int], rows: int
    ) -> list[Response]:
        """Returns answers to `records`, in random batches of up to `rows` of like lengths."""
        lengths = np.array([len(golden.records[n].prompt_token_ids) for n in records])
        turns = np.argsort(lengths * self.random.uniform(0.7, 1.4, len(lengths)))
        head = self.model(path.compute).get_output_embeddings()
        found: list[Response] = []
        for start in range(0, len(turns), rows):
            part = [records[n] for n in turns[start : start + rows]]
            texts = [sequence(golden, number) for number in part]
            (batch,) = make_batches(texts, [str(number) for number in part], batch_size=rows)
            states = self._states(path, batch.token_ids)
            for row, origin in enumerate(batch.origins):
                record = golden.records[int(origin)]
                first, count = len(record.prompt_token_ids) - 1, len(record.tops)
                logits = head(states[row, first : first + count])
                top = logits.double().log_softmax(-1).topk(min(TOP, logits.shape[-1]))
                ids, values = top.indices.tolist(), top.values.tolist()
                tops = tuple(dict(zip(*x, strict=True)) for x in zip(ids, values, strict=True))
                found.append(Response(int(origin), tuple(x[0] for x in ids), tops))
        return found

    def _verdicts(
        self, path: ServingPath, golden: GoldenSet, known: ScenarioSet
    ) -> tuple[Verdict, Verdict]:
        """Judges the server as at an admission, and on all answers unless that refused it."""
        declared = declared_paths(known, RECIPE, CACHE)
        seed, rows = int(self.random.integers(1 << 31)), int(2 ** self.random.integers(2, 6))
        parts = list(parts_of(order(golden, seed, first=simulated(known))))
        asked: list[Response] = []
        first: Verdict | None = None
        for part in parts:
            asked += self._answers(path, golden, part, rows)
            if first is not None and len(asked) < len(golden.records):
                continue
            found = judge(golden, known, declared, asked, looks=len(parts))
            if first is None and found.outcome != "inconclusive":
                first = found
            if found.outcome in REFUSED:
                break
        return first or found, found


_shared: list[Bench] = []


def _rows(what: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
    return _shared[-1].rows(what, numbers)


def named(verdict: Verdict, planted: Planted) -> str | None:
    """Classifies the cause: right, right among several, withheld or wrong; None: not refused."""
    cause = verdict.cause
    if cause is None or verdict.path is None:
        return None if cause is None else "right"  # no distribution
    if cause.name in WITHHELD:
        return "withheld"
    if planted.scenario is None:
        return "wrong"
    scenario = planted.scenario.model_copy(update={"path": verdict.path})
    right = cause_of(scenario, verdict.path)
    if cause.name == "undecided":
        return "right among several" if right.sentence in cause.sentence else "wrong"
    return "right" if cause.name == right.name else "wrong"


def sequence(golden: GoldenSet, number: int) -> list[int]:
    record = golden.records[number]
    return [*record.prompt_token_ids, *record.continuation_token_ids[: len(record.tops) - 1]]


def curve(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each bin of either cost, with the share of faults that are refused."""
    found = []
    for text in ("own text %", "perplexity %"):
        for low, high in pairwise(BINS):
            inside = [row for row in rows if low <= abs(row[text]) < high or row[text] == high]
            if inside:
                found.append(
                    {"change of": text.removesuffix(" %"), "from %": low, "to %": high}
                    | shares(inside)
                )
    return found


def by_power(rows: Sequence[dict[str, Any]], stated: dict[Any, float]) -> dict[str, dict[str, str]]:
    """Returns the share of faults that are refused, by their size in multiples of the stated power.

    For each number of prompts that a power is stated for; with the size, in the same multiples, at
    which half of the faults of `PLACES` are refused.
    """
    found: dict[str, dict[str, str]] = {}
    for prompts, size in stated.items():
        part = found[f"by {prompts} prompts"] = {}
        for low, high in pairwise(MULTIPLES):
            inside = [row for row in rows if low <= row["own text %"] / size < high]
            hits = sum(_refused_by(row, int(prompts)) for row in inside)
            if inside:
                least, most = wilson(hits, len(inside))
                part[f"{low:g} to {high:g}"] = (
                    f"{hits} of {len(inside)} ({100 * least:.0f} to {100 * most:.0f} %)"
                )
        where = ("admission", FIRST) if int(prompts) == FIRST else ("all prompts",)
        for place, kinds in PLACES.items():
            half = half_refused([row for row in rows if row["kind"] in kinds], *where)
            if half is not None:
                part[f"half refused, {place}"] = f"{half / size:.2f}"
    return found


def _refused_by(row: dict[str, Any], prompts: int) -> bool:
    """Returns whether the fault was refused by its first `prompts` answers."""
    at_admission = row["admission"] in REFUSED and row["prompts"] <= prompts
    return at_admission or (prompts > FIRST and row["all prompts"] in REFUSED)


def shares(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    count = len(rows)
    found: dict[str, Any] = {"faults": count}
    for where in ("admission", "all prompts"):
        refused = sum(row[where] in REFUSED for row in rows)
        low, high = wilson(refused, count)
        found[f"refused, {where} %"] = 100 * refused / count
        found[f"95 %, {where}"] = f"{100 * low:.0f} to {100 * high:.0f}"
    found["undecided"] = sum(row["all prompts"] == "inconclusive" for row in rows)
    return found


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Returns Wilson's interval of 95 % for a share (J. Am. Stat. Assoc. 22, 1927)."""
    z = 1.959964
    middle = (hits + z * z / 2) / (count + z * z)
    spread = z / (count + z * z) * math.sqrt(hits * (count - hits) / count + z * z / 4)
    return max(0.0, middle - spread), min(1.0, middle + spread)


def half_refused(rows: Sequence[dict[str, Any]], where: str, most: int = 64) -> float | None:
    """Returns the change of perplexity on own text, in %, at which half of the faults are refused.

    Refusals by `most` prompts count. It is that of a logistic curve over the logarithm of the
    change, fitted by Newton's method.
    """
    known = [row for row in rows if 0 < row["own text %"] < math.inf]
    x = np.log([row["own text %"] for row in known])
    y = np.array([row[where] in REFUSED and row["prompts"] <= most for row in known], float)
    if not 0 < y.sum() < len(y):
        return None
    design = np.stack([np.ones_like(x), x], 1)
    weights = np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-design @ weights))
        hessian = design.T @ (design * (p * (1 - p))[:, None]) + 1e-6 * np.eye(2)
        weights += np.linalg.solve(hessian, design.T @ (y - p))
    return float(np.exp(-weights[0] / weights[1]))


def summarized(
    conforming: Sequence[dict[str, Any]], faulty: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    refused = sum(row["admission"] in REFUSED for row in conforming)
    outcomes = Counter(row["all prompts"] for row in conforming)
    known = [row for row in faulty if row["kind"].endswith("doubled")]
    return {
        "conforming": {
            "draws": len(conforming),
            "refused at admission": refused,
            "refused, 95 %": wilson(refused, len(conforming)) if conforming else None,
            "admitted": sum(row["admission"] == "as_expected" for row in conforming),
            "in the end": dict(outcomes),
        },
        "causes": _causes(faulty),
        "causes of simulated faults": _causes(known),
        "half refused at %": {
            f"admission, by {FIRST} prompts": half_refused(faulty, "admission", FIRST),
            "admission": half_refused(faulty, "admission"),
            "all prompts": half_refused(faulty, "all prompts"),
        },
    }


def _causes(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return dict(Counter(row["named"] for row in rows if row["named"] is not None))


def _percent(nats: float) -> float:
    return 100 * math.expm1(min(nats, 50.0))


if __name__ == "__main__":
    main()
