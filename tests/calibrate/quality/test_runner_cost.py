"""Tests the measured cost of a runner against its definition, for prefill and for decoding."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.golden import golden_set
from calibrate.quality.gate import Gate
from calibrate.quality.runner_cost import judge_answers, measure_answers
from octet.errors import ConfigError, NumericsError
from octet.model.checkpoint import Checkpoint
from octet.statistics import upper_bound

LENGTHS = (1, 2, 5, 9, 14, 20, 31, 40, 44, 57)
TAIL = 8


class Answering:
    """The model itself, whose logits are `read` times what they are, or `decoded` times."""

    together = 3

    def __init__(self, model: Any, *, read: float = 1.0, decoded: float = 1.0) -> None:
        self.model, self.factors = model, (read, decoded)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], factor: float = 1.0) -> np.ndarray:
        found = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return factor * found.numpy()

    def every(self, tokens: Sequence[int]) -> Iterator[np.ndarray]:
        logits = self.logits(tokens, self.factors[0])
        buffer = np.empty_like(logits[:13])
        for start in range(0, len(logits), 13):
            part = logits[start : start + 13]
            buffer[: len(part)] = part
            yield buffer[: len(part)]

    def decoded(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        assert len(prompts) <= self.together
        tails = [min(TAIL, len(ids) - 1) for ids in prompts]
        return [
            self.logits(ids, self.factors[1])[len(ids) - tail :]
            for ids, tail in zip(prompts, tails, strict=True)
        ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 4096, (n,), generator=generator).tolist() for n in LENGTHS]


def kl(logits: np.ndarray, factor: float) -> np.ndarray:
    p = torch.from_numpy(logits).double().log_softmax(-1)
    q = torch.from_numpy(logits * np.float32(factor)).double().log_softmax(-1)
    found: np.ndarray = (p.exp() * (p - q)).sum(-1).numpy()
    return found


def test_the_model_itself_costs_nothing(
    checkpoint: Checkpoint, model: Any, prompts: list[list[int]]
) -> None:
    done: list[int] = []
    for cost in measure_answers(checkpoint, prompts, Answering(model), advance=done.append):
        assert abs(cost.kl) < 1e-6 and abs(cost.change) < 1e-5
        assert (cost.tokens, cost.samples) == (sum(LENGTHS), len(LENGTHS))
    assert sum(done) == sum(LENGTHS)


def test_every_token_counts_and_the_bound_is_over_prompts(
    checkpoint: Checkpoint, model: Any, prompts: list[list[int]]
) -> None:
    answering = Answering(model, read=0.7, decoded=0.4)
    reading, decoding = measure_answers(checkpoint, prompts, answering)
    whole = [answering.logits(ids) for ids in prompts]
    read = np.array([kl(logits, 0.7).sum() for logits in whole])
    assert reading.kl == pytest.approx(read.sum() / sum(LENGTHS), rel=1e-3)
    assert reading.kl_bound == pytest.approx(upper_bound(read, LENGTHS), rel=1e-3)

    tails = [min(TAIL, n - 1) for n in LENGTHS]
    more = np.array(
        [
            (kl(logits[n - tail :], 0.4) - kl(logits[n - tail :], 0.7)).sum()
            for logits, n, tail in zip(whole, LENGTHS, tails, strict=True)
        ]
    )
    assert decoding.kl == pytest.approx(reading.kl + more.sum() / sum(tails), rel=1e-3)
    whole_sums = read + more * sum(LENGTHS) / sum(tails)
    assert decoding.kl_bound == pytest.approx(upper_bound(whole_sums, LENGTHS), rel=1e-3)
    assert decoding.log_ratio != reading.log_ratio


@pytest.mark.parametrize(("decoded", "way"), [(0.4, "decoding"), (0.9, "reading")])
def test_the_worse_way_is_judged(
    decoded: float, way: str, checkpoint: Checkpoint, model: Any, prompts: list[list[int]]
) -> None:
    gate = Gate.parse("1e-6", None)
    assert gate is not None
    golden = golden_set(checkpoint, [("", ids) for ids in prompts])
    answering = Answering(model, read=0.7, decoded=decoded)
    outcome = judge_answers(gate, checkpoint, golden, answering, "the graph", longest=64)
    (judged,) = outcome.judged
    assert judged.how == f"the graph, {way}" and not judged.met
    assert (judged.samples, judged.tokens) == (len(LENGTHS), sum(LENGTHS))
    with pytest.raises(ConfigError, match="5 of 5 golden prompts that fit into its context cannot"):
        judge_answers(gate, checkpoint, golden, answering, "the graph", longest=19)


def test_nan_is_an_error(checkpoint: Checkpoint, model: Any, prompts: list[list[int]]) -> None:
    with pytest.raises(NumericsError):
        measure_answers(checkpoint, prompts, Answering(model, decoded=float("nan")))
