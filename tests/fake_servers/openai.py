"""A fake server of OpenAI's protocol, of any flavour."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from aiohttp import web

from octet.errors import RequestError
from serve.engine.request import Delta, Finished, GenerateRequest
from tests.fake_servers.base import FakeServer, asked, fault_of
from tests.fake_servers.choices import chunk_of, streamed_choice, usage_of, whole_choice
from tests.fake_servers.flavours import FLAVOURS
from tests.fake_servers.named import LAST_EVENTS, NAMED, NamedAnswer, chat_of

__all__ = ["FakeOpenAI"]

# Fault -> the answer that comes instead: status, message, headers.
_REFUSALS: dict[str, tuple[int, str, dict[str, str]]] = {
    "!busy": (503, "queue full", {"Retry-After": "7"}),
    "!limit": (429, "too many requests", {"Retry-After": "3"}),
    "!error": (500, "it broke", {}),
    "!dead": (500, "EngineCore encountered an issue. See stack trace (above).", {}),
    "!key": (401, "invalid key", {}),
}


class FakeOpenAI(FakeServer):
    """Any flavour of server, with faults.

    Before an answer: `!hangup` closes the connection, `!reset` resets it, `!wait` never answers,
    `!busy` 503, `!limit` 429, `!error` 500, `!dead` 500 of an engine that died, `!key` 401, `!html`
    a proxy's page, `!nothttp` bytes that are no HTTP. Within a stream: `!empty` closes after the
    headers, `!die` in the middle of an event, `!midreset` resets there, `!garbage` is no JSON,
    `!inside` an error event, `!early` closes after the first event that has a name.
    """

    def __init__(self, delay_s: float = 0.0, *, flavour: str = "vllm", only: str = ""):
        super().__init__(delay_s)
        self.flavour = FLAVOURS[flavour]
        self.healthy = True
        self.load_tracking = False  # vLLM's --enable-server-load-tracking
        self.version = ""  # vLLM's /version says it
        self.card: dict[str, Any] = {}  # more of its entry in /v1/models
        self.log_stats = True  # without, vLLM has no metrics of its engine
        self._only = only  # one of the paths that generate or embed; the others are refused

    async def start(self, port: int = 0) -> None:
        await self.engine.start()
        app = web.Application(client_max_size=64 * 1024 * 1024)
        for path, answer in (
            ("/v1/completions", self._completions),
            ("/v1/chat/completions", self._completions),
            ("/v1/embeddings", self._embeddings),
        ):
            app.router.add_post(path, answer if self._only in ("", path) else self._cannot)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        if self.log_stats:
            app.router.add_get(self.flavour.metrics_path, self._metrics)
        if self.version:
            app.router.add_get("/version", self._version)
        if self.load_tracking:
            app.router.add_get("/load", self._load)
        if self.flavour.tokenize:
            app.router.add_post("/tokenize", self._tokenize)
            app.router.add_post("/detokenize", self._detokenize)
        if self.flavour.named_events:
            for path in NAMED:
                app.router.add_post(path, self._completions)
            app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.runner.gate.set()
        await self._runner.cleanup()
        await self.engine.close()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _request: web.Request) -> web.Response:
        if not self.healthy:
            return web.Response(status=503)
        card: dict[str, Any] = {
            "id": "fake",
            "object": "model",
            "created": 1,
            "owned_by": self.flavour.name,
        }
        if self.flavour.max_model_len:
            card["max_model_len"] = 512
        return web.json_response({"object": "list", "data": [card | self.card]})

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _metrics(self, _request: web.Request) -> web.Response:
        stats = self.engine.stats
        assert stats is not None
        return web.Response(text=self.flavour.metrics_page(stats))

    async def _load(self, _request: web.Request) -> web.Response:
        return web.json_response({"server_load": self.running})

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [
            {"object": "embedding", "index": i, "embedding": [len(text) + 0.5, -1e-7]}
            for i, text in enumerate(inputs)
        ]
        usage = {"prompt_tokens": sum(map(len, inputs)), "total_tokens": sum(map(len, inputs))}
        answer = {"object": "list", "data": data, "model": body["model"], "usage": usage}
        return web.json_response(answer)

    async def _cannot(self, request: web.Request) -> web.Response:
        """As vLLM, of a model for something else."""
        message = f"The model does not support {request.path}"
        error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        return web.json_response({"error": error}, status=400)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        chat = "messages" in body
        ids = (
            self.engine.chat_prompt(body["messages"]) if chat else tokenizer.encode(body["prompt"])
        )
        answer = {"count": len(ids), "max_model_len": 512, "tokens": list(ids), "token_strs": None}
        return web.json_response(answer)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        chat = chat_of("/v1/messages", body)
        return web.json_response({"input_tokens": len(self.engine.chat_prompt(chat["messages"]))})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        assert self.engine.tokenizer is not None
        return web.json_response({"prompt": self.engine.tokenizer.decode(body["tokens"])})

    async def _read(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return body

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        self.running += 1
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except RequestError as error:
            return _refusal(request, 400, str(error), "BadRequestError", param=error.param)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault = fault_of(body)
        if fault in ("!hangup", "!reset", "!nothttp"):
            nonsense = b"SSH-2.0-nonsense\r\n" if fault == "!nothttp" else b""
            _break(request, reset=fault == "!reset", first=nonsense)
            return web.Response()
        if fault == "!wait":
            await asyncio.sleep(3600)
        if fault in _REFUSALS:
            status, message, headers = _REFUSALS[fault]
            return _refusal(request, status, message, "Error", headers)
        if fault == "!html":
            return web.Response(status=502, text="<h1>Bad Gateway</h1>", content_type="text/html")
        named = NamedAnswer(request.path, body) if request.path in NAMED else None
        chat = body if named is None else chat_of(request.path, body)
        number, limit = len(self.requests), self.flavour.default_limit
        wanted = asked(chat, self.engine, number, limit)
        if not body.get("stream"):
            return web.json_response(await self._whole(wanted, body, named))
        async with aclosing(cast(Any, self.engine.generate(wanted))) as events:
            first = await anext(events)  # what refuses the request is raised here
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream; charset=utf-8"}
            )
            await response.prepare(request)
            if named is None:
                await self._stream(request, response, body, _chain(first, events))
            else:
                await self._named(request, response, named, _chain(first, events), fault)
        return response

    async def _named(
        self,
        request: web.Request,
        response: web.StreamResponse,
        named: NamedAnswer,
        events: AsyncIterator[Any],
        fault: str,
    ) -> None:
        if fault == "!empty":
            return _break(request)
        deltas = 0
        async for line in named.events(events):
            deltas += b"delta" in line
            # At the last event at the latest: a sampled answer may end after one token.
            due = deltas == 3 or line.startswith(LAST_EVENTS)
            if due and fault in ("!die", "!midreset"):
                await response.write(line[:25])
                await asyncio.sleep(0.01)
                return _break(request, reset=fault == "!midreset")
            if due and fault == "!inside":
                await response.write(named.fault())
                return None
            await response.write(line)
            if fault == "!early":  # nothing but what opens a stream
                return _break(request)
        return None

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        events: AsyncIterator[Any],
    ) -> None:
        fault = fault_of(body)
        if fault == "!empty":
            return _break(request)
        count = 0
        async for event in events:
            for choice in streamed_choice(event, body, self.flavour, first=count == 0):
                count += 1
                line = self.flavour.event(count, chunk_of(body, [choice], self.flavour))
                due = count == 3 or isinstance(event, Finished)
                if due and fault in ("!die", "!midreset"):
                    await response.write(line[:25])
                    await asyncio.sleep(0.01)
                    return _break(request, reset=fault == "!midreset")
                if due and fault == "!garbage":
                    line = b"data: {not json\n\n"
                if due and fault == "!inside":
                    error = {"message": "it broke inside", "type": "InternalServerError"}
                    line = self.flavour.event(count, {"error": error | {"code": 500}})
                await response.write(line)
            if isinstance(event, Finished):
                usage = usage_of(event)
        if (body.get("stream_options") or {}).get("include_usage"):
            chunk = chunk_of(body, [], self.flavour) | {"usage": usage}
            await response.write(self.flavour.event(count + 1, chunk))
        await response.write(self.flavour.event(count + 2, "[DONE]"))

    async def _whole(
        self, wanted: GenerateRequest, body: dict[str, Any], named: NamedAnswer | None
    ) -> Any:
        deltas: list[Delta] = []
        async for event in self.engine.generate(wanted):
            if isinstance(event, Delta):
                deltas.append(event)
            else:
                end = event
        if named is not None:
            return named.whole(deltas, end)
        choice = whole_choice(deltas, end, body, self.flavour)
        answer = chunk_of(body, [choice], self.flavour) | {"usage": usage_of(end)}
        return answer | {"object": answer["object"].removesuffix(".chunk")}


def _refusal(
    request: web.Request,
    status: int,
    message: str,
    kind: str,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> web.Response:
    if request.path == "/v1/messages":
        answer = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        error = {"message": message, "type": kind, **fields, "code": status}
        answer = {"error": error}
    return web.json_response(answer, status=status, headers=headers)


async def _chain(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for event in rest:
        yield event


def _break(request: web.Request, *, reset: bool = False, first: bytes = b"") -> None:
    """Ends the connection in order, or with a reset, after sending `first`."""
    transport = request.transport
    assert isinstance(transport, asyncio.Transport)
    if first:
        transport.write(first)
    if reset:
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    else:
        transport.close()
