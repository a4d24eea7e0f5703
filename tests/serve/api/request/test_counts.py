"""Keys are charged for what a request can have cost, whatever its backend reports."""

import hashlib
import json
import time
from typing import Any

import pytest

from octet.errors import BackendUnavailable
from serve.api.events import read_usage
from serve.api.operation import Tally
from serve.api.schemas import PROMPT_FIELDS
from serve.telemetry.metrics import Metrics
from serve.telemetry.observation import MOST_HELD, Observation
from tests.serve.in_process import Client, in_process
from tests.serve.longest_step import MOST_S
from tests.serve.upstreams import DONE, Scripted, chunk

HUGE = "1" * 400
# What a backend reports for a prompt of a few tokens and an answer of at most 16.
UNTRUE = {
    "negative": '{"prompt_tokens": 3, "completion_tokens": -1000000000000}',
    "negative prompt": '{"prompt_tokens": -3, "completion_tokens": 5}',
    "large": '{"prompt_tokens": 3, "completion_tokens": 1000000000000000000}',
    "large prompt": '{"prompt_tokens": 2000000000, "completion_tokens": 1}',
    "400 digits": f'{{"prompt_tokens": {HUGE}, "completion_tokens": 1}}',
    "more than asked for": '{"prompt_tokens": 3, "completion_tokens": 18}',
    "longer than its request": '{"prompt_tokens": 9000, "completion_tokens": 1}',
    "a fraction": '{"prompt_tokens": 3.5, "completion_tokens": 1}',
    "a text": '{"prompt_tokens": "3", "completion_tokens": "1"}',
    "a truth": '{"prompt_tokens": true, "completion_tokens": true}',
    "infinite": '{"prompt_tokens": 1e999, "completion_tokens": NaN}',
    "a list": '{"prompt_tokens": [3], "completion_tokens": 1}',
    "nothing": "{}",
    "no object": "3",
}
SECRET = "sk-team"
KEY = {"name": "team", "tokens_per_day": 1000}
BODY = {"model": "fake", "prompt": "some words", "max_tokens": 16}


def answer(usage: str, stream: bool) -> Any:
    if not stream:
        return b'{"choices":[{"text":"a"}],"usage":' + usage.encode() + b"}"
    return [chunk("a"), b'data: {"choices":[],"usage":' + usage.encode() + b"}\n\n", DONE]


async def charged(served: Client, body: dict[str, Any], path: str = "/v1/completions") -> int:
    """Sends the request with the key; returns the tokens that the key is charged."""
    before = served.gateway.keys.usage.spent("team")
    reply = await served.request(path, body, {"authorization": f"Bearer {SECRET}"})
    assert reply.status == 200, reply.body
    return served.gateway.keys.usage.spent("team") - before


def access() -> dict[str, Any]:
    return {"keys": [KEY | {"sha256": hashlib.sha256(SECRET.encode()).hexdigest()}]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("usage", UNTRUE.values(), ids=UNTRUE)
async def test_untrue_counts_are_replaced_by_the_estimate(usage: str, stream: bool) -> None:
    backend = Scripted(answer(usage, stream))
    async with in_process(("fake", [backend]), access=access()) as served:
        for _ in range(3):
            assert 1 <= await charged(served, BODY | {"stream": stream}) <= 32
        counted = served.metric(
            "octet_tokens_total",
            key="team",
            model="fake",
            backend="fake-1",
            precision="",
            type="output",
            counted="estimated",
        )
        assert 0 <= counted <= 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_true_counts_are_charged(stream: bool) -> None:
    backend = Scripted(answer('{"prompt_tokens": 3, "completion_tokens": 16}', stream))
    async with in_process(("fake", [backend]), access=access()) as served:
        assert await charged(served, BODY | {"stream": stream}) == 19


async def test_an_image_may_have_more_tokens_than_its_address_has_letters() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    backend = Scripted(answer('{"prompt_tokens": 20000, "completion_tokens": 1}', False))
    keys = {"keys": [access()["keys"][0] | {"tokens_per_day": 1_000_000}]}
    async with in_process(("fake", [backend]), access=keys) as served:
        body = {"model": "fake", "messages": [{"role": "user", "content": [image]}]}
        assert await charged(served, body, "/v1/chat/completions") == 20001


async def test_the_context_of_a_fallback_says_nothing_about_who_answered() -> None:
    backend = Scripted(answer('{"prompt_tokens": 300, "completion_tokens": 9000}', False))
    small: Any = Scripted(answer("{}", False))
    small.context_length = 4096
    models = {"fake": {"pool": "fake", "fallback": ["small"]}}
    keys = {"keys": [access()["keys"][0] | {"tokens_per_day": 1_000_000}]}
    pools = ("fake", [backend]), ("small", [small])
    async with in_process(*pools, models=models, access=keys) as served:
        body = {"model": "fake", "messages": [{"role": "user", "content": "x" * 300}]}
        assert await charged(served, body, "/v1/chat/completions") == 9300


@pytest.mark.parametrize(("interval", "tokens"), [(None, 10), (100, 901), (True, 10), ("9", 10)])
async def test_a_broken_stream_is_charged_by_what_its_events_hold(
    interval: Any, tokens: int
) -> None:
    """vLLM puts as many tokens into an event as the request asks for."""
    lost = BackendUnavailable("gone", kind="lost")
    backend = Scripted([*[chunk("a")] * 10, lost])
    keys = {"keys": [access()["keys"][0] | {"tokens_per_day": 1_000_000}]}
    async with in_process(("fake", [backend]), access=keys) as served:
        body = BODY | {"stream": True, "max_tokens": 5000, "stream_interval": interval}
        assert await charged(served, body) == tokens + 3  # three of the prompt


@pytest.mark.parametrize(("choices", "events"), [(1, 2), (2, 4)])
async def test_the_first_events_of_each_choice_hold_a_token_at_most(
    choices: int, events: int
) -> None:
    """In a chat, the first of all has none: it opens the choice."""
    backend = Scripted([*[chunk("a")] * events, BackendUnavailable("gone", kind="lost")])
    keys = {"keys": [access()["keys"][0] | {"tokens_per_day": 1_000_000}]}
    async with in_process(("fake", [backend]), access=keys) as served:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "fake", "messages": messages, "n": choices, "max_tokens": 5000}
        body |= {"stream": True, "stream_interval": 1000}
        assert await charged(served, body, "/v1/chat/completions") < 20


async def test_a_flood_of_events_charges_no_more_than_the_request_allows() -> None:
    backend = Scripted([chunk("a"), *[chunk("a") * 50] * 20, DONE])
    async with in_process(("fake", [backend]), access=access()) as served:
        assert await charged(served, BODY | {"stream": True}) < 32


def test_a_count_that_is_none_takes_back_an_earlier_one() -> None:
    tally = Tally()
    read_usage({"usage": {"prompt_tokens": 1, "completion_tokens": 2}}, tally)
    read_usage({"usage": None}, tally)
    assert (tally.prompt_tokens, tally.completion_tokens) == (1, 2)
    read_usage(json.loads('{"usage": {"prompt_tokens": 1, "completion_tokens": -2}}'), tally)
    assert (tally.prompt_tokens, tally.completion_tokens) == (None, None)


def test_the_gaps_of_many_choices_take_no_time_in_the_end() -> None:
    observation = Observation(Metrics(), "/v1/completions", "id-1")
    observation.routed("m", choices=16)
    observation.first_token(16)
    for _ in range(3 * MOST_HELD):
        observation.streamed(2000)
        assert len(observation._held) <= MOST_HELD
    began = time.thread_time()
    observation.ended()
    assert time.thread_time() - began < MOST_S


@pytest.mark.parametrize("field", PROMPT_FIELDS)
async def test_what_a_chats_prompt_is_made_from_counts_before_the_answer(field: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    long = [{"type": "function", "function": {"name": "f", "description": "word " * 400}}]
    backend = Scripted(answer('{"prompt_tokens": 3, "completion_tokens": 1}', False))
    async with in_process(("fake", [backend]), limits={"max_prompt_tokens": 400}) as served:
        body = {"model": "fake", "messages": messages}
        assert (await served.request("/v1/chat/completions", body)).status == 200
        reply = await served.request("/v1/chat/completions", body | {field: long})
        assert reply.status == 400 and "the prompt has about 5" in reply.json()["error"]["message"]
    assert backend.asked == 1
