"""vLLM, or any other server that speaks OpenAI's protocol, over HTTP.

`relay` is the gateway's hot path: bytes in, bytes out. `generate` queries the same server as a
`Backend`, for callers that need tokens and log-probabilities rather than bytes.

The module also reads the server's load, context length and incarnation.
"""

import asyncio
import contextlib
import io
import json
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self
from weakref import WeakSet

import aiohttp
from yarl import URL

from octet.errors import BackendError, BackendUnavailable, RequestError
from serve.backends.base import PROBE, Body, Incarnation, LoadReport, Relay, sooner_or_later
from serve.backends.bounds import MAX_REFUSAL, MAX_REPORT, MAX_TOKENS, PARSED, PIECE
from serve.backends.connection import hold_open, kept_alive
from serve.backends.openai_completion import completion_body, completion_events
from serve.backends.openai_errors import failure, lost_while_answering, no_answer
from serve.backends.prometheus import load_of, samples
from serve.config import HttpConfig
from serve.engine.request import Event, GenerateRequest

__all__ = [
    "LOAD_SOURCES",
    "OpenAiHttpBackend",
    "card_of",
    "context_length",
    "incarnation",
    "report",
]

_STARTED = "process_start_time_seconds"  # of every Prometheus client library
_GROWING = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def _server_load(body: bytes) -> LoadReport | None:
    """Reads vLLM's /load (--enable-server-load-tracking): its requests, running or waiting."""
    try:
        running = json.loads(body)["server_load"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    known = type(running) is int and 0 <= running < MAX_TOKENS
    return LoadReport(running, 0, None, None) if known else None


Source = tuple[str, Callable[[bytes], LoadReport | None]]
LOAD_SOURCES: tuple[Source, ...] = (
    ("/metrics", load_of),
    ("/prometheus/metrics", load_of),  # trtllm-serve
    ("/load", _server_load),
)


def card_of(models: bytes, served_name: str) -> dict[str, Any] | None:
    """Reads the model's entry in /v1/models; {} if it has none, None for no list of models."""
    cards = _cards(models)
    return None if cards is None else cards.get(served_name, {})


def names_in(models: bytes) -> list[str]:
    """Reads the names of the models that /v1/models lists; none if it is no list of models."""
    return [name for name in _cards(models) or () if isinstance(name, str)]


def _cards(models: bytes) -> dict[Any, dict[str, Any]] | None:
    try:
        return {card["id"]: dict(card) for card in json.loads(models)["data"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def context_length(card: Mapping[str, Any]) -> int | None:
    """Reads `max_model_len`, as vLLM and SGLang list it; None if it is missing."""
    length = card.get("max_model_len")
    return length if type(length) is int and 0 < length < MAX_TOKENS else None


def incarnation(models: bytes, metrics: bytes, served_name: str) -> Incarnation | None:
    """Reads the incarnation from /v1/models and the Prometheus page (empty if there is none).

    Returns None if `models` is no list of models. vLLM names the checkpoint (`root`) and the
    context that it was started with. Its counters serve where several processes answer, because
    their page has no start time.
    """
    card = card_of(models, served_name)
    if card is None:
        return None
    settings = tuple(f"{key}={card.get(key)}" for key in ("root", "max_model_len"))
    found = samples(metrics, (_STARTED, *_GROWING))
    started = max((value for _, value in found.get(_STARTED, ())), default=None)
    counts = (round(sum(v for _, v in found[name])) for name in _GROWING if name in found)
    return Incarnation(settings, started, tuple(counts))


_FAILED = (aiohttp.ClientError, OSError)
# Uvicorn, which all these servers run on, closes a connection after 5 s without a request. Closing
# it here first means that no request is written to a connection that is being closed.
KEEP_ALIVE_S = 4.0
ASIDE_TIMEOUT_S = 5.0  # for the gateway's own requests: readiness, load, the model's context
_NAMES = 3  # of models that a message lists
SPECIAL_TOKENS = 8  # more than any tokenizer adds to a text
READ_BUFFER = 64 * 1024  # bytes of a response; at twice as many, reading waits for the consumer


class OpenAiHttpBackend:
    """One server, over an unlimited pool of kept-alive connections."""

    accepts_extra = True
    tokenizer: None = None

    def __init__(self, model: str, config: HttpConfig) -> None:
        """`model` is the public name."""
        self.name = f"{config.type} {config.url}"
        self.served_name = config.model or model
        self.models = (model,)
        self.context_length: int | None = None  # known once the server has been ready
        self.url = config.url
        self._config = config
        self._urls: dict[str, URL] = {}
        self._probe = 0  # index in `_PROBES` of the probe that this server takes
        self._load_from = LOAD_SOURCES  # places where it may report its load
        # All headers that aiohttp would otherwise add by itself, which takes longer.
        self._headers = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "octet"}
        if key := config.key():
            self._headers["authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self._answering: set[aiohttp.ClientResponse] = set()
        self._connections: WeakSet[socket.socket] = WeakSet()

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=self._connection
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),  # one client's must not go out with another's
            auto_decompress=False,
            read_bufsize=READ_BUFFER,
        )

    async def close(self) -> None:
        self._end_answers("closed by the gateway")
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ready(self) -> bool:
        """Sends GET /health to vLLM, and GET /v1/models to others, which may have no /health."""
        path = "/health" if self._config.type == "vllm" else "/v1/models"
        status, body = await self.get(path)
        if status != 200:
            self.context_length = None  # the server may come back with another model
            self._load_from = LOAD_SOURCES
            return False
        if self.context_length is None:
            if self._config.type == "vllm":
                _, body = await self.get("/v1/models")
            self.context_length = context_length(card_of(body, self.served_name) or {})
        return True

    async def load(self) -> LoadReport | None:
        """Reads the load from its metrics, if their names are known; else vLLM's /load; else None.

        Remembers the source that worked, and the lack of any.
        """
        answered = True
        for source in self._load_from:
            path, read = source
            status, body = await self.get(path)
            report = read(body) if status == 200 else None
            if report is not None:
                self._load_from = (source,)
                return report
            answered = answered and status != 0
        if answered:
            self._load_from = ()  # it has none: do not query it every second
        return None

    async def probe(self) -> None:
        """Generates one token by a completion; else by a chat; else computes an embedding."""
        refusal: RequestError | None = None
        for turn in range(len(_PROBES)):
            which = (self._probe + turn) % len(_PROBES)
            path, fields = _PROBES[which]
            body = json.dumps({"model": self.served_name, **fields}).encode()
            relay = await self.relay(path, body, _JSON)
            answer = await self._report(relay, MAX_REPORT)
            if relay.status == 200:
                self._require_result(answer)
                self._probe = which
                return
            error = failure(self.name, relay.status, relay.headers, answer)
            if not isinstance(error, RequestError):
                raise error
            refusal = refusal or error  # 404, or vLLM's 400 "does not support Completions API"
        # The gateway made these requests, so it is not a client's mistake.
        reason = str(refusal).rstrip(".") + await self._other_names()
        line = f"{self.name}: refuses to generate a token: {reason}"
        raise BackendUnavailable(line, kind="failed")

    async def _other_names(self) -> str:
        """Returns the remedy if the server lists models, and not under the served name; else ""."""
        status, body = await self.get("/v1/models")
        names = names_in(body) if status == 200 else []
        if not names or self.served_name in names:
            return ""
        return (
            f"; it serves {', '.join(names[:_NAMES])}, not {self.served_name}: give this backend"
            " the name under `model`"
        )

    async def _report(self, relay: Relay, limit: int) -> bytes:
        """Returns the whole body. Raises BackendError if it has more than `limit` bytes."""
        body = bytearray()
        content = relay.body
        assert isinstance(content, Body)
        async with aclosing(content):
            async for piece in content:
                body += piece
                if len(body) > limit:
                    line = f"{self.name}: answered with over {limit} bytes"
                    raise BackendUnavailable(line, kind="garbled")
        return bytes(body)

    def _require_result(self, answer: bytes) -> None:
        try:
            content = json.loads(answer)
            ended = bool(content.get("choices") or content.get("data"))
        except (ValueError, AttributeError, RecursionError):
            ended = False
        if not ended:
            raise BackendError(f"{self.name}: answered a probe without a result", kind="garbled")

    async def hold(self, reopened: Callable[[], None] = lambda: None) -> None:
        url = self._url("/")
        assert url.host is not None and url.port is not None
        vanished = await hold_open(
            self.name,
            url.host,
            url.port,
            tls=url.scheme == "https",
            timeout_s=self._config.connect_timeout_s,
            reopened=reopened,
        )
        if vanished:  # else the kernel would resend unacknowledged data for minutes
            self._end_answers("its host is gone")
            for connection in list(self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    async def incarnation(self) -> Incarnation | None:
        """Reads the list of models, and the start time and counters of the metrics if there are."""
        status, models = await self.get("/v1/models")
        page_status, page = await self.get(self._metrics_path)
        # After a transient error the incarnation is unknown. A server without a metrics page is
        # identified by its models alone.
        if status != 200 or page_status in (0, 429) or (page_status >= 500 and page_status != 501):
            return None
        return incarnation(models, page if page_status == 200 else b"", self.served_name)

    @property
    def _metrics_path(self) -> str:
        """The metrics page where its load was found, else /metrics."""
        path = self._load_from[0][0] if self._load_from else _METRICS
        return path if path.endswith(_METRICS) else _METRICS

    async def relay(self, path: str, body: bytes, headers: Mapping[str, str]) -> Relay:
        if self._session is None:
            raise BackendUnavailable(f"{self.name}: not started, or closed")
        # aiohttp would write a large body in one step; a file is written piece by piece.
        data = body if len(body) <= PARSED else io.BytesIO(body)
        try:
            response = await self._session.post(
                self._url(path), data=data, headers=headers, allow_redirects=False
            )
        except _FAILED as error:
            raise no_answer(self.name, error) from error
        lowered = {name.lower(): value for name, value in response.headers.items()}
        return Relay(response.status, lowered, _Body(self.name, response, self._answering))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str | tuple[int, ...]:
        raise RequestError(f"{self.name} applies the chat template itself")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        if request.max_tokens is None and self.context_length is None:
            await self.ready()  # reads the context length
        fields = completion_body(request, self.served_name, self._longest_answer(request.prompt))
        if self._config.type == "vllm":  # plain OpenAI names tokens by their text alone
            fields |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        headers = {**_JSON, "x-request-id": request.request_id, **request.headers}
        relay = await self.relay("/v1/completions", json.dumps(fields).encode(), headers)
        content = relay.body
        assert isinstance(content, Body)
        async with aclosing(content):
            if relay.status != 200:
                body = await self._report(relay, MAX_REFUSAL)
                raise failure(self.name, relay.status, relay.headers, body)
            started = False
            try:
                async for event in completion_events(self.name, content, request.logprobs or 0):
                    started = True
                    yield event
            except BackendError as error:
                raise sooner_or_later(error, started=started) from error

    def _end_answers(self, reason: str) -> None:
        for response in self._answering:  # aiohttp would leave their readers waiting
            response.content.set_exception(aiohttp.ClientConnectionError(reason))

    def _connection(self, address: aiohttp.AddrInfoType) -> socket.socket:
        connection = kept_alive(address)
        self._connections.add(connection)
        return connection

    def _longest_answer(self, prompt: str | tuple[int, ...]) -> int | None:
        """Returns the tokens that an answer may have if the request sets no limit; None: unknown.

        vLLM accepts the whole context and clips it to what the prompt leaves. Others may refuse
        that, so they get what the prompt leaves for certain: a text has at most as many tokens as
        bytes, plus those that a tokenizer adds.
        """
        if self.context_length is None or self._config.type == "vllm":
            return self.context_length
        taken = len(prompt.encode()) + SPECIAL_TOKENS if isinstance(prompt, str) else len(prompt)
        return max(self.context_length - taken, 1)

    def _url(self, path: str) -> URL:
        """Parses each URL once; `path` is one of the gateway's own, never a client's."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self._config.url + path)
        return url

    async def post(self, path: str, fields: Mapping[str, Any]) -> Any:
        """POSTs a JSON object to `path`, and returns the JSON of the answer.

        Raises RequestError if the server refuses it, else BackendError.
        """
        body = json.dumps({"model": self.served_name, **fields}).encode()
        headers = {**_JSON, "x-request-id": secrets.token_hex(16)}
        relay = await self.relay(path, body, headers)
        answer = await self._report(relay, MAX_REPORT)
        if relay.status != 200:
            raise failure(self.name, relay.status, relay.headers, answer)
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise BackendError(f"{self.name}: its answer is no JSON", kind="garbled") from error

    async def get(self, path: str) -> tuple[int, bytes]:
        """GETs `path`; returns status and body.

        The status is 0 if there was no response, or none of at most `MAX_REPORT` bytes.
        """
        if self._session is None:
            return 0, b""
        timeout = aiohttp.ClientTimeout(
            total=ASIDE_TIMEOUT_S, sock_connect=self._config.connect_timeout_s
        )
        try:
            async with self._session.get(
                self._url(path), timeout=timeout, allow_redirects=False
            ) as response:
                body = await report(response)
                return (0, b"") if body is None else (response.status, body)
        except (*_FAILED, RuntimeError):  # TimeoutError is an OSError; RuntimeError: as in _Body
            return 0, b""


async def report(response: aiohttp.ClientResponse) -> bytes | None:
    """Returns the whole body; None if it has more than `MAX_REPORT` bytes. Then it is closed."""
    body = bytearray()
    while piece := await response.content.read(PIECE):
        body += piece
        if len(body) > MAX_REPORT:
            response.close()
            return None
    return bytes(body)


class _Body:
    """The bytes of a response as they come, at most `PIECE` at once.

    Closing it early makes the server stop generating.
    """

    def __init__(
        self, name: str, response: aiohttp.ClientResponse, answering: set[aiohttp.ClientResponse]
    ) -> None:
        """Keeps the response in `answering` until its end."""
        self._name = name
        self._response = response
        self._answering = answering
        answering.add(response)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        response = self._response
        try:
            piece = await response.content.read(PIECE)
        except (*_FAILED, RuntimeError) as error:  # aiohttp's for a connection that is gone already
            await self.aclose()
            raise lost_while_answering(self._name, error) from error
        except BaseException:
            await self.aclose()
            raise
        if not piece:
            self._answering.discard(response)
            response.release()  # the connection goes back to the pool
            raise StopAsyncIteration
        if len(piece) == PIECE:  # more is there already: other requests get their turn first
            await asyncio.sleep(0)
        return piece

    async def aclose(self) -> None:
        self._answering.discard(self._response)
        self._response.close()  # no effect after the end


_METRICS = "/metrics"
_JSON = {"content-type": "application/json"}
_ONE_TOKEN = {"max_tokens": 1, "temperature": 0}
_PROBES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": PROBE, **_ONE_TOKEN}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROBE}], **_ONE_TOKEN}),
    ("/v1/embeddings", {"input": PROBE}),
)
