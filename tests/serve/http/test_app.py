"""Tests which path leads where, and which web pages may send requests."""

import hashlib
from typing import Any

import pytest

from serve.config import GatewayConfig
from serve.http import app, openapi
from serve.http.app import OPERATIONS
from tests.serve.conftest import Served, serving
from tests.serve.upstreams import Scripted, whole

BODY = {"model": "fake", "prompt": "abc"}
PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


async def get(served: Served, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
    async with served.session.request(method, path, headers=headers) as response:
        return response.status, response.headers, await response.text()


async def test_what_is_not_served_is_an_error_object() -> None:
    async with serving(("fake", [Scripted(whole())])) as served:
        for operation in OPERATIONS:
            for method in ("GET", "PUT", "OPTIONS"):
                status, headers, text = await get(served, operation.path, method)
                assert status == 405 and headers["allow"] == "POST"
                assert f"{operation.path} does not take {method}" in text
            status, _, text = await get(served, operation.path + "/", "POST")
            assert status == 404 and '"not_found"' in text
        status, headers, _ = await get(served, "/v1/completions", "OPTIONS", **PREFLIGHT)
        assert status == 405 and "access-control-allow-origin" not in headers


async def test_browsers_may_ask_from_where_the_configuration_says() -> None:
    access = {"cors_origins": ["https://a.example"]}
    async with serving(("fake", [Scripted(whole())]), access=access) as served:
        status, headers, _ = await get(served, "/v1/completions", "OPTIONS", **PREFLIGHT)
        assert status == 200 and headers["access-control-allow-origin"] == "https://a.example"
        other = PREFLIGHT | {"Origin": "https://b.example"}
        status, headers, _ = await get(served, "/v1/completions", "OPTIONS", **other)
        assert status == 400 and "access-control-allow-origin" not in headers
        origin = {"Origin": "https://a.example"}
        async with served.session.post("/v1/completions", json=BODY, headers=origin) as response:
            assert response.headers["access-control-allow-origin"] == "https://a.example"


async def test_the_openapi_document_is_made_once_for_a_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Making it holds the event loop, and everybody may ask for it."""
    made = []

    def document(config: GatewayConfig) -> dict[str, Any]:
        made.append(config)
        return openapi.document(config)

    monkeypatch.setattr(app, "document", document)
    async with serving(("fake", [Scripted(whole())])) as served:
        texts = {(await get(served, "/openapi.json"))[2] for _ in range(3)}
        assert len(texts) == 1 and len(made) == 1
        access = {"keys": [{"name": "k", "sha256": "0" * 64}]}
        raw = {"models": {"fake": {"pool": "fake"}}, "access": access}
        served.gateway.config = GatewayConfig.model_validate(raw)  # as a reload does
        assert (await get(served, "/openapi.json"))[2] not in texts


async def test_aliases_are_models_too() -> None:
    models = {"m": {"pool": "fake", "aliases": ["gpt"]}}
    async with serving(("fake", [Scripted(whole())]), models=models) as served:
        async with served.session.get("/v1/models") as response:
            found = (await response.json())["data"]
        assert [(entry["id"], entry["root"]) for entry in found] == [("m", "m"), ("gpt", "m")]
        status, answer = await served.post("/v1/completions", BODY | {"model": "gpt"})
        assert (status, answer["model"]) == (200, "gpt")


async def test_a_key_sees_its_own_models_only() -> None:
    digest = hashlib.sha256(b"sk-one").hexdigest()
    access = {"keys": [{"name": "one", "sha256": digest, "models": ["gpt"]}]}
    models = {"fake": {"pool": "fake", "aliases": ["gpt"]}, "secret-fake": {"pool": "fake"}}
    key = {"Authorization": "Bearer sk-one"}
    async with serving(("fake", [Scripted(whole())]), models=models, access=access) as served:
        _, _, listed = await get(served, "/v1/models", **key)
        _, _, missing = await get(served, "/v1/models/secret-fak", **key)
        body = BODY | {"model": "secret-fak"}
        async with served.session.post("/v1/completions", json=body, headers=key) as response:
            unknown = await response.text()
            assert response.status == 404
        assert '"fake"' in listed and '"gpt"' in listed and '"model_not_found"' in missing
        for text in (listed, missing, unknown):
            assert "secret-fake" not in text
        status, _, text = await get(served, "/v1/models/secret-fake", **key)
        assert status == 403 and '"model_not_allowed"' in text
        assert (await get(served, "/v1/models"))[0] == 401


@pytest.mark.parametrize(
    ("routing", "bodies", "headers"),
    [
        ({"policy": "session"}, [{"user": "a"}, {"user": "a", "prompt": "z"}], [{}, {}]),
        ({"policy": "session"}, [{}, {"prompt": "z"}], [{"X-Session-Id": "s"}] * 2),
        ({"policy": "prefix", "prefix_chars": 4}, [{"prompt": "abcdX"}, {"prompt": "abcdY"}], None),
        ({"policy": "prefix", "prefix_chars": 4}, [{"prompt": [1, 2, 3, 4, 5]}] * 2, None),
    ],
    ids=["field", "header", "text", "ids"],
)
async def test_requests_that_belong_together_go_together(
    routing: dict[str, Any], bodies: list[dict[str, Any]], headers: list[dict[str, str]] | None
) -> None:
    backends = [Scripted(whole()) for _ in range(8)]
    settings = {"fake": {"routing": routing, "health": {"probe_after_s": None}}}
    async with serving(("fake", backends), pools=settings) as served:
        for body, fields in zip(bodies, headers or [{}, {}], strict=True):
            request = served.session.post("/v1/completions", json=BODY | body, headers=fields)
            async with request as response:
                assert response.status == 200
        assert sorted(backend.asked for backend in backends) == [0] * 7 + [2]
