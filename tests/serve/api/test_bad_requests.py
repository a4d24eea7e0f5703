"""Whatever a client sends, it gets one clear line in OpenAI's error object, and a 4xx."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octet.errors import RequestError
from serve.api.schemas import ChatRequest, CompletionRequest, parse
from serve.config import Limits
from tests.serve.conftest import Served, serving

COMPLETION = {"model": "fake", "prompt": "a", "max_tokens": 2}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
JSON_TYPE = {"content-type": "application/json"}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}

BOTH: list[tuple[dict[str, Any], str, str]] = [  # fields, param, a part of the message
    ({"max_tokens": 0}, "max_tokens", "greater than 0, got 0"),
    ({"max_tokens": -1}, "max_tokens", "greater than"),
    ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0, got -0.1"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"n": 0}, "n", "greater than 0"),
    ({"n": 17}, "n", "at most 16, got 17"),
    ({"seed": 2**70}, "seed", "less than"),
    ({"stop": 3}, "stop", "a string or a list of strings"),
    ({"stop": [""]}, "stop", "cannot be empty"),
    ({"stop": ["x"] * 17}, "stop", "at most 16 stop strings"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"model": None}, "model", "valid string"),
    ({"model": "nope"}, "model", "does not exist"),
    (
        {"presence_penalty": 0.5},
        "presence_penalty",
        "not supported by fake-1; vLLM accepts",
    ),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"temprature": 0.5}, "temprature", "did you mean 'temperature'?"),
    ({"xyzzy": 1}, "xyzzy", "unknown field 'xyzzy'"),
]
COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [""]}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": None}, "prompt", "should be a string"),
    ({"prompt": [1, "a"]}, "prompt", "should be a string"),
    ({"prompt": [-1]}, "prompt", "should be a string"),
    ({"prompt": [True]}, "prompt", "should be a string"),
    ({"prompt": [100_000]}, "prompt", "100000"),
    ({"prompt": ["a"] * 65}, "prompt", "at most 64 prompts"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"prompt": ["a"] * 20, "n": 7}, "n", "140 choices"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"best_of": 3}, "best_of", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
]
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [{"content": "x"}]}, "messages", "message 0 should be an object with a role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "should be a string"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "should be a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
        "no text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages.0.tool_calls",
        "not supported",
    ),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than 0"),
    ({"max_completion_tokens": 3}, "max_tokens", "differs from max_completion_tokens"),
]
CASES = [(path, *case) for path in PATHS for case in BOTH]
CASES += [("/v1/completions", *case) for case in COMPLETIONS]
CASES += [("/v1/chat/completions", *case) for case in CHATS]


def check(status: int, answer: Any) -> dict[str, Any]:
    """The error object, after a look at its form."""
    assert 400 <= status < 500, (status, answer)
    assert answer.keys() == {"error"}
    error: dict[str, Any] = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    return error


async def test_each_wrong_field_is_named(embedded: Served) -> None:
    for path, fields, param, message in CASES:
        case = f"{path} {fields}"
        status, answer = await embedded.post(path, json.dumps(PATHS[path] | fields))
        error = check(status, answer)
        assert status == (404 if error["code"] == "model_not_found" else 400), case
        assert error["param"] == param, (case, error)
        assert message in error["message"], (case, error)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me"},
        {"response_format": {"type": "text"}, "min_p": 0, "best_of": None},
    ],
)
async def test_fields_that_ask_for_nothing_pass(embedded: Served, fields: dict[str, Any]) -> None:
    status, answer = await embedded.post("/v1/completions", COMPLETION | fields)
    assert status == 200, answer


async def test_a_conversation_as_the_client_dumps_it_passes(embedded: Served) -> None:
    _, answer = await embedded.post("/v1/chat/completions", CHAT)
    message = answer["choices"][0]["message"] | {"tool_calls": None, "annotations": []}
    body = CHAT | {"messages": [*CHAT["messages"], message, {"role": "user", "content": "b"}]}
    status, answer = await embedded.post("/v1/chat/completions", body)
    assert status == 200, answer


async def test_a_body_over_the_limit_is_refused_however_it_comes() -> None:
    from tests.fakes import fake_backend

    async with serving(("fake", [fake_backend()]), limits={"max_body_bytes": 1000}) as served:
        large = json.dumps(COMPLETION | {"prompt": "x" * 200_000}).encode()

        async def pieces() -> Any:
            for start in range(0, len(large), 10_000):
                yield large[start : start + 10_000]

        for data in (large, pieces()):  # with a Content-Length, and chunked
            sent = served.session.post("/v1/completions", data=data, headers=JSON_TYPE)
            async with sent as response:
                assert response.status == 413
                error = check(413, await response.json())
                assert "1000 bytes" in error["message"]
        status, _ = await served.post("/v1/completions", COMPLETION)
        assert status == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "tools", "user", "zzz"})
)
BODIES = st.dictionaries(FIELDS, JSON, max_size=6)


@settings(max_examples=400, deadline=None)
@given(BODIES, st.booleans(), st.sampled_from(sorted(PATHS)))
def test_any_fields_parse_or_are_refused(body: dict[str, Any], valid: bool, path: str) -> None:
    schema = CompletionRequest if path == "/v1/completions" else ChatRequest
    raw = json.dumps((PATHS[path] if valid else {}) | body).encode()
    try:
        parse(schema, raw, Limits())
    except RequestError as error:
        assert error.status == 400 and "\n" not in str(error)
        str(error).encode()


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(body=BODIES, path=st.sampled_from(sorted(PATHS)))
async def test_any_json_is_answered_or_refused(
    embedded: Served, body: dict[str, Any], path: str
) -> None:
    limits = {"max_tokens": 2, "stream": False, "max_completion_tokens": None}
    status, answer = await embedded.post(path, json.dumps(PATHS[path] | body | limits))
    if status != 200:
        check(status, answer)


def test_a_number_too_large_for_a_float_is_refused() -> None:
    body = b'{"model": "fake", "prompt": "a", "temperature": 1e999}'
    with pytest.raises(RequestError, match="the number 1e999 is too large"):
        parse(CompletionRequest, body, Limits())


@pytest.mark.parametrize("padding", [0, 100_000], ids=["small", "large"])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400 + ".0"])
def test_no_number_can_become_infinity_in_a_body_that_is_written_again(
    number: str, padding: int
) -> None:
    body = '{"model": "fake", "prompt": "%s", "logit_bias": {"5": [1, %s]}}'
    with pytest.raises(RequestError, match="is too large"):
        parse(CompletionRequest, (body % ("a" * padding, number)).encode(), Limits())
