"""The gateway's HTTP application: routes and middleware around a `Gateway`."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from octet import __version__
from serve.api.chat import ChatDialect, plain_messages
from serve.api.completions import CompletionDialect
from serve.api.errors import install
from serve.api.exchange import Answer, Exchange
from serve.api.fields import refuse_unsupported
from serve.api.generate import Dialect, open_generate, requests_of
from serve.api.relay import open_relay
from serve.api.schemas import ChatRequest, CompletionRequest, parse
from serve.backends.base import Backend, RelayingBackend
from serve.gateway import Gateway
from serve.metrics import CONTENT_TYPE
from serve.middleware import BodyLimit, Observe

__all__ = ["create_app"]

LONG_TEXT = 20_000  # characters that take milliseconds to tokenize: not on the event loop


def create_app(gateway: Gateway) -> FastAPI:
    """The application; starting and closing the gateway's backends is the caller's."""
    app = FastAPI(title="Octet", version=__version__, docs_url="/docs", redoc_url=None)
    app.router.redirect_slashes = False  # a wrong path is an error object, not a redirect
    app.add_middleware(BodyLimit, limit=gateway.config.limits.max_body_bytes)
    app.add_middleware(
        Observe, metrics=gateway.metrics, access_log=gateway.config.logs.access
    )  # the last one added is the outermost
    install(app)
    _completion_routes(app, gateway)
    _status_routes(app, gateway)
    return app


def _completion_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/completions", response_class=Response, openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continues one or more prompts."""
        return await _exchange(gateway, request, CompletionRequest, CompletionDialect())

    @app.post("/v1/chat/completions", response_class=Response, openapi_extra=_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        return await _exchange(gateway, request, ChatRequest, ChatDialect())


async def _exchange(
    gateway: Gateway,
    request: Request,
    schema: type[CompletionRequest] | type[ChatRequest],
    dialect: Dialect,
) -> Response:
    """The answer to be sent; it counts as running from the moment its headers were read."""
    gateway.require_accepting()
    gateway.running += 1  # from here on a drain waits for it; the Exchange takes the count over
    try:
        return await _checked(gateway, request, schema, dialect)
    except BaseException:
        gateway.running -= 1
        raise


async def _checked(
    gateway: Gateway,
    request: Request,
    schema: type[CompletionRequest] | type[ChatRequest],
    dialect: Dialect,
) -> Exchange:
    """Checks the request once, for whichever backend will answer it."""
    raw = await request.body()
    body, data = parse(schema, raw, gateway.config.limits)
    pool = gateway.pool(body.model)
    facts = request.scope["octet"]
    facts["model"] = pool.name
    operation = "text_completion" if isinstance(body, CompletionRequest) else "chat"

    async def open_on(backend: Backend) -> Answer:
        if isinstance(backend, RelayingBackend):
            return await open_relay(backend, request.url.path, raw, data, request_id=facts["id"])
        kind = "completion" if isinstance(body, CompletionRequest) else "chat"
        refuse_unsupported(body.model_extra or {}, type(body).model_fields, kind, backend.name)
        requests = requests_of(body, await _prompts(body, backend), facts["id"])
        return await open_generate(backend, dialect, body, requests)

    return Exchange(gateway, pool, open_on, operation)


async def _prompts(
    body: CompletionRequest | ChatRequest, backend: Backend
) -> Sequence[str | tuple[int, ...]]:
    if isinstance(body, CompletionRequest):
        prompts: Sequence[str | tuple[int, ...]] = body.prompt
        return prompts
    messages = plain_messages(body.messages, backend.name)
    if sum(len(message["content"]) for message in messages) < LONG_TEXT:
        return [backend.chat_prompt(messages)]
    return [await asyncio.to_thread(backend.chat_prompt, messages)]


def _status_routes(app: FastAPI, gateway: Gateway) -> None:
    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": gateway.created,
            "owned_by": "octet",
            "max_model_len": gateway.pools[name].context_length,  # vLLM's addition
        }

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """The models that can be asked for."""
        data = [describe(name) for name in gateway.pools]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        """One model; 404 if it is not served."""
        return JSONResponse(describe(gateway.pool(name).name))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        """Whether the process lives: 200 as long as it can answer."""
        return JSONResponse({"status": "alive"})

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        """Whether to send traffic here: 503 while draining, or if no backend is ready."""
        state = await gateway.readiness()
        return JSONResponse(state, 200 if state["ready"] else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(gateway.metrics.render(), media_type=CONTENT_TYPE)


def _body(schema: type[CompletionRequest] | type[ChatRequest]) -> dict[str, Any]:
    """The request's schema, for the interactive documentation at /docs."""
    content = {"application/json": {"schema": schema.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
