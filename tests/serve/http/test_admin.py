"""Administration: who may, backends that come and go by request, and what /status says."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from serve.gateway.status import status as status_of
from serve.http.status_page import render
from serve.run import bind
from tests.fake_servers import FakeOpenAI, running
from tests.serve.conftest import Served, configured, serving_gateway
from tests.serve.gateway.test_reload import BODY, ended, one_pool, streaming
from tests.serve.proof.fake_proofs import served as served_by
from tests.serve.proof.fake_proofs import write_proofs
from tests.serve.waiting import until

KEY = "sk-admin"
ADMIN = f"admin: {{sha256: {hashlib.sha256(KEY.encode()).hexdigest()}}}\n"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
SECRET = "s3cr3t-0f-the-upstream"


@pytest.fixture
async def served(tmp_path: Path, upstreams: list[FakeOpenAI]) -> AsyncIterator[Served]:
    """The first server as `p-1`, administered by key."""
    gateway = configured(tmp_path / "octet.yaml", one_pool(upstreams[0]) + ADMIN)
    async with serving_gateway(gateway) as served:
        yield served


async def call(served: Served, method: str, path: str, **sent: Any) -> tuple[int, Any]:
    headers = sent.pop("headers", WITH_KEY)
    async with served.session.request(method, path, headers=headers, **sent) as response:
        return response.status, await response.json()


def entry(server: FakeOpenAI, **more: Any) -> dict[str, Any]:
    return {"type": "vllm", "url": server.url, "model": "fake", **more}


class TestWhoMay:
    async def test_nobody_without_a_key_or_a_port(
        self, tmp_path: Path, upstreams: list[FakeOpenAI]
    ) -> None:
        gateway = configured(tmp_path / "octet.yaml", one_pool(upstreams[0]))
        async with serving_gateway(gateway) as served:
            for method, path in (
                ("POST", "/admin/reload"),
                ("GET", "/admin/backends"),
                ("POST", "/admin/pools/p/backends"),
                ("DELETE", "/admin/pools/p/backends/p-1"),
            ):
                status, error = await call(served, method, path)
                assert (status, error["error"]["code"]) == (404, "not_found")
            assert (await call(served, "GET", "/status"))[0] == 200

    @pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer sk-other", f"Basic {KEY}"])
    async def test_not_with_another_key(self, served: Served, header: str | None) -> None:
        headers = {} if header is None else {"authorization": header}
        for method, path in (("POST", "/admin/reload"), ("GET", "/admin/backends")):
            status, error = await call(served, method, path, headers=headers)
            assert (status, error["error"]["code"]) == (401, "invalid_api_key")

    async def test_not_a_web_page(self, served: Served) -> None:
        headers = WITH_KEY | {"origin": "https://example.org"}
        status, error = await call(served, "POST", "/admin/reload", headers=headers)
        assert (status, error["error"]["code"]) == (403, "origin_refused")

    async def test_but_its_own_page(self, served: Served) -> None:
        own = served.url.removeprefix("http://")
        for origin, allowed in (
            (f"http://{own}", True),
            (f"https://{own}", True),  # behind a proxy that ends TLS
            (f"http://{own}0", False),
            ("http://localhost", False),
            ("null", False),
        ):
            headers = WITH_KEY | {"origin": origin}
            status, _ = await call(served, "GET", "/admin/backends", headers=headers)
            assert status == (200 if allowed else 403), origin
        status, _ = await call(
            served, "GET", "/admin/backends", headers={"origin": f"http://{own}"}
        )
        assert status == 401

    async def test_an_address_of_its_own_has_all_of_it(
        self, tmp_path: Path, upstreams: list[FakeOpenAI]
    ) -> None:
        text = one_pool(upstreams[0]) + "admin: {port: 0}\n"
        gateway = configured(tmp_path / "octet.yaml", text)
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            async with serving_gateway(gateway, listener) as served:
                for path in ("/metrics", "/status", "/admin/backends"):
                    assert (await call(served, "GET", path))[0] == 404
                async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                    for path in ("/metrics", "/status", "/admin/backends", "/ready", "/health"):
                        async with session.get(path) as response:
                            assert response.status == 200, path
                    async with session.get("/v1/models") as response:
                        assert response.status == 404
                    async with session.post("/admin/reload") as response:
                        assert (await response.json())["backends_kept"] == 1

    async def test_a_web_page_cannot_reach_its_address_by_a_domain_of_its_own(
        self, tmp_path: Path, upstreams: list[FakeOpenAI]
    ) -> None:
        text = one_pool(upstreams[0]) + "admin: {port: 0, host: metrics.example.net}\n"
        gateway = configured(tmp_path / "octet.yaml", text)
        refused = ("evil.example.com", "evil.example.com:80", "127.0.0.1.nip.io", "a.b")
        allowed = ("127.0.0.1:9000", "[::1]:9000", "localhost", "octet:9000", "metrics.example.net")
        with bind("127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with (
                serving_gateway(gateway, listener),
                aiohttp.ClientSession(url) as session,
            ):
                for host in (*refused, *allowed):
                    async with session.get("/admin/backends", headers={"host": host}) as response:
                        answer = await response.json()
                    async with session.get("/status", headers={"host": host}) as response:
                        shown = upstreams[0].url in await response.text()
                    if host in allowed:
                        assert "p" in answer and shown, host
                    else:
                        assert answer["error"]["code"] == "host_refused" and not shown, host
                for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
                    async with session.get(path) as response:
                        assert response.status == 404

    async def test_two_keys_are_none(self, served: Served) -> None:
        headers = [("authorization", f"Bearer {key}") for key in (KEY, "sk-other")]
        for both in (headers, headers[::-1]):
            status, _ = await call(served, "GET", "/admin/backends", headers=both)
            assert status == 401

    async def test_a_section_without_end_is_not_read(self, served: Served) -> None:
        path = "/admin/pools/p/backends"
        status, error = await call(served, "POST", path, data=b" " * 1_000_000)
        assert (status, error["error"]["code"]) == (413, "request_too_large")


class TestBackends:
    async def test_one_comes(self, served: Served, upstreams: list[FakeOpenAI]) -> None:
        sent = entry(upstreams[1], name="extra")
        status, backend = await call(served, "POST", "/admin/pools/p/backends", json=sent)
        assert (status, backend["name"], backend["standing"]) == (201, "extra", "in")
        assert backend["origin"] == "admin" and upstreams[1].url in backend["address"]
        await asyncio.gather(*(served.post("/v1/completions", BODY) for _ in range(4)))
        assert len(upstreams[0].requests) == len(upstreams[1].requests) == 2

    async def test_one_goes_when_its_requests_are_done(
        self, served: Served, upstreams: list[FakeOpenAI]
    ) -> None:
        answer = await streaming(served, upstreams[0], BODY)
        await call(served, "POST", "/admin/pools/p/backends", json=entry(upstreams[1]))
        status, said = await call(served, "DELETE", "/admin/pools/p/backends/p-1")
        assert (status, said) == (200, {"name": "p-1", "finishing": 1})
        assert (await served.post("/v1/completions", BODY | {"max_tokens": 1}))[0] == 200
        assert await ended(answer, upstreams[0])
        assert len(upstreams[0].requests) == len(upstreams[1].requests) == 1

    async def test_one_can_be_cut_off(self, served: Served, upstreams: list[FakeOpenAI]) -> None:
        body = BODY | {"max_tokens": 400, "stream": True}
        async with served.session.post("/v1/completions", json=body) as answer:
            await answer.content.readline()
            status, said = await call(served, "DELETE", "/admin/pools/p/backends/p-1?drain=false")
            assert (status, said["finishing"]) == (200, 0)
            last = (await answer.text()).strip().split("\n\n")[-1]
            assert last.startswith('data: {"error"')
        status, error = await served.post("/v1/completions", BODY)
        assert status == 503 and int(error["error"] is not None)

    async def test_an_unreachable_one_comes_and_says_so(self, served: Served) -> None:
        sent = {"type": "vllm", "url": "http://127.0.0.1:9", "model": "fake"}
        status, backend = await call(served, "POST", "/admin/pools/p/backends", json=sent)
        assert (status, backend["standing"]) == (201, "unreachable")
        assert "Connection refused" in backend["last_error"]
        assert backend["last_error_s_ago"] < 60 and not backend["recovered"]
        assert (await served.post("/v1/completions", BODY))[0] == 200

    @pytest.mark.parametrize(
        ("path", "body", "status", "message"),
        [
            ("p", "{", 400, "Invalid JSON"),
            ("p", "[]", 400, "should be a section with a backend's keys"),
            ("p", '{"type": "vllm"}', 400, "url: missing"),
            ("p", '{"type": "vllm", "url": "http://h", "modle": 1}', 400, "did you mean 'model'?"),
            ("p", '{"type": "vllm", "url": "http://h", "name": "p-1"}', 400, "named 'p-1' already"),
            ("p", '{"type": "embedded", "path": "none"}', 400, "no such directory"),
            ("q", '{"type": "vllm", "url": "http://h"}', 404, "no pool 'q'"),
        ],
    )
    async def test_what_is_wrong_changes_nothing(
        self, served: Served, path: str, body: str, status: int, message: str
    ) -> None:
        before = served.gateway.pools["p"].members
        url = f"/admin/pools/{path}/backends"
        got, error = await call(served, "POST", url, data=body)
        assert got == status and message in error["error"]["message"]
        assert served.gateway.pools["p"].members == before

    async def test_one_that_is_not_there_cannot_go(self, served: Served) -> None:
        status, error = await call(served, "DELETE", "/admin/pools/p/backends/p-2")
        assert (status, error["error"]["code"]) == (404, "backend_not_found")
        assert "did you mean 'p-1'?" in error["error"]["message"]

    async def test_one_is_proven_again(self, tmp_path: Path) -> None:
        proofs = write_proofs(tmp_path / "proofs")
        async with running(served_by()) as right:
            more = f"proof: {{golden: {proofs}}}"
            text = one_pool(right, more=more) + ADMIN
            async with serving_gateway(configured(tmp_path / "octet.yaml", text)) as served:
                (member,) = served.gateway.pools["p"].members
                assert member.proof is not None and member.proof.state == "proven"
                path = "/admin/pools/p/backends/p-1/proof"
                status, backend = await call(served, "POST", path)
                assert (status, backend["standing"]) == (202, "in")
                await until(lambda: member.proof and member.proof.outcomes["as_expected"] == 2)
                _, found = await call(served, "GET", "/status")
                (one,) = found["pools"]["p"]["backends"]
                assert [entry["outcome"] for entry in one["proof"]["history"]] == [
                    "as_expected"
                ] * 2
                assert one["proof"]["kv_cache"] == "e5m2"

    async def test_one_that_needs_no_proof_says_so(self, served: Served) -> None:
        status, error = await call(served, "POST", "/admin/pools/p/backends/p-1/proof")
        assert (status, error["error"]["code"]) == (400, "no_proof")
        status, error = await call(served, "POST", "/admin/pools/p/backends/p-2/proof")
        assert (status, error["error"]["code"]) == (404, "backend_not_found")
        status, _ = await call(served, "POST", "/admin/pools/p/backends/p-1/proof", headers={})
        assert status == 401

    async def test_a_reload_goes_back_to_the_file(
        self, served: Served, upstreams: list[FakeOpenAI]
    ) -> None:
        await call(served, "POST", "/admin/pools/p/backends", json=entry(upstreams[1]))
        status, report = await call(served, "POST", "/admin/reload")
        assert (status, report["backends_kept"], report["backends_removed"]) == (200, 1, 1)
        _, pools = await call(served, "GET", "/admin/backends")
        assert [backend["name"] for backend in pools["p"]] == ["p-1"]
        assert await served.metric("octet_reloads_total", outcome="ok") == 1

    async def test_a_file_that_is_wrong_is_refused(self, served: Served) -> None:
        path = served.gateway.path
        assert path is not None
        path.write_text("models: {m: {pool: nowhere}}")
        status, error = await call(served, "POST", "/admin/reload")
        assert (status, error["error"]["code"]) == (400, "config_refused")
        assert "unknown pool 'nowhere'" in error["error"]["message"]
        private = (await call(served, "GET", "/status"))[1]["last_reload"]
        assert private["outcome"] == "failed" and "'nowhere'" in private["reason"]
        public = (await call(served, "GET", "/status", headers={}))[1]["last_reload"]
        assert public == {"at": private["at"], "outcome": "failed"}


class TestStatus:
    async def test_it_says_what_there_is(
        self, tmp_path: Path, upstreams: list[FakeOpenAI], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UPSTREAM_KEY", SECRET)
        first, second, _ = upstreams
        backends = [
            f"{{type: vllm, url: '{first.url}', model: fake, api_key: '${{UPSTREAM_KEY}}'}}",
            "{type: vllm, url: 'http://127.0.0.1:9', name: far}",
        ]
        text = f"""
            models:
              m: {{pool: fp8, aliases: [a], canary: [{{pool: new, fraction: 0.1}}],
                   fallback: [bf16], shadow: {{pool: new, fraction: 0.5}}}}
            pools:
              fp8: {{precision: fp8, backends: [{", ".join(backends)}]}}
              new: {{backends: [{{type: vllm, url: '{second.url}', model: fake}}]}}
              bf16: {{backends: [{{type: vllm, url: '{second.url}', model: fake}}]}}
            {ADMIN}
        """
        gateway = configured(tmp_path / "octet.yaml", text)
        async with serving_gateway(gateway) as served:
            public = (await call(served, "GET", "/status", headers={}))[1]
            assert public["ready"] and not public["draining"] and public["requests"] == 0
            assert public["models"]["m"] == {
                "aliases": ["a"],
                "pool": "fp8",
                "canary": [{"pool": "new", "fraction": 0.1, "share": 0.1}],
                "rollout": None,
                "fallback": ["bf16"],
                "one_at_a_time": False,
                "shadow": {"pool": "new", "fraction": 0.5},
                "capture": None,
                "tier": None,
                "tier_aliases": {},
                "tiers": {},
            }
            pool = public["pools"]["fp8"]
            assert (pool["precision"], pool["policy"], pool["ready"]) == ("fp8", "least_tokens", 1)
            near, far = pool["backends"]
            assert (near["standing"], near["breaker"], near["in_flight"]) == ("in", "closed", 0)
            assert (far["name"], far["standing"]) == ("far", "unreachable")
            # Where the backends are is nobody's business but the administrator's.
            assert "127.0.0.1" not in str(public)
            private = (await call(served, "GET", "/status"))[1]
            near, far = private["pools"]["fp8"]["backends"]
            assert near["address"] == f"vllm {first.url}"
            assert "Connection refused" in far["last_error"]
            assert SECRET not in str(private)
            ready = (await call(served, "GET", "/ready"))[1]
            assert [b["ready"] for b in ready["models"]["m"]] == [True, False, True, True]


BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


async def test_a_browser_gets_a_page_of_the_status(
    served: Served, upstreams: list[FakeOpenAI]
) -> None:
    async with served.session.get("/status", headers=BROWSER) as response:
        assert response.content_type == "text/html"
        page = await response.text()
    assert "Ready" in page and "Pool p" in page and "p-1" in page and ">serves<" in page
    assert re.search(r"up for \d+ s<", page)
    assert "<script" not in page and upstreams[0].url not in page
    for accept in ("*/*", "application/json", "application/json, text/html"):
        async with served.session.get("/status", headers={"accept": accept}) as response:
            assert "p" in (await response.json())["pools"]


async def test_the_page_says_which_backend_is_down(
    served: Served, upstreams: list[FakeOpenAI]
) -> None:
    await upstreams[0].stop()
    for _ in range(100):
        async with served.session.get("/status", headers=BROWSER) as response:
            page = await response.text()
        if "Not ready" in page:
            break
        await asyncio.sleep(0.05)
    assert "Not ready: no backend of any model" in page and "p / p-1" in page
    assert "_" not in page.partition("</style>")[2]  # no name of the JSON is shown


async def test_the_page_names_a_model_that_nothing_serves(
    served: Served, upstreams: list[FakeOpenAI]
) -> None:
    found = status_of(served.gateway)
    dark = found["pools"]["p"] | {"ready": False}
    found["pools"]["dark"] = dark
    found["models"]["lost"] = found["models"]["m"] | {"pool": "dark"}
    found["models"]["kept"] = found["models"]["lost"] | {"fallback": ["p"]}
    page = render(found)
    assert "Ready, with problems" in page and "<dt>Model lost</dt>" in page
    assert "Model kept" not in page and "Model m" not in page


@pytest.mark.parametrize(
    ("standing", "error", "shown"),
    [
        ("ejected", None, "ejected: see the log"),
        ("ejected", "no token within 30 s", "ejected: no token within 30 s"),
        ("refused", None, "refused: match another model; check which one it loaded"),
    ],
)
async def test_the_page_gives_the_reason_of_the_backends_standing(
    standing: str, error: str | None, shown: str, served: Served
) -> None:
    found = status_of(served.gateway)
    (one,) = found["pools"]["p"]["backends"]
    one |= {"standing": standing, "up": False, "out_for_s": None, "last_error": error}
    one["proof"] = {"state": "proven", "reason": "as expected: 0.0004 nats"}
    if standing == "refused":
        one["proof"] |= {"cause": "match another model", "remedy": "check which one it loaded"}
    page = render(found)
    assert shown in page and "as expected" not in page
