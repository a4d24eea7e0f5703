"""Answers of real servers: vLLM 0.32 on a CPU, the example model with keys times 2^-16.

`data/vllm-0.32-cpu.npz` holds 24 golden records of a draw by the seed 0, what `calibrate` simulated
for them, and what seven servers answered: the right export (FP8 weights per channel, E5M2 cache),
and others under its name. Nothing in `octet.proof` was fitted to them.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octet.artifacts.golden import GoldenRecord, GoldenSet, Top
from octet.artifacts.scenarios import Scenario, ScenarioSet
from octet.proof.declared import declared_paths
from octet.proof.judge import judge
from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from octet.recipe import PRESETS

FILE = Path(__file__).parent / "data" / "vllm-0.32-cpu.npz"


@cache
def recorded() -> dict[str, Any]:
    with np.load(FILE) as file:
        return dict(file)


@cache
def golden() -> GoldenSet:
    data = recorded()
    records = tuple(
        GoldenRecord(
            prompt="",
            prompt_token_ids=(n,),
            continuation_token_ids=tuple(continuation),
            tops=tuple(
                Top(token_ids=tuple(i), logprobs=tuple(x)) for i, x in zip(*at, strict=True)
            ),
        )
        for n, (continuation, *at) in enumerate(
            zip(
                data["continuations"].tolist(),
                data["token_ids"].tolist(),
                data["logprobs"].tolist(),
                strict=True,
            )
        )
    )
    return GoldenSet(weights_sha256="w", compute_dtype="float32", software={}, records=records)


@cache
def simulated() -> dict[Scenario, np.ndarray]:
    data = recorded()
    names = [Scenario.model_validate(x) for x in json.loads(str(data["hypotheses"]))]
    return {h: data[f"simulated_{n}"].astype(np.float32) for n, h in enumerate(names)}


def responses(ids: np.ndarray, logprobs: np.ndarray, tokens: np.ndarray) -> list[Response]:
    return [
        Response(
            n,
            tuple(tokens[n].tolist()),
            tuple(dict(zip(i, x, strict=True)) for i, x in zip(*at, strict=True)),
        )
        for n, at in enumerate(zip(ids.tolist(), logprobs.astype(float).tolist(), strict=True))
    ]


def judged(answers: list[Response], known: dict[Scenario, np.ndarray], engine: Any) -> Verdict:
    scenarios = ScenarioSet("w", "fp8", known)
    declared = declared_paths(scenarios, PRESETS["fp8"], "e5m2", engine=engine)
    return judge(golden(), scenarios, declared, answers, looks=3)


@pytest.mark.parametrize("engine", ["vllm-cpu", None])
@pytest.mark.parametrize(
    ("server", "outcome", "cause"),
    [
        ("under-correct", "as_expected", None),
        ("under-nokscale", "worse", "match weights without their k_scale"),
        (
            "under-halved",
            "worse",
            "match weight scales of layer 3 that are half of what they should be",
        ),
        ("under-bf16-e5m2", "worse", "match an unquantized model with an E5M2 cache"),
        ("under-bf16-auto", "better", "match an unquantized model"),
        ("under-e4m3", "worse", "match an E4M3 cache"),
        ("other", "worse", "match another model: no simulated path or fault explains them"),
    ],
)
def test_real_servers_are_told_apart(
    server: str, outcome: str, cause: str | None, engine: str | None
) -> None:
    data = recorded()
    answers = responses(*(data[f"{server}_{x}"] for x in ("ids", "logprobs", "tokens")))
    found = judged(answers, simulated(), engine)
    assert found.outcome == outcome, found.reason
    assert (found.cause and found.cause.sentence) == cause
    if cause is None:
        assert found.path is not None and found.path.kv_rounding == "truncate"
        assert found.expected is not None
        assert found.expected.low < found.measure.kl_mean < found.expected.high


BARE = [h for h in simulated() if h.fault is None and not h.path.weights]


@pytest.mark.parametrize("truth", BARE, ids=lambda h: h.label)
def test_what_is_not_quantized_is_seen_with_every_cache(truth: Scenario) -> None:
    """One of its repeats plays the server, and tells of the reference's tokens alone."""
    known = simulated()
    mine = known[truth]
    ids = recorded()["token_ids"]
    tokens = np.take_along_axis(ids, mine[1].argmax(-1)[..., None], -1)[..., 0]
    found = judged(responses(ids, mine[1], tokens), known | {truth: mine[:1]}, "vllm-cpu")
    assert found.cause is not None, found.reason
    assert found.cause.sentence.startswith("match an unquantized model"), found.reason
    assert found.cause.name in ("unquantized", "undecided"), found.reason
