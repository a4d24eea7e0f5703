"""The OpenAPI document: it lists what there is, and what is answered is as it says."""

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import GatewayConfig, HttpConfig
from serve.http.app import OPERATIONS
from serve.http.openapi import document
from tests.fakes import FakeRunner, fake_backend
from tests.serve.conftest import Served, serving

POOL = {"pool": [{"type": "openai", "url": "http://127.0.0.1:1"}]}
DIGEST = "0" * 64
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "unsupported_method"),
)
METHODS = ("get", "post", "delete")


def documented(**settings: Any) -> dict[str, Any]:
    return document(GatewayConfig.model_validate({"models": {"m": POOL}} | settings))


CHOICE = {"index": 0, "text": "a", "finish_reason": "stop"}
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"object": "text_completion", "choices": [CHOICE]},
    "/v1/chat/completions": {
        "object": "chat.completion",
        "choices": [CHOICE | {"message": {"role": "assistant", "content": "a"}}],
    },
    "/v1/embeddings": {
        "object": "list",
        "data": [{"index": 0, "object": "embedding", "embedding": [0.5]}],
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    },
    "/v1/responses": {
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "output": [],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
    "/v1/messages": {
        "type": "message",
        "role": "assistant",
        "content": [],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
    "/v1/messages/count_tokens": {"input_tokens": 1},
    "/tokenize": {"count": 1, "max_model_len": 9, "tokens": [1], "token_strs": None},
    "/detokenize": {"prompt": "a"},
}


async def answer_anything(request: web.Request) -> web.Response:
    """A server that takes every request, so each 5xx that a client gets is the gateway's own."""
    body = await request.read()
    answer = {"id": "1", "created": 1, "model": "upstream"} | ANSWERS.get(request.path, {})
    text = json.dumps(answer)
    if "choices" in answer and (b'"stream": true' in body or b'"stream":true' in body):
        events = f"data: {text}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")
    return web.Response(text=text, content_type="application/json")


async def test_schemathesis_finds_no_answer_that_is_not_described(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SCHEMATHESIS_EXAMPLES=1000 looks at more of each operation; it is 12 here, for the time."""
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", answer_anything)
    async with TestServer(app) as upstream:
        config = HttpConfig(type="vllm", url=str(upstream.make_url("")), model="upstream")
        pools = (
            ("fake", [fake_backend(FakeRunner(context=64))]),
            ("relayed", [OpenAiHttpBackend("relayed", config)]),
        )
        models = {"fake": {"pool": "fake", "aliases": ["alias"]}, "relayed": {"pool": "relayed"}}
        async with serving(*pools, models=models) as served:
            returncode, report = await schemathesis(served, tmp_path)
    assert returncode == 0, report[-4000:]
    assert "Selected: 14/14" in report and "Tested: 14" in report, report[-4000:]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def schemathesis(served: Served, directory: Path) -> tuple[int | None, str]:
    """Exit code and report of schemathesis against the gateway's own document."""
    async with served.session.get("/openapi.json") as answer:
        described = await answer.json()
    # As clients do: a model that is served, and a deadline that can be met.
    described["components"]["parameters"]["timeout"]["schema"] = {"type": "number", "minimum": 60}
    for name, schema in described["components"]["schemas"].items():
        if name.endswith("Request"):
            schema["properties"]["model"] = {"enum": ["fake", "alias", "relayed"]}
    path = directory / "openapi.json"
    path.write_text(json.dumps(described))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", served.url),
        *("--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--seed", "5"),
        *("--request-timeout", "60", "--suppress-health-check", "too_slow"),
        *("--max-examples", os.environ.get("SCHEMATHESIS_EXAMPLES", "12"), "--no-color"),
        cwd=directory,  # where it may have written its own files
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_every_path_that_is_described_is_there_and_no_other(embedded: Served) -> None:
    described = documented()
    assert {operation.path for operation in OPERATIONS} < described["paths"].keys()
    for path, methods in described["paths"].items():
        for method in METHODS:
            url = path.replace("{model}", "fake")
            headers = {"content-type": "application/json"}
            async with embedded.session.request(method, url, data=b"{", headers=headers) as answer:
                assert (answer.status == 405) == (method not in methods), (method, path)
                assert (
                    str(answer.status) in methods.get(method, {"responses": ["405"]})["responses"]
                )
    for path in ("/v1", "/v1/response", "/admin/reload", "/v1/completions/"):
        async with embedded.session.post(path) as answer:
            assert answer.status == 404
    async with embedded.session.get("/openapi.json") as answer:
        assert (await answer.json())["paths"].keys() == described["paths"].keys()


def test_keys_are_in_it_where_they_are_asked_for() -> None:
    open_to_all = documented()
    assert not open_to_all["components"]["securitySchemes"]
    for path in open_to_all["paths"].values():
        for operation in path.values():
            assert not {"401", "403"} & operation["responses"].keys()
    keyed = documented(access={"keys": [{"name": "k", "sha256": DIGEST}]})
    assert keyed["components"]["securitySchemes"] == {
        "api_key": {"type": "http", "scheme": "bearer"},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    for path, methods in keyed["paths"].items():
        for operation in methods.values():
            anthropic = [{"x_api_key": []}] if path.startswith("/v1/messages") else []
            secured = operation.get("security") == [{"api_key": []}, *anthropic]
            assert secured == ("401" in operation["responses"]) == (path not in OPEN_PATHS)


OPEN_PATHS = ("/health", "/ready", "/metrics", "/status")


def test_administration_is_in_it_only_where_it_is() -> None:
    def admin(**settings: Any) -> set[str]:
        return {path for path in documented(**settings)["paths"] if path.startswith("/admin")}

    assert not admin() and not admin(admin={"port": 9000, "sha256": DIGEST})
    assert len(admin(admin={"sha256": DIGEST})) == 6
    own_port = documented(admin={"port": 9000})["paths"]
    assert "/metrics" not in own_port and "/status" not in own_port


def test_each_reference_leads_somewhere() -> None:
    described = documented(
        access={"keys": [{"name": "k", "sha256": DIGEST}]}, admin={"sha256": DIGEST}
    )
    text = json.dumps(described)
    for piece in text.split('"$ref": "')[1:]:
        target: Any = described
        for part in piece.split('"')[0].removeprefix("#/").split("/"):
            target = target[part]
