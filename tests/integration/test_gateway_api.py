"""Tests the rest of the API on a real vLLM: tokens as our tokenizer's, structured outputs."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import BadRequestError, NotFoundError, OpenAI

from tests.integration.servers.launch import GatewayServer, VllmServer, free_port

TEXTS = ("def f(x):\n    return x", "né \U0001f600 <|endoftext|>", " ", "x" * 300)


@pytest.fixture(scope="module")
def gateway(
    vllm: VllmServer, exports: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayServer]:
    """The same model twice: in vLLM, and in the gateway's own engine."""
    directory = tmp_path_factory.mktemp("gateway-api")
    port = free_port()
    upstream = {"type": "vllm", "url": vllm.url, "model": "python-lm-fp8"}
    embedded = {"type": "embedded", "path": str(exports / "onnx"), "threads": 1}
    config = {
        "listen": {"port": port},
        "models": {"theirs": {"pool": [upstream]}, "ours": {"pool": [embedded]}},
    }
    path = directory / "octet.yaml"
    path.write_text(yaml.safe_dump(config))
    with GatewayServer(config=path, port=port, log=directory / "gateway.log") as server:
        yield server


@pytest.fixture(scope="module")
def client(gateway: GatewayServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def post(gateway: GatewayServer, path: str, **body: Any) -> tuple[int, Any]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(gateway.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.vllm
def test_tokens_are_the_same_by_either_tokenizer(gateway: GatewayServer) -> None:
    for text in TEXTS:
        for fields in ({}, {"add_special_tokens": False}, {"return_token_strs": True}):
            status, theirs = post(gateway, "/tokenize", model="theirs", prompt=text, **fields)
            assert status == 200, theirs
            _, ours = post(gateway, "/tokenize", model="ours", prompt=text, **fields)
            assert {**ours, "max_model_len": 0} == {**theirs, "max_model_len": 0}
        _, back = post(gateway, "/detokenize", model="theirs", tokens=theirs["tokens"])
        assert post(gateway, "/detokenize", model="ours", tokens=ours["tokens"]) == (200, back)
    status, refused = post(gateway, "/tokenize", model="theirs", prompt=3)
    assert (status, refused["error"]["param"]) == (400, "prompt")


@pytest.mark.vllm
def test_outputs_are_held_to_a_form(client: OpenAI) -> None:
    answer = client.completions.create(
        model="theirs",
        prompt="def ",
        max_tokens=8,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert answer.choices[0].text in ("yes", "no")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    described = {"name": "a", "schema": schema | {"additionalProperties": False}}
    form = {"type": "json_schema", "json_schema": described}
    for _ in range(20):  # the form allows white space, so an answer may reach its limit before
        answer = client.completions.create(
            model="theirs", prompt="def ", max_tokens=60, extra_body={"response_format": form}
        )
        if answer.choices[0].finish_reason == "stop":
            break
    assert json.loads(answer.choices[0].text)["a"] in (1, 2)


@pytest.mark.vllm
def test_extensions_come_back(client: OpenAI) -> None:
    body: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True}
    answer = client.completions.create(
        model="theirs", prompt="def f", max_tokens=2, extra_body=body
    )
    choice = answer.choices[0].to_dict()
    assert len(choice["token_ids"]) == 2 and choice["prompt_logprobs"][0] is None
    with pytest.raises(BadRequestError, match="prompt_logprobs"):
        client.completions.create(model="ours", prompt="def f", extra_body={"prompt_logprobs": 1})


@pytest.mark.vllm
def test_more_than_the_context_is_a_mistake_to_both(client: OpenAI) -> None:
    for model in ("theirs", "ours"):
        with pytest.raises(BadRequestError, match="max_tokens"):
            client.completions.create(model=model, prompt="def", max_tokens=100_000)


@pytest.mark.vllm
def test_a_model_that_generates_has_no_embeddings(client: OpenAI) -> None:
    for model in ("theirs", "ours"):
        with pytest.raises((BadRequestError, NotFoundError)) as refused:
            client.embeddings.create(model=model, input="def")
        assert refused.value.body is not None
