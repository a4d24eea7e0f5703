"""TensorRT-LLM's models in Triton: what they are asked, and how their ends are told apart."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octet.errors import BackendUnavailable, RequestError, UnsupportedField
from serve.backends.triton_grpc import TritonBackend
from serve.backends.triton_prompt import end_tokens
from serve.backends.triton_trtllm import TextAnswer
from serve.engine.request import Delta, Finished, Usage
from tests.fake_servers import FakeTensorRtLlm, running
from tests.fakes import END, byte_tokenizer, opened
from tests.serve.openai_clients import asked, events_of, triton_to


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The byte tokenizer's files, with the id of its end token."""
    byte_tokenizer().inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [END, 10]}))
    return tmp_path


@asynccontextmanager
async def asking(
    server: FakeTensorRtLlm, tokenizer: Path | None = None
) -> AsyncIterator[TritonBackend]:
    """A backend for a started `server`."""
    async with running(server), opened(triton_to(server.url, tokenizer=tokenizer)) as backend:
        yield backend


@pytest.mark.parametrize("model", ["ensemble", "bls", "engine"])
async def test_greedy_is_top_k_1_and_sampling_turns_it_off(model: Any, tokenizer: Path) -> None:
    server = FakeTensorRtLlm(model=model)
    async with asking(server, tokenizer) as backend:
        await events_of(backend, asked())
        await events_of(backend, asked(temperature=0.5, top_p=0.25, seed=7, ignore_eos=False))
        await events_of(backend, asked(max_tokens=None))
    greedy, sampled, unlimited = server.requests
    assert greedy["top_k"] == 1 and greedy["max_tokens"] == 9 and greedy["ignore_eos"]
    assert "temperature" not in greedy["inputs"]  # TensorRT-LLM divides by it
    found = [sampled[name] for name in ("top_k", "temperature", "top_p", "seed", "ignore_eos")]
    assert found == [0, 0.5, 0.25, 7, False]
    assert unlimited["max_tokens"] > 100_000  # it is clipped to the context


@pytest.mark.parametrize("model", ["ensemble", "bls", "engine"])
async def test_what_stopped_it_is_told(model: Any, tokenizer: Path) -> None:
    async with asking(FakeTensorRtLlm(model=model), tokenizer) as backend:
        *deltas, _ = await events_of(backend, asked(max_tokens=30))
        stop = "".join(delta.text for delta in deltas)[10:12]
        *_, end = await events_of(backend, asked(max_tokens=30, stop=(stop,)))
        assert (end.reason, end.stop_reason) == ("stop", stop)
        assert end.usage.completion_tokens < 30


async def test_old_models_have_old_names_and_need_our_tokenizer_to_count(tokenizer: Path) -> None:
    server = FakeTensorRtLlm(counts=False)
    async with asking(server, tokenizer) as backend:
        *_, end = await events_of(backend, asked(ignore_eos=True, seed=3))
        assert end == Finished("length", Usage(3, 9), None)
        assert "random_seed" in server.requests[0]["inputs"]
    async with asking(FakeTensorRtLlm(counts=False)) as backend:
        with pytest.raises(BackendUnavailable, match="does not count tokens"):
            await events_of(backend, asked())


async def test_the_engines_own_model_takes_and_stops_at_ids(tokenizer: Path) -> None:
    server = FakeTensorRtLlm(model="engine")
    async with asking(server, tokenizer) as backend:
        *deltas, _ = await events_of(backend, asked((97, 98, 99), max_tokens=20))
        ids = [token for delta in deltas for token in delta.token_ids]
        assert bytes(ids).decode() == "".join(delta.text for delta in deltas)
        asking_for = {"max_tokens": 20, "stop_token_ids": (ids[5],)}
        *_, end = await events_of(backend, asked((97, 98, 99), **asking_for))
        assert (end.reason, end.stop_reason) == ("stop", ids[5])
        assert end.usage.completion_tokens == ids.index(ids[5]) + 1
        await events_of(backend, asked(ignore_eos=False))
        # Two end tokens: the first as end_id, the second as a stop word.
        assert server.requests[-1]["stop_token_ids"] == [10]


async def test_what_it_cannot_do_is_refused_by_name(tokenizer: Path) -> None:
    async with asking(FakeTensorRtLlm(), tokenizer) as backend:
        for field, value in (("logprobs", 1), ("stop_token_ids", (5,)), ("echo", True)):
            with pytest.raises(UnsupportedField) as refused:
                await events_of(backend, asked(**{field: value}))
            assert refused.value.param == field
        with pytest.raises(RequestError, match="'top_k' is out of range") as large:
            await events_of(backend, asked(temperature=1.0, top_k=2**40))
        assert large.value.param == "top_k"
        with pytest.raises(RequestError) as long:
            await events_of(backend, asked("x" * 600))
        assert long.value.code == "context_length_exceeded"
    async with asking(FakeTensorRtLlm(model="engine")) as backend:
        with pytest.raises(BackendUnavailable, match="give the backend a tokenizer"):
            await events_of(backend, asked((97,)))
    async with asking(FakeTensorRtLlm()) as backend:
        with pytest.raises(RequestError, match="takes text, not token ids"):
            await events_of(backend, asked((97,)))


def test_half_a_character_is_held_back_in_text_that_comes_whole_each_time() -> None:
    answer = TextAnswer(asked(max_tokens=3), None, cumulative=True)
    shown = [
        answer.read({"text_output": [text], "num_output_tokens": [1], "num_input_tokens": [2]})
        for text in ("a", "a\ufffd", "aé")
    ]
    assert [delta and delta.text for delta in shown] == ["a", None, "é"]
    assert answer.finish() == [Finished("length", Usage(2, 3), None)]
    broken = TextAnswer(asked(), None, cumulative=True)
    broken.read({"text_output": ["a\ufffd"], "num_output_tokens": [2]})
    assert broken.finish() == [Delta("\ufffd", ()), Finished("stop", Usage(0, 2), None)]


def test_end_tokens_are_found_where_models_write_them(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    assert end_tokens(tmp_path, tokenizer) == ()
    for content in ({"eos_token": "<|end|>"}, {"eos_token": {"content": "<|end|>"}}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        assert end_tokens(tmp_path, tokenizer) == (END,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert end_tokens(tmp_path, tokenizer) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    assert end_tokens(tmp_path, tokenizer) == (6, 7)
    (tmp_path / "generation_config.json").write_text("{")
    assert end_tokens(tmp_path, tokenizer) == (5,)
