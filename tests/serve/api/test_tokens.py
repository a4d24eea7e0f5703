"""/tokenize and /detokenize: by our tokenizer, or by the server that has its own."""

from typing import Any

import pytest

from tests.fake_servers import FakeOpenAI, FakeTriton, running
from tests.fakes import END, fake_backend
from tests.serve.conftest import Served, serving
from tests.serve.openai_clients import relay_to, triton_to


async def ids_of(served: Served, **body: Any) -> Any:
    status, answer = await served.post("/tokenize", {"model": "fake"} | body)
    assert status == 200, answer
    assert answer["count"] == len(answer["tokens"])
    return answer


async def test_a_text_and_back(embedded: Served) -> None:
    text = "né<|end|>!"
    answer = await ids_of(embedded, prompt=text)
    assert answer["tokens"] == [110, 0xC3, 0xA9, END, 33]
    assert answer["max_model_len"] == 512 and answer["token_strs"] is None
    status, back = await embedded.post("/detokenize", {"model": "fake", "tokens": answer["tokens"]})
    assert (status, back) == (200, {"prompt": text})


async def test_the_tokens_as_the_vocabulary_spells_them(embedded: Served) -> None:
    answer = await ids_of(embedded, prompt="a<|end|>", return_token_strs=True)
    assert answer["token_strs"] == ["a", "<|end|>"]


async def test_a_conversation_is_what_a_chat_would_read(embedded: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = await ids_of(embedded, messages=messages)
    _, chat = await embedded.post(
        "/v1/chat/completions", {"model": "fake", "messages": messages, "max_tokens": 1}
    )
    assert chat["usage"]["prompt_tokens"] == answer["count"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert (await ids_of(embedded, messages=parts))["tokens"] == answer["tokens"]


async def test_a_long_text_is_not_cut(embedded: Served) -> None:
    answer = await ids_of(embedded, prompt="x" * 100_000)
    assert answer["count"] == 100_000


CASES: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("/tokenize", {}, 400, "prompt", "either prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, 400, "prompt", "either"),
    ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "valid string"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens", "bool"),
    ("/tokenize", {"prompt": "a", "zzz": 1}, 400, "zzz", "unknown field"),
    ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model", "does not exist"),
    ("/tokenize", {"messages": [{"role": "u"}]}, 400, "messages.0.content", "string"),
    (
        "/tokenize",
        {"messages": [{"role": "u", "content": "x"}], "chat_template": "x"},
        400,
        "chat_template",
        "not supported",
    ),
    ("/detokenize", {}, 400, "tokens", "required"),
    ("/detokenize", {"tokens": [257]}, 400, "tokens", "0 to 256"),
    ("/detokenize", {"tokens": [2**40]}, 400, "tokens", "0 to 256"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens.0", "greater than or equal"),
    ("/detokenize", {"tokens": "ab"}, 400, "tokens", "valid list"),
]


async def test_what_is_refused(embedded: Served) -> None:
    for path, body, status, param, message in CASES:
        found, answer = await embedded.post(path, {"model": "fake"} | body)
        error = answer["error"]
        assert (found, error["param"]) == (status, param), (path, body, error)
        assert message in error["message"], (path, body, error)


async def test_more_than_should_be_tokenized_at_once(
    embedded: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.api.tokens.MAX_CHARACTERS", 1000)
    messages = [{"role": "user", "content": "x" * 1000}]
    for body in ({"prompt": "x" * 1001}, {"messages": messages}):
        status, answer = await embedded.post("/tokenize", {"model": "fake"} | body)
        assert (status, answer["error"]["param"]) == (413, next(iter(body)))
        assert "at most 1000" in answer["error"]["message"]
    await ids_of(embedded, prompt="x" * 1000)


async def test_a_server_with_its_own_is_asked_and_a_pool_finds_whoever_can() -> None:
    async with running(FakeOpenAI()) as upstream, running(FakeTriton()) as triton:
        backend = relay_to(upstream.url)
        bare = triton_to(triton.url)
        async with serving(("fake", [bare, backend])) as served:
            for _ in range(3):  # whoever is asked first
                answer = await ids_of(served, prompt="né")
                assert answer["tokens"] == [110, 0xC3, 0xA9]
            _, back = await served.post("/detokenize", {"model": "fake", "tokens": [104, 105]})
            assert back == {"prompt": "hi"}
        assert upstream.requests[-1] == {"model": "fake", "tokens": [104, 105]}


async def test_a_backend_without_a_tokenizer_says_so() -> None:
    async with running(FakeTriton()) as triton:
        bare = triton_to(triton.url)
        async with serving(("fake", [bare])) as served:
            for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
                status, answer = await served.post(path, {"model": "fake"} | body)
                assert status == 400, answer
                assert answer["error"]["code"] == "unsupported_operation"
                assert "no tokenizer" in answer["error"]["message"]


async def test_nothing_is_counted_as_generated() -> None:
    async with serving(("fake", [fake_backend()])) as served:
        await ids_of(served, prompt="hello")
        await served.idle()
        rendered, _ = served.gateway.metrics.render()
        assert b"octet_tokens_total{" not in rendered
