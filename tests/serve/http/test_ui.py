"""The page at /ui: who gets it, what it may load, its stream of reports, and what ends a stream."""

import asyncio
import json
import re
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from serve.http import ui
from serve.run import bind
from tests.fake_servers import FakeOpenAI
from tests.serve.conftest import Served, configured, serving_gateway
from tests.serve.gateway.test_reload import BODY, ended, one_pool, streaming
from tests.serve.http.test_admin import ADMIN, WITH_KEY
from tests.serve.waiting import until

FILES = {"/ui": "text/html", "/ui/page.css": "text/css", "/ui/page.js": "text/javascript"}


@pytest.fixture
async def served(tmp_path: Path, upstreams: list[FakeOpenAI]) -> AsyncIterator[Served]:
    """The first server as `p-1`, administered by key."""
    gateway = configured(tmp_path / "octet.yaml", one_pool(upstreams[0]) + ADMIN)
    async with serving_gateway(gateway) as served:
        yield served


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new report every millisecond."""
    monkeypatch.setattr(ui, "EVERY_S", 0.001)
    monkeypatch.setattr(ui, "FRESH_S", 0.0)


async def next_report(response: aiohttp.ClientResponse) -> Any:
    """The next report of a stream; None at its end."""
    async for line in response.content:
        if line.startswith(b"data: "):
            return json.loads(line.removeprefix(b"data: "))
    return None


@asynccontextmanager
async def stream(served: Served, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    async with served.session.get("/ui/events", headers=headers) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        yield response


def streams(served: Served) -> float:
    """The number of open streams, as metrics count them."""
    found = served.gateway.metrics.registry.get_sample_value(
        "octet_requests_in_flight", {"endpoint": "/ui/events"}
    )
    return found or 0.0


async def test_the_page_loads_nothing_from_elsewhere_and_runs_nothing_inline(
    served: Served,
) -> None:
    texts = {}
    for path, kind in FILES.items():
        async with served.session.get(path) as response:
            assert (response.status, response.content_type) == (200, kind)
            policy = response.headers["content-security-policy"]
            texts[path] = await response.text()
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    page, script = texts["/ui"], texts["/ui/page.js"]
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', page)) >= {"ui/page.css", "ui/page.js"}
    assert all(f"/{path}" in FILES for path in re.findall(r'(?:src|href)="(ui[^"]*)"', page))
    assert "<style" not in page and not re.search(r"\s(on\w+|style)=", page)
    assert re.findall(r"<script[^>]*>", page) == ['<script src="ui/page.js" defer>']
    # A backend's message is text, whatever it holds.
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in script
    assert "https://" not in script and "localStorage" not in script


async def test_a_report_is_the_status_and_its_summary(
    served: Served, upstreams: list[FakeOpenAI]
) -> None:
    async with served.session.get("/status") as response:
        status = await response.json()
    async with stream(served) as response:
        report = await next_report(response)
    assert status.keys() < report.keys() and report["pools"].keys() == status["pools"].keys()
    assert report["title"] == "Ready, with problems"
    assert report["problems"] == [["Pool p", "may serve without a proof of its answers"]]
    assert (report["administration"], report["administrator"]) == ("key", False)
    assert not report["keys"] and upstreams[0].url not in json.dumps(report)
    async with stream(served, **WITH_KEY) as response:
        report = await next_report(response)
    assert report["administrator"] and upstreams[0].url in json.dumps(report)


async def test_a_change_is_in_the_next_report(
    served: Served, upstreams: list[FakeOpenAI], often: None
) -> None:
    async with stream(served) as response:
        assert (await next_report(response))["ready"]
        await upstreams[0].stop()
        while (report := await next_report(response))["ready"]:
            pass
    assert report["title"].startswith("Not ready") and report["problems"]


async def test_open_pages_are_limited_and_a_closed_one_makes_room(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ui, "MOST_STREAMS", 2)
    async with stream(served) as first, stream(served) as second:
        assert await next_report(first) and await next_report(second)
        async with served.session.get("/ui/events") as refused:
            error = (await refused.json())["error"]
            assert (refused.status, error["code"]) == (503, "too_many_pages")
            assert int(refused.headers["retry-after"]) == 30
    await until(lambda: not streams(served))
    async with stream(served) as third:
        assert await next_report(third)


async def test_a_stream_ends_when_its_client_goes(served: Served) -> None:
    tasks = len(asyncio.all_tasks())
    for _ in range(3):
        async with stream(served) as response:
            assert await next_report(response)
            assert streams(served) == 1
            response.close()
        await served.idle()
    await until(lambda: len(asyncio.all_tasks()) <= tasks + 1)  # the client's own connection


async def test_what_is_captured_is_shown_without_text_of_it(
    tmp_path: Path, upstreams: list[FakeOpenAI], often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "captured"
    folder.mkdir()
    file = folder / "prompts.jsonl"
    capture = f"capture: {{file: {file}, share: 1, max_mb: 2}}"
    text = one_pool(upstreams[0]).replace("pool: p}", f"pool: p, {capture}}}") + ADMIN
    reports = []

    async def captured(**headers: str) -> Any:
        async with stream(served, **headers) as response:
            reports.append(await next_report(response))
        return reports[-1]["models"]["m"]["capture"]

    async def send_until(kept: int, failed: int) -> Any:
        async with served.session.post("/v1/completions", json=BODY | {"prompt": "SECRET"}) as sent:
            assert sent.status == 200
        while True:
            found = await captured()
            if (found["kept"], found["dropped"].get("failed", 0)) == (kept, failed):
                return found

    async with serving_gateway(configured(tmp_path / "octet.yaml", text)) as served:
        found = await send_until(kept=1, failed=0)
        assert found["size_bytes"] == file.stat().st_size > 0
        assert found["limit_bytes"] == 2_000_000
        assert (found["paused"], found["last_failure_s_ago"]) == (False, None)
        assert "SECRET" in file.read_text("utf-8")
        shutil.rmtree(folder)
        found = await send_until(kept=1, failed=1)
        assert found["paused"] and found["last_failure_s_ago"] < 60
        problem = "its requests are served but not captured"
        assert reports[-1]["title"] == "Ready, with problems"
        assert ["Model m", f"{problem}: see the log"] in reports[-1]["problems"]
        assert (await captured(**WITH_KEY))["last_failure"] == "No such file or directory"
        assert ["Model m", f"{problem}: No such file or directory"] in reports[-1]["problems"]
        folder.mkdir()
        monkeypatch.setattr("serve.gateway.capture.PAUSE_S", 0.0)
        found = await send_until(kept=2, failed=1)
        assert not found["paused"] and found["last_failure_s_ago"] is not None
        assert problem not in str(reports[-1]["problems"])
    assert "SECRET" not in json.dumps(reports)


async def test_a_drain_is_shown_and_ends_the_stream(
    served: Served, upstreams: list[FakeOpenAI], often: None
) -> None:
    answer = await streaming(served, upstreams[0], BODY)
    async with stream(served) as response:
        assert not (await next_report(response))["draining"]
        served.server.handle_exit(signal.SIGTERM, None)
        while not (report := await next_report(response))["draining"]:
            pass
        assert report["title"].startswith("Draining") and report["requests"] == 1
        assert await ended(answer, upstreams[0])
        while await next_report(response) is not None:
            pass


async def test_pages_do_not_delay_the_end(
    tmp_path: Path, upstreams: list[FakeOpenAI], often: None
) -> None:
    """Neither one that reads nor one of a computer that sleeps."""
    text = one_pool(upstreams[0]) + "drain_timeout_s: 3600\n"
    gateway = configured(tmp_path / "octet.yaml", text)
    loop = asyncio.get_running_loop()
    with socket.socket() as asleep:
        async with asyncio.timeout(60), serving_gateway(gateway) as served:
            asleep.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            asleep.setblocking(False)
            await loop.sock_connect(asleep, ("127.0.0.1", int(served.url.rpartition(":")[2])))
            await loop.sock_sendall(asleep, b"GET /ui/events HTTP/1.1\r\nHost: a\r\n\r\n")
            connections = served.server.server_state.connections
            await until(lambda: any(c.flow.write_paused for c in connections if hasattr(c, "flow")))
            async with stream(served) as response:
                assert await next_report(response)
                served.server.handle_exit(signal.SIGTERM, None)
                while await next_report(response) is not None:
                    pass
    assert not served.server.cut_short


async def test_it_is_where_the_status_is_and_its_playground_too(
    tmp_path: Path, upstreams: list[FakeOpenAI]
) -> None:
    text = one_pool(upstreams[0]) + "admin: {port: 0}\n"
    gateway = configured(tmp_path / "octet.yaml", text)
    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with serving_gateway(gateway, listener) as served:
            for path in (*FILES, "/ui/events"):
                async with served.session.get(path) as response:
                    assert response.status == 404
            async with aiohttp.ClientSession(url) as session:
                for path in FILES:
                    async with session.get(path) as response:
                        assert response.status == 200
                async with session.get("/ui/events") as response:
                    report = await next_report(response)
                assert report["administration"] == "open" and report["administrator"]
                async with session.post("/v1/completions", json=BODY) as response:
                    assert response.status == 200
                    assert response.headers["x-octet-backend"] == "p/p-1"
                    assert response.headers["x-request-id"]
                async with session.get("/v1/completions") as response:
                    assert response.status == 405


async def test_the_playground_needs_a_clients_key_at_either_address(
    tmp_path: Path, upstreams: list[FakeOpenAI]
) -> None:
    text = one_pool(upstreams[0]) + f"access: {{keys: [{{name: k, sha256: {'a' * 64}}}]}}\n"
    gateway = configured(tmp_path / "octet.yaml", text + "admin: {port: 0}\n")
    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with serving_gateway(gateway, listener), aiohttp.ClientSession(url) as session:
            async with session.get("/ui/events") as response:
                assert (await next_report(response))["keys"]
            async with session.post("/v1/completions", json=BODY) as response:
                assert response.status == 401
