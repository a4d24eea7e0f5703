"""Models whose truth is known: reference logits, errors of paths and faults, and chaotic noise.

A scenario answers with the reference's logits, plus an error of its own that is always the same,
plus noise that differs between repeats. Some prompts are more sensitive than others: both are
larger there. A server is one more repeat.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.golden import GoldenRecord, GoldenSet, Top
from octet.artifacts.scenarios import Fault, Scenario, ScenarioSet
from octet.artifacts.serving_path import ServingPath
from octet.proof.responses import Response

TOKENS, TOLD = 60, 20  # of the vocabulary; of them in an answer

HONEST = Scenario(path=ServingPath(kv_cache="e5m2"))
FLOAT32 = Scenario(path=ServingPath(kv_cache="e5m2", compute="float32"))
E4M3 = Scenario(path=ServingPath(kv_cache="e4m3"))
BARE = Scenario(path=ServingPath(kv_cache="e5m2", weights=False, activations=False))
NO_K_SCALE = Scenario(path=HONEST.path, fault=Fault(kind="k_scale_dropped"))
HALVED = Scenario(path=HONEST.path, fault=Fault(kind="weight_scales_scaled", layer=3, factor=0.5))
NO_V_SCALE = Scenario(path=HONEST.path, fault=Fault(kind="v_scale_dropped"))

# Of logits, in nats: its own error and the noise of a repeat. What is less quantized is a part of
# the honest path's error; that of a dropped v_scale of 0.98 is lost in the noise.
SIZES: Mapping[Scenario, tuple[float, float]] = {
    HONEST: (0.15, 0.1),
    FLOAT32: (0.15, 0.07),
    E4M3: (0.1, 0.08),
    BARE: (0.1, 0.05),
    NO_K_SCALE: (0.6, 0.1),
    HALVED: (0.8, 0.12),
    NO_V_SCALE: (0.15, 0.1),
}


@dataclass(frozen=True)
class World:
    """`logits` float64 [records, positions, tokens] of the reference; errors of each scenario."""

    golden: GoldenSet
    logits: NDArray[np.float64]
    errors: Mapping[Scenario, NDArray[np.float64]]
    sensitivity: NDArray[np.float64]  # [records]
    rounding: float = 1.0  # factor of all noise

    def scenarios(
        self,
        seed: int,
        *,
        known: Iterable[Scenario] = tuple(SIZES),
        repeats: int = 2,
        fault_records: int | None = None,
    ) -> ScenarioSet:
        """`repeats` of paths and one of faults, on the first so many records."""
        rng = np.random.default_rng([seed, 1])
        index = np.array([[t.token_ids for t in r.tops] for r in self.golden.records])
        found = {}
        for h in known:
            runs = [self._answer(h, rng) for _ in range(repeats if h.fault is None else 1)]
            told = np.array([np.take_along_axis(x, index, -1) for x in runs], np.float32)
            if h.fault is not None and fault_records is not None:
                told[:, fault_records:] = np.nan
            found[h] = told
        return ScenarioSet(self.golden.weights_sha256, "fp8", found)

    def server(
        self,
        truth: Scenario,
        seed: int,
        *,
        noisier: float = 1.0,
        told: int = TOLD,
        records: Sequence[int] | None = None,
    ) -> list[Response]:
        """What a server of `truth` answers, its noise by a factor larger."""
        rng = np.random.default_rng([seed, 2])
        return self.responses(self._answer(truth, rng, noisier), told, records)

    def responses(
        self,
        logprobs: NDArray[np.float64],
        told: int = TOLD,
        records: Sequence[int] | None = None,
    ) -> list[Response]:
        """Greedy; what follows the first token that is not the golden one is of another text."""
        order = np.argsort(-logprobs, axis=-1, kind="stable")[..., :told]
        found = []
        for n in range(len(logprobs)) if records is None else records:
            golden = self.golden.records[n].continuation_token_ids
            tokens = [int(t) for t in order[n, :, 0]]
            tops = [
                {int(t): float(logprobs[n, j, t]) for t in order[n, j]} for j in range(len(tokens))
            ]
            for j, token in enumerate(tokens[:-1]):
                if token != golden[j]:
                    tokens[j + 1 :] = [token] * (len(tokens) - j - 1)
                    tops[j + 1 :] = [tops[j]] * (len(tokens) - j - 1)
                    break
            found.append(Response(n, tuple(tokens), tuple(tops)))
        return found

    def _answer(
        self, truth: Scenario, rng: np.random.Generator, noisier: float = 1.0
    ) -> NDArray[np.float64]:
        """Log-probabilities [records, positions, tokens] of one more repeat."""
        # Chaos moves a few directions together, and some prompts' far more than others'.
        directions = rng.normal(size=(*self.logits.shape[:2], 4))
        mixing = np.random.default_rng(0).normal(size=(4, self.logits.shape[-1])) / 2
        noise = directions @ mixing * self.sensitivity[:, None, None]
        scale = (
            SIZES[truth][1]
            * noisier
            * self.rounding
            * rng.lognormal(0, 0.2, (len(self.logits), 1, 1))
        )
        return log_softmax(self.logits + self.errors[truth] + scale * noise)


def make_world(
    seed: int,
    records: int = 48,
    positions: int = 4,
    *,
    tokens: int | None = None,
    spread: float = 2.5,
    rounding: float = 1.0,
) -> World:
    """`spread` is the logits' standard deviation; all errors and noise are `rounding` times."""
    rng = np.random.default_rng([seed, 0])
    logits = spread * rng.normal(size=(records, positions, tokens or TOKENS))
    sensitivity = rng.lognormal(0, 0.5, records)
    own = rng.normal(size=(len(SIZES), *logits.shape)) * sensitivity[:, None, None]
    errors = {h: rounding * size * own[n] for n, (h, (size, _)) in enumerate(SIZES.items())}
    errors[FLOAT32] = errors[HONEST]
    errors[BARE] = errors[HONEST] * 0.3
    errors[NO_V_SCALE] = errors[HONEST] * 1.02
    logprobs = log_softmax(logits)
    return World(golden_set(logprobs), logits, errors, sensitivity, rounding)


def make_flat_world(seed: int, rounding: float) -> World:
    """As with random weights: 20 of 4,000 tokens hold 8 % of the next-token distribution."""
    return make_world(seed, 32, tokens=4000, spread=1.3, rounding=rounding)


def golden_set(logprobs: NDArray[np.float64]) -> GoldenSet:
    """What a reference of these log-probabilities [records, positions, tokens] leaves."""
    order = np.argsort(-logprobs, axis=-1, kind="stable")[..., :TOLD]
    records = [
        GoldenRecord(
            prompt=str(n),
            prompt_token_ids=(n,),
            continuation_token_ids=tuple(int(t) for t in ids[:, 0]),
            tops=tuple(
                Top(token_ids=tuple(map(int, t)), logprobs=tuple(map(float, x[t])))
                for t, x in zip(ids, values, strict=True)
            ),
        )
        for n, (ids, values) in enumerate(zip(order, logprobs, strict=True))
    ]
    return GoldenSet(
        weights_sha256="w", compute_dtype="float32", software={}, records=tuple(records)
    )


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
