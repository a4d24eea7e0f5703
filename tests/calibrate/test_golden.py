"""Golden records are what the model says, and their prompts can be replayed as text."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoder.experts import tap_experts
from calibrate.decoder.loading import load_model
from calibrate.golden import _Group, golden_set
from calibrate.samples.golden_prompts import CONTINUATION, choose_prompts
from calibrate.samples.tokens import load_tokenizer
from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import FIRST, POSITIONS, GoldenRecord, GoldenSet, spread
from octet.model.checkpoint import Checkpoint
from octet.proof.declared import declared_paths
from octet.proof.judge import judge
from octet.proof.responses import Response
from octet.recipe import PRESETS
from tests.models import write_model


def test_records_can_be_computed_again_without_a_cache(
    calibration: Calibration, model: Any
) -> None:
    """One forward pass over prompt and continuation, the whole sequence at once."""
    golden = calibration.golden
    assert golden.compute_dtype == "float32"
    assert len(golden.records) == 64
    for item in golden.records[::9]:
        prompt, answer = item.prompt_token_ids, item.continuation_token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
        logprobs = logits[len(prompt) - 1].double().log_softmax(-1)
        top = logprobs.topk(20)
        np.testing.assert_allclose(item.tops[0].logprobs, top.values.numpy(), atol=1e-4)
        assert item.tops[0].token_ids[0] == answer[0] == int(top.indices[0])
        assert tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == answer
        assert len(answer) == CONTINUATION
        if item.prompt_nll is None:  # a list of token ids
            continue
        following = torch.tensor(prompt[1:])
        nll = torch.nn.functional.cross_entropy(
            logits[: len(following)].double(), following, reduction="sum"
        )
        assert item.prompt_nll == pytest.approx(float(nll), rel=1e-5)


def test_prompts_are_text_that_encodes_to_their_tokens(
    calibration: Calibration, tokenizer: Any
) -> None:
    for item in calibration.golden.records:
        text = json.loads(json.dumps(item.prompt))
        assert tuple(tokenizer(text)["input_ids"]) == item.prompt_token_ids


PROMPTS = [("", [7 + n, *range(100, 100 + length)]) for n, length in enumerate(range(0, 60, 5))]


@pytest.fixture(scope="module")
def golden(checkpoint: Checkpoint) -> GoldenSet:
    return golden_set(checkpoint, PROMPTS)


def alone(model: Any, ids: list[int]) -> tuple[list[float], list[int]]:
    """Top log-probabilities after `ids`, and 16 greedy tokens, by the whole model in memory."""
    output = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    logprobs = output.logits[0, -1].double().numpy()
    logprobs = logprobs - logprobs.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    tokens = [int(logprobs.argmax())]
    while len(tokens) < CONTINUATION:
        last = torch.tensor([tokens[-1:]])
        output = model(last, past_key_values=output.past_key_values, use_cache=True)
        tokens.append(int(output.logits[0, -1].argmax()))
    return sorted(logprobs.tolist(), reverse=True)[:20], tokens


def test_layer_by_layer_is_the_whole_model_to_the_bit(golden: GoldenSet, model: Any) -> None:
    for item in golden.records:
        with torch.inference_mode():
            logprobs, tokens = alone(model, list(item.prompt_token_ids))
        assert list(item.tops[0].logprobs) == logprobs
        assert list(item.continuation_token_ids) == tokens


def test_neither_rounds_nor_slices_of_the_head_change_a_record(
    checkpoint: Checkpoint, golden: GoldenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.golden._CACHE_BYTES", 1)
    monkeypatch.setattr("calibrate.decoder.weights._CPU_BYTES", 0)
    assert golden_set(checkpoint, PROMPTS).records == golden.records
    monkeypatch.setattr("calibrate.decoder.layers._HEAD_BYTES", {"cpu": 1 << 20})
    sliced = golden_set(checkpoint, PROMPTS)
    for item, other in zip(golden.records, sliced.records, strict=True):
        assert item.continuation_token_ids == other.continuation_token_ids
        np.testing.assert_allclose(item.tops[0].logprobs, other.tops[0].logprobs, atol=1e-5)


@pytest.mark.parametrize("tokens", [40, 150, 10**6])
def test_prompts_that_run_together_do_not_see_each_other(
    checkpoint: Checkpoint, golden: GoldenSet, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; of this order, most prompts are padded."""
    monkeypatch.setattr("calibrate.golden._PREFILLED", {"cpu": tokens})
    order = [*range(0, len(PROMPTS), 2), *range(1, len(PROMPTS), 2)]
    together = golden_set(checkpoint, [PROMPTS[number] for number in order])
    for number, item in zip(order, together.records, strict=True):
        expected = golden.records[number]
        assert item.continuation_token_ids == expected.continuation_token_ids
        assert item.prompt_nll == pytest.approx(expected.prompt_nll, rel=1e-6)
        for top, other in zip(item.tops, expected.tops, strict=True):
            np.testing.assert_allclose(top.logprobs, other.logprobs, atol=1e-5)


def test_groups_are_smaller_where_their_keys_and_values_do_not_fit(
    checkpoint: Checkpoint, golden: GoldenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    allocate = _Group.allocate

    def noting(group: _Group, model: Any) -> None:
        together.append(len(group.prompts))
        allocate(group, model)

    monkeypatch.setattr(_Group, "allocate", noting)
    monkeypatch.setattr("calibrate.golden._TOGETHER", {"cpu": 64})
    answers = [x.continuation_token_ids for x in golden.records]
    for room, expected in ((1 << 30, [12]), (1, [8, 4])):
        together.clear()
        monkeypatch.setattr("calibrate.golden._CACHE_BYTES", room)
        found = golden_set(checkpoint, PROMPTS)
        assert [x.continuation_token_ids for x in found.records] == answers
        assert together == expected


def test_progress_adds_up_to_the_prompts(checkpoint: Checkpoint) -> None:
    told: list[int] = []
    golden_set(checkpoint, PROMPTS[:3], advance=told.append)
    assert sum(told) == sum(len(ids) for _, ids in PROMPTS[:3])


def test_an_end_token_ends_the_continuation(checkpoint: Checkpoint, golden: GoldenSet) -> None:
    free = golden.records[0].continuation_token_ids
    spec = checkpoint.spec.model_copy(update={"eos_token_ids": (free[1],)})
    ended = golden_set(replace(checkpoint, spec=spec), PROMPTS[:2]).records[0]
    assert ended.continuation_token_ids == free[: free.index(free[1]) + 1]


def test_records_hold_the_experts_that_their_prompts_reach(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path / "model", "mixtral"))
    spec, prompts = checkpoint.spec, PROMPTS[:4]
    found = golden_set(checkpoint, prompts)
    model = load_model(checkpoint, "float32")
    for (_, ids), record in zip(prompts, found.records, strict=True):
        reached = np.zeros((spec.layers, spec.experts), np.bool_)

        def tap(name: str, rows: torch.Tensor, _: torch.Tensor, reached: Any = reached) -> Any:
            parts = name.split(".")
            reached[int(parts[2]), int(parts[parts.index("experts") + 1])] = True
            return rows

        with ExitStack() as stack, torch.inference_mode():
            for index, layer in enumerate(model.model.layers):
                stack.enter_context(tap_experts(layer, spec.layer(index), spec, tap))
            model.model(torch.tensor([ids]), use_cache=False)
        assert record.experts == np.packbits(reached).tobytes().hex()
    assert len({record.experts for record in found.records}) > 1


def test_embeddings_in_another_order_are_seen_where_lists_hold_their_tokens(
    example_model: Path, example_samples: Path
) -> None:
    """A server with the embeddings of all ids permuted that no piece of a sample holds.

    Perplexity rises by more than half, and an admission without the lists finds nothing.
    """
    checkpoint = Checkpoint.open(example_model)
    tokenizer = load_tokenizer(checkpoint)
    lines = (example_samples / "heldout.jsonl").read_text().splitlines()
    sequences = [tokenizer(json.loads(line)["text"])["input_ids"] for line in lines]
    chosen = choose_prompts(sequences, tokenizer, 1024, 4096)
    prompts = {n: chosen.prompts[n] for n in spread(64, FIRST)}
    lists = [place for place, n in enumerate(prompts) if n in chosen.lists]
    golden = golden_set(checkpoint, list(prompts.values()))
    had = {
        token
        for place, record in enumerate(golden.records)
        if place not in lists
        for token in (*record.prompt_token_ids, *record.continuation_token_ids)
    }
    others = np.array(sorted(set(range(3, 4096)) - had))
    model = load_model(checkpoint, "float32")
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[others] = weight[np.random.default_rng(0).permutation(others)].clone()
    answers = [_served(model, place, record) for place, record in enumerate(golden.records)]
    declared = declared_paths(None, PRESETS["fp8"], "e5m2")
    pieces = [answer for answer in answers if answer.record not in lists]
    assert judge(golden, None, declared, pieces, bound=0.1).outcome != "worse"
    assert judge(golden, None, declared, answers, bound=0.1).outcome == "worse"


def _served(model: Any, number: int, record: GoldenRecord) -> Response:
    """Answers as a server does: greedily, with the 20 likeliest tokens at each position."""
    ids, tops = list(record.prompt_token_ids), []
    for _ in range(POSITIONS):
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].log_softmax(-1)
        values, tokens = logprobs.topk(20)
        tops.append(dict(zip(tokens.tolist(), values.tolist(), strict=True)))
        ids.append(int(tokens[0]))
    return Response(number, tuple(ids[len(record.prompt_token_ids) :]), tuple(tops))
