"""Held-out text asked of a server: both ways to ask, and everything that can be wrong."""

from typing import Any

import numpy as np
import pytest

from octet.errors import BackendError, ConfigError, UnsupportedError
from tests.serve.evaluation.prompt_server import as_octet, as_tokens, as_vllm, running, truth
from verify.evaluation.targets import client
from verify.evaluation.targets.server import Server

SAMPLES = [(1, 5, 9, 2), (7, 7), (3, 1, 4, 1, 5, 9, 2, 6)]


@pytest.mark.parametrize("answering", [as_vllm, as_octet])
def test_answers_are_those_of_the_model(answering: Any) -> None:
    with running(answering) as fake:
        server = Server(fake.url, concurrency=2)
        found = dict(server.answers(SAMPLES, 5))
    assert server.longest == 127 and server.model == "octet"
    for index, ids in enumerate(SAMPLES):
        expected = truth(ids, 5)
        assert found[index].logprobs == pytest.approx(expected.logprobs, abs=1e-6)
        assert np.array_equal(found[index].top_ids, expected.top_ids)
        assert found[index].top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-6)


def test_every_request_has_a_salt_of_its_own_and_sends_token_ids() -> None:
    with running(as_vllm) as fake:
        list(Server(fake.url).answers(SAMPLES, 5))
    assert len({body["cache_salt"] for body in fake.asked}) == len(SAMPLES)
    assert sorted(tuple(body["prompt"]) for body in fake.asked) == sorted(SAMPLES)


def test_the_model_is_the_only_one_or_named_in_the_url() -> None:
    with running(as_vllm, [{"id": "org/a"}, {"id": "b"}]) as fake:
        assert Server(f"{fake.url}/org/a").model == "org/a"
        assert Server(f"{fake.url}/v1/b").model == "b"
        with pytest.raises(ConfigError, match=r"does not have one model.*one of: org/a, b"):
            Server(fake.url)
        with pytest.raises(ConfigError, match="has no model 'c'"):
            Server(f"{fake.url}/c")


def test_its_own_tokenizer_is_asked_where_it_tells() -> None:
    with running(as_vllm) as fake:
        assert Server(fake.url).encode("ab") == [97 % 64, 98 % 64]


def altered(change: Any) -> Any:
    """vLLM's answer, its list of positions changed."""

    def answering(body: dict[str, Any]) -> tuple[int, Any]:
        status, content = as_vllm(body)
        if status == 200:
            choice = content["choices"][0]
            choice["prompt_logprobs"] = change(choice["prompt_logprobs"])
        return status, content

    return answering


def without_the_last(listed: list[Any]) -> list[Any]:
    return listed[:-1]


def of_other_tokens(listed: list[Any]) -> list[Any]:
    return [None, *({str(900 + i): {"logprob": -1.0} for i in range(6)} for _ in listed[1:])]


def few(listed: list[Any]) -> list[Any]:
    return [None, *(dict(list(position.items())[:2]) for position in listed[1:])]


@pytest.mark.parametrize(
    ("answering", "error", "message"),
    [
        (altered(without_the_last), ConfigError, "read 3 tokens where 4 were sent.*tokenizer"),
        (
            altered(of_other_tokens),
            ConfigError,
            "returns no log-probabilities of the tokens that .*vocabulary",
        ),
        (altered(few), UnsupportedError, "2 log-probabilities at a position, and 5 were requested"),
        (altered(lambda listed: None), UnsupportedError, "prompt_logprobs: ignored; echo"),
        (altered(lambda listed: [1] * len(listed)), BackendError, "not that of a completion"),
        (lambda body: (200, {}), BackendError, "not that of a completion"),
        (lambda body: (400, {"error": {"message": "too long"}}), UnsupportedError, "too long"),
        (lambda body: (500, {}), BackendError, "answered 500"),
        (lambda body: (0, {}), BackendError, "closed the connection"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_clear_line(
    answering: Any, error: type[Exception], message: str
) -> None:
    with running(answering) as fake:
        server = Server(fake.url)
        with pytest.raises(error, match=message) as caught:
            list(server.answers(SAMPLES, 5))
    assert "\n" not in str(caught.value) and fake.url in str(caught.value)


@pytest.mark.parametrize(
    ("change", "what"),
    [(few, "2 log-probabilities at a position"), (lambda listed: None, "ignored")],
)
def test_a_server_that_leaves_something_out_later_is_one_clear_line(change: Any, what: str) -> None:
    def answering(body: dict[str, Any]) -> tuple[int, Any]:
        return (as_vllm if len(fake.asked) < 2 else altered(change))(body)

    with running(answering) as fake:
        answers = Server(fake.url, concurrency=1).answers(SAMPLES, 5)
        assert next(answers)[0] == 0
        with pytest.raises(BackendError, match=f"a prompt of 2 tokens .{what}.*gave of others"):
            list(answers)


@pytest.mark.parametrize("busy", [429, 503])
def test_a_busy_server_is_not_taken_for_one_without_a_tokenizer(
    busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.0)
    with running(as_vllm) as fake:
        server = Server(fake.url)
        fake.tokenizing = lambda body: (busy, {})
        with pytest.raises(BackendError, match=f"answered {busy}"):
            server.encode("ab")
        fake.tokenizing = as_tokens
        assert server.encode("ab") == [97 % 64, 98 % 64]
        fake.tokenizing = lambda body: (404, {})
        assert server.encode("ab") is None


def test_null_is_what_servers_write_for_nan() -> None:
    def nulled(listed: list[Any]) -> list[Any]:
        return [None, *({t: {"logprob": None} for t in position} for position in listed[1:])]

    with running(altered(nulled)) as fake:
        (_, answer), *_ = Server(fake.url).answers(SAMPLES[:1], 5)
    assert not answer.finite


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.0)
    turns = iter([429, 503])

    def answering(body: dict[str, Any]) -> tuple[int, Any]:
        status = next(turns, 200)
        return as_vllm(body) if status == 200 else (status, {})

    with running(answering) as fake:
        assert len(dict(Server(fake.url).answers(SAMPLES, 5))) == len(SAMPLES)
    assert len(fake.asked) == len(SAMPLES) + 2


def test_nothing_at_the_url_is_said_at_once() -> None:
    with running(as_vllm) as fake:
        url = fake.url
    with pytest.raises(BackendError, match="cannot be reached"):
        Server(url)
    with pytest.raises(ConfigError, match="not a server's URL"):
        Server("http://")
