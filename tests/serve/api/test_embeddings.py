"""/v1/embeddings: the bytes of a server that has them, and a reason from one that has not."""

from typing import Any

from aiohttp import web
from openai import AsyncOpenAI

from tests.fake_servers import FakeOpenAI, running
from tests.fakes import fake_backend
from tests.serve.conftest import Served, serving
from tests.serve.openai_clients import relay_to


async def test_the_official_client_gets_the_vectors_and_the_usage_counts() -> None:
    async with running(FakeOpenAI()) as upstream:
        backend = relay_to(upstream.url)
        async with (
            serving(("fake", [fake_backend(), backend])) as served,
            AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-") as client,
        ):
            answer = await client.embeddings.create(model="fake", input=["ab", "cde"])
            assert [len(entry.embedding) > 0 for entry in answer.data] == [True, True]
            assert answer.model == "fake" and answer.usage.prompt_tokens == 5
            await served.idle()
            rendered = served.gateway.metrics.render()[0].decode()
            lines = [
                line for line in rendered.splitlines() if line.startswith("octet_tokens_total")
            ]
            (line,) = [line for line in lines if 'type="input"' in line]
            assert float(line.split()[-1]) == 5.0
        assert upstream.requests[-1]["input"] == ["ab", "cde"]


class Without(FakeOpenAI):
    """As vLLM of a model that generates: FastAPI's own words for a path that is not there."""

    async def _embeddings(self, request: web.Request) -> web.Response:
        await self._read(request)
        return web.json_response({"detail": "Not Found"}, status=404)


async def test_a_server_without_the_path_is_named_and_another_is_asked() -> None:
    body = {"model": "fake", "input": "ab"}
    async with running(Without()) as without, running(FakeOpenAI()) as upstream:
        backends = [relay_to(server.url) for server in (without, upstream)]
        async with serving(("fake", backends[:1])) as served:
            status, answer = await served.post("/v1/embeddings", body)
            assert (status, answer["error"]["code"]) == (404, "unsupported_operation")
            assert answer["error"]["message"] == "fake-1 does not have /v1/embeddings (Not Found)"
        async with serving(("fake", backends)) as served:
            for _ in range(4):
                status, answer = await served.post("/v1/embeddings", body)
                assert status == 200 and answer["data"]
            member = served.gateway.pools["fake"].members[0]
            assert member.available  # it is as good as it was for everything else
        assert len(without.requests) > 1


async def test_the_embedded_engine_has_none_and_says_so(embedded: Served) -> None:
    status, answer = await embedded.post("/v1/embeddings", {"model": "fake", "input": "a"})
    assert status == 400
    assert answer["error"]["code"] == "unsupported_operation"
    assert "no embeddings" in answer["error"]["message"]


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "a", "messages": [{"role": "user", "content": "x"}]}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "encoding_format": 1}, "encoding_format"),
    ({"messages": []}, "messages"),
]


async def test_what_is_refused(embedded: Served) -> None:
    for body, param in CASES:
        status, answer = await embedded.post("/v1/embeddings", {"model": "fake"} | body)
        assert (status, answer["error"]["param"]) == (400, param), (body, answer)
