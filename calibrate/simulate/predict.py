"""Predicts divergence and log-probabilities on the golden prompts, for each way of serving.

Each scenario (`Scenario`) is simulated layer by layer (`calibrate.simulate.run`). The comparison
uses what an API returns: the 20 likeliest tokens. `expected.json` has the divergence after the
prompt of each serving path, with a range (`octet.proof.expected_range`). `hypotheses.octet` has the
log-probabilities of the reference's likeliest tokens, at every position, for every scenario.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from calibrate.decoder.weights import LayerWeights
from calibrate.journal.distributed import Group
from calibrate.journal.steps import NOT_KEPT, Kept, Steps
from calibrate.simulate.run import Answers, Weights, simulated
from calibrate.simulate.scales import Scales, digest_of_scales
from calibrate.simulate.scenarios import scenarios_of, serving_paths
from calibrate.simulate.schedule import shares
from octet.artifacts.golden import FIRST, POSITIONS, GoldenSet
from octet.artifacts.scenarios import Scenario, ScenarioSet
from octet.artifacts.serving_path import ExpectedSet, ServingPath
from octet.model.checkpoint import Checkpoint
from octet.progress import Spread, progress_bar
from octet.proof.declared import declared_paths
from octet.proof.expected_range import expectations
from octet.proof.judge import unprovable
from octet.proof.power import LOOKS, power
from octet.proof.top_k import TopK, top_k_divergence
from octet.recipe import Recipe

__all__ = [
    "Prediction",
    "Weights",
    "expected_divergence",
    "predict",
    "scenarios",
    "serving_paths",
]

_LOGITS_BYTES = {"cpu": 128 << 20, "cuda": 2 << 30}  # of float64 logits at a time, by device


@dataclass(frozen=True)
class Prediction:
    """Expected divergence of each serving path, and log-probabilities of each scenario."""

    expected: ExpectedSet
    scenarios: ScenarioSet


def predict(
    checkpoint: Checkpoint,
    recipe: Recipe,
    scales: Scales,
    golden: GoldenSet,
    paths: Sequence[ServingPath] | None = None,
    *,
    weights: Weights | None = None,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda tokens: None,
) -> ExpectedSet:
    """Predicts the divergence of each of `paths`, by default `serving_paths`.

    `scales` are those of a calibration. `weights` replaces the simulated weights with those of an
    export. `advance` receives token counts as work progresses; they add up to the tokens of the
    golden prompts. Raises KeyError, naming the scale, if one is missing.
    """
    chosen = [Scenario(path=path) for path in (serving_paths(recipe) if paths is None else paths)]
    runs = simulated(
        checkpoint,
        recipe,
        scales,
        golden,
        chosen,
        weights=weights,
        device=device,
        advance=advance,
    )
    return _Found(recipe, golden, runs).expected([x.path for x in chosen])


def scenarios(
    checkpoint: Checkpoint,
    recipe: Recipe,
    scales: Scales,
    golden: GoldenSet,
    chosen: Sequence[Scenario] | None = None,
    *,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda tokens: None,
) -> ScenarioSet:
    """Computes log-probabilities on the golden prompts for `chosen`, by default `scenarios_of`.

    Other arguments are as for `predict`. A record is NaN if the scenario gives a log-probability
    that is not finite, or was not simulated on it. A scenario without any record is left out.
    """
    if chosen is None:
        chosen = scenarios_of(checkpoint.spec, recipe, scales)
    runs = simulated(checkpoint, recipe, scales, golden, chosen, device=device, advance=advance)
    return _Found(recipe, golden, runs).scenarios(chosen)


def expected_divergence(
    checkpoint: Checkpoint,
    recipe: Recipe,
    scales: Scales,
    golden: GoldenSet,
    *,
    weights: Weights | None = None,
    weight_only: bool = False,
    device: torch.device | str = "cpu",
    layers: LayerWeights | None = None,
    steps: Steps = NOT_KEPT,
    group: Group | None = None,
    console: Console | None = None,
) -> Prediction | None:
    """Computes `predict` and `scenarios` from the same runs, with a progress bar.

    `weights` are as for `predict`. With `weight_only`, no engine rounds activations of linears.
    Finished runs are kept in `steps`, and not computed again. The ranks of `group` share the
    scenarios, and each returns the result of all: that of one process, to the last bit. Returns
    None for an architecture that Octet does not know, because it cannot locate the attention.
    """
    if checkpoint.spec.generic:
        return None
    group = group or Group()
    tokens = sum(len(record.prompt_token_ids) for record in golden.records)
    paths, chosen = serving_paths(recipe), scenarios_of(checkpoint.spec, recipe, scales)
    if weight_only:
        paths = tuple(dict.fromkeys(map(_weight_only, paths)))
        served = (x.model_copy(update={"path": _weight_only(x.path)}) for x in chosen)
        chosen = tuple(dict.fromkeys(served))
    names = {scenario: f"prediction-{number}" for number, scenario in enumerate(chosen)}
    found = _Found(recipe, golden)
    inputs = (recipe.model_dump_json(), golden.model_dump_json(), digest_of_scales(scales))

    def kept() -> list[Kept]:
        loaded = [steps.load(name, *inputs) for name in names.values()]
        return [step for step in loaded if step is not None]

    for step in group.on_first(kept):
        found.restore(*step)
    left = [scenario for scenario in chosen if scenario not in found.logprobs]
    mine = shares(left, golden, checkpoint.spec.layers, group.world)[group.rank]

    def work() -> list[Kept]:
        made = []
        with progress_bar(console, "Expected divergence", tokens) as advance:
            progress = Spread(advance, tokens, tokens * (len(chosen) - len(left) + len(mine)))
            progress.step(tokens * (len(chosen) - len(left)))
            for together in simulated(
                checkpoint,
                recipe,
                scales,
                golden,
                mine,
                weights=weights,
                device=device,
                layers=layers,
                advance=lambda more: progress.step(more * len(mine)),
            ):
                text, arrays = found.add(together)
                made.append((text, arrays))
                steps.keep(names[together[0].scenario], *inputs, text=text, arrays=arrays)
        return made

    for rank, made in enumerate(group.gather(group.attempt(work))):
        for step in made if rank != group.rank else ():
            found.restore(*step)
    simulated_set = found.scenarios(chosen)
    return Prediction(
        _with_power(found.expected(paths), simulated_set, recipe, golden), simulated_set
    )


def _with_power(
    expected: ExpectedSet, simulated_set: ScenarioSet, recipe: Recipe, golden: GoldenSet
) -> ExpectedSet:
    """Adds how small a fault is refused, or else why no server can be proven."""
    declared = declared_paths(simulated_set, recipe, recipe.kv_cache)
    if why := unprovable(golden, simulated_set, declared, looks=LOOKS):
        return expected.model_copy(update={"unprovable": why})
    path = expected.expectations[0].path
    limits = (power(golden, simulated_set, path, x) for x in (FIRST, len(golden.records)))
    return expected.model_copy(update={"power": tuple(x for x in limits if x is not None)})


def _weight_only(path: ServingPath) -> ServingPath:
    return path.model_copy(update={"activations": False, "power_scales": False})


class _Found:
    """Collects log-probabilities at each position, and divergences after the prompt, of runs."""

    def __init__(
        self, recipe: Recipe, golden: GoldenSet, runs: Iterable[Sequence[Answers]] = ()
    ) -> None:
        self._recipe, self._golden = recipe, golden
        most = max((len(t.token_ids) for r in golden.records for t in r.tops), default=0)
        self._tokens = np.full((len(golden.records), POSITIONS, most), -1)
        for number, record in enumerate(golden.records):
            for position, top in enumerate(record.tops):
                self._tokens[number, position, : len(top.token_ids)] = top.token_ids
        self.logprobs: dict[Scenario, list[NDArray[np.float32]]] = {}
        self._divergences: dict[ServingPath, list[NDArray[np.float64]]] = {}
        for together in runs:
            self.add(together)

    def add(self, runs: Sequence[Answers]) -> tuple[str, dict[str, NDArray[Any]]]:
        """Adds all runs of some scenarios; returns what `restore` takes."""
        names = [run.scenario.model_dump(mode="json") for run in runs]
        arrays: dict[str, NDArray[Any]] = {}
        for number, run in enumerate(runs):
            arrays[f"{number}.logprobs"], arrays[f"{number}.divergences"] = self._measure(run)
        text = json.dumps(names)
        self.restore(text, arrays)
        return text, arrays

    def restore(self, text: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Adds the runs that `add` returned."""
        for number, name in enumerate(json.loads(text)):
            scenario = Scenario.model_validate(name)
            self.logprobs.setdefault(scenario, []).append(arrays[f"{number}.logprobs"])
            if scenario.fault is None:
                divergences = self._divergences.setdefault(scenario.path, [])
                divergences.append(arrays[f"{number}.divergences"])

    def expected(self, paths: Sequence[ServingPath]) -> ExpectedSet:
        found = {path: np.array(self._divergences[path]) for path in paths}
        return ExpectedSet(recipe=self._recipe.name, expectations=tuple(expectations(found)))

    def scenarios(self, chosen: Sequence[Scenario]) -> ScenarioSet:
        found = {scenario: np.stack(self.logprobs[scenario]) for scenario in chosen}
        told = {h: values for h, values in found.items() if not np.isnan(values).all()}
        return ScenarioSet(self._golden.weights_sha256, self._recipe.name, told)

    def _measure(self, run: Answers) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Returns a run's log-probabilities, and its divergences (NaN for a fault)."""
        logprobs = np.full(self._tokens.shape, np.nan, np.float32)
        divergences = np.full(len(self._golden.records), np.nan)
        most = _LOGITS_BYTES[run.model.device.type]
        step = max(1, most // (8 * run.model.spec.vocab_size))
        for start in range(0, len(run.records), step):
            part = slice(start, start + step)
            records, positions = run.records[part], run.positions[part]
            (logits,) = run.model.logits([run.hidden[None, part]])
            told = logits[0].double().log_softmax(-1)
            wanted = torch.from_numpy(self._tokens[records, positions])
            picked = told.gather(-1, wanted.clamp(min=0).to(told.device)).cpu().numpy()
            logprobs[records, positions] = np.where(wanted.numpy() < 0, np.nan, picked)
            if run.scenario.fault is None:
                first = np.flatnonzero(positions == 0)
                divergences[records[first]] = self._divergence(records[first], told[first])
        asked = np.zeros(self._tokens.shape, np.bool_)
        asked[run.records, run.positions] = True
        broken = (asked & (self._tokens >= 0) & ~np.isfinite(logprobs)).any(axis=(1, 2))
        logprobs[broken] = np.nan
        return logprobs, divergences

    def _divergence(self, numbers: NDArray[np.int64], logprobs: Tensor) -> NDArray[np.float64]:
        """Computes the divergences visible through an API, of `logprobs` [n, V] from the records.

        The API returns as many log-probabilities as a record holds.
        """
        references = [self._golden.records[number].top for number in numbers]
        sizes = np.array([len(reference) for reference in references])
        found = np.empty(len(numbers))
        for size in np.unique(sizes):  # one, but in a vocabulary of few tokens
            rows = np.flatnonzero(sizes == size)
            top = logprobs[torch.from_numpy(rows).to(logprobs.device)].topk(int(size))
            served = TopK(top.indices.cpu().numpy(), top.values.cpu().numpy())
            found[rows] = top_k_divergence(TopK.of([references[row] for row in rows]), served)
        return found
