"""Tests that no answer to a client contains a backend's address."""

import asyncio
import re
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from serve.backends import connection as held
from serve.backends.triton_errors import error_of
from serve.backends.triton_grpc import TritonBackend
from tests.fake_servers import FakeTriton, running
from tests.serve.in_process import in_process
from tests.serve.openai_clients import dead_url, relay_to, triton_to
from tests.serve.waiting import until
from tests.triton_config import triton_at

HOST = "LocalHost"  # not as any library writes it: who replaces it as it is configured, misses it
NOWHERE = "no.such.Backend.invalid"
PLACE = b"http://10.9.8.7:6543/x"
TRITON_SAYS = {
    "no way": "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.9.8.7:6543: "
    "Failed to connect to remote host: connect: Connection refused (111)",
    "no name": f"DNS resolution failed for {NOWHERE}:6543: C-ares status is not ARES_SUCCESS "
    f"qtype=AAAA name={NOWHERE} is_balancer=0: Domain name not found",
    "reset": "recvmsg:Connection reset by peer ipv6:%5B::1%5D:6543",
}


def http(status: str, *headers: bytes, body: bytes = b"") -> bytes:
    lines = [f"HTTP/1.1 {status}".encode(), *headers, b"content-length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
# What a server writes in answer to a request, before it closes the connection.
ANSWERS = {
    "nothing": b"",
    "no HTTP": b"220 mail at " + PLACE + b"\r\n\r\n",
    "a broken header": b"HTTP/1.1 200 OK\r\nno header of " + PLACE + b"\r\n\r\n",
    "half a body": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
    "half a stream": EVENTS + EVENT,
    "a 404 without words": http("404 Not Found"),
    "a 500 without words": http("500 Internal Server Error"),
    "a key refused": http("401 Unauthorized"),
    "a redirect": http("302 Found", b"location: " + PLACE, body=b"<a href='%s'>" % PLACE),
}


@asynccontextmanager
async def answering(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a server that answers so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if b"POST" in await reader.read(65536):
                writer.write(answer)
                await writer.drain()
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.sleep(0)  # those that are connected see their end


async def told(backend: Any) -> list[str]:
    """What clients get from a gateway that has not noticed yet what is wrong with `backend`."""
    async with in_process(("fake", [backend])) as served:
        (member,) = served.gateway.pools["fake"].members
        answers = []
        for stream in (False, True):
            member.reachable = member.ready = True
            member.doubtful = False
            member.breaker.reset()
            member.changed()
            body = {"model": "fake", "prompt": "abc", "stream": stream}
            reply = await served.request("/v1/completions", body)
            assert reply.status >= 400 or b'"error"' in reply.body, reply
            assert b"no backend of the pool" not in reply.body, "it was not asked"
            answers.append(f"{reply.headers} {reply.body.decode()}".lower())
        return answers


def require_no_address(answers: list[str], port: int) -> None:
    for answer in answers:
        assert "fake-1" in answer or "the backend answered 404" in answer, answer
        said = re.sub(r"\b[0-9a-f]{32}\b", "ID", answer)  # of the request: any digits
        for address in (HOST, NOWHERE, "127.0.0.1", "::1", "10.9.8.7", str(port), "://", "6543"):
            assert address.lower() not in said, (address, said)
        assert "unknown error" not in answer and "errno" not in answer, answer


@pytest.mark.parametrize("answer", ANSWERS)
async def test_of_a_server_that_answers_wrong(answer: str) -> None:
    async with answering(ANSWERS[answer]) as port:
        require_no_address(await told(relay_to(f"http://{HOST}:{port}")), port)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_of_a_server_that_is_not_there(scheme: str) -> None:
    port = int(dead_url().rpartition(":")[2])
    require_no_address(await told(relay_to(f"{scheme}://{HOST}:{port}")), port)
    require_no_address(await told(relay_to(f"{scheme}://{NOWHERE}:{port}")), port)


async def test_of_a_server_that_takes_no_connection_in_time() -> None:
    backend = relay_to(f"http://{HOST}:6543", connect_timeout_s=1e-9)
    require_no_address(await told(backend), 6543)


async def test_of_a_server_without_tls() -> None:
    async with answering(b"") as port:
        require_no_address(await told(relay_to(f"https://{HOST}:{port}")), port)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another host, signed by itself; with its key."""
    path = tmp_path_factory.mktemp("tls") / "pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 9"
    files = ["-subj", "/CN=elsewhere", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.mark.parametrize("trusted", [False, True])
async def test_of_a_server_with_another_certificate(
    certificate: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    ours = ssl.create_default_context(cafile=str(certificate) if trusted else None)
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", ours)
    monkeypatch.setattr(held, "_tls", lambda: ours)
    async with answering(b"", tls) as port:
        answers = await told(relay_to(f"https://{HOST}:{port}"))
        require_no_address(answers, port)
        words = "hostname mismatch" if trusted else "self-signed certificate"
        assert all(f"cannot be reached (tls: {words}" in answer for answer in answers), answers


async def test_of_a_triton_that_is_not_there() -> None:
    port = int(dead_url().rpartition(":")[2])
    for host in (HOST, NOWHERE):
        backend = triton_to(f"{host}:{port}")
        require_no_address(await told(backend), port)


@pytest.mark.parametrize("said", TRITON_SAYS)
def test_of_what_grpc_says(said: str) -> None:
    import grpc

    message = str(error_of("t", grpc.StatusCode.UNAVAILABLE, TRITON_SAYS[said]))
    assert not any(place in message for place in (NOWHERE, "10.9.8.7", "6543", "::1")), message
    assert (message.startswith("t: ") and "onnect" in message) or "name not found" in message


@pytest.mark.parametrize("prompt", ["!wait", "!die"])
async def test_of_a_triton_that_goes_away(prompt: str) -> None:
    triton = FakeTriton()
    async with running(triton):
        port = int(triton.url.rpartition(":")[2])
        config = triton_at(f"{HOST}:{port}")
        async with in_process(("fake", [TritonBackend("fake", config)])) as served:
            body = {"model": "fake", "prompt": prompt, "stream": True}
            asking = asyncio.create_task(served.request("/v1/completions", body))
            await until(lambda: triton.requests)
            await triton.stop()
            reply = await asking
            require_no_address([f"{reply.headers} {reply.body.decode()}".lower()], port)
