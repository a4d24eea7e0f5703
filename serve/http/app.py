"""The gateway's HTTP application: a table of POST paths, and FastAPI for everything else.

The paths that generate bypass FastAPI: its routing, its middleware and its request and response
objects take longer than the rest of the gateway together.
"""

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route as HttpRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from octet import __version__
from serve.access.keys import Principal, authorization_in
from serve.api.embeddings import Embeddings
from serve.api.errors import install
from serve.api.messages import CountTokens, Messages
from serve.api.operation import Operation
from serve.api.request.exchange import Exchange
from serve.api.responses import Responses
from serve.api.text import Chats, Completions
from serve.api.tokens import Detokenize, Tokenize
from serve.config import GatewayConfig
from serve.gateway.state import Gateway
from serve.http.admin import admin_router, probe_router
from serve.http.openapi import document
from serve.routing import Route
from serve.telemetry.observation import Observe

__all__ = ["OPERATIONS", "create_admin_app", "create_app"]

OPERATIONS: tuple[Operation, ...] = (
    Completions(),
    Chats(),
    Responses(),
    Messages(),
    CountTokens(),
    Embeddings(),
    Tokenize(),
    Detokenize(),
)


def create_app(gateway: Gateway) -> ASGIApp:
    """Creates the application. The caller starts and closes the gateway."""
    endpoints = {operation.path: _Endpoint(gateway, operation) for operation in OPERATIONS}
    pages = _pages(gateway, endpoints)

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await pages(scope, receive, send)
        else:
            await endpoint(scope, receive, send)

    config = gateway.config
    app: ASGIApp = dispatch
    if config.access.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.access.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return Observe(app, gateway.metrics, config.logs.access, gateway.tracing)


def create_admin_app(gateway: Gateway) -> FastAPI:
    """Creates the application for the separate administration address.

    It also answers completions, because the page at /ui may send requests to its own address only.
    """
    # FastAPI's own page at /docs would load scripts from elsewhere.
    app = FastAPI(title="Octet administration", version=__version__, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    install(app)
    playground = Completions()
    endpoint = Observe(
        _Endpoint(gateway, playground), gateway.metrics, gateway.config.logs.access, gateway.tracing
    )
    app.router.routes.append(HttpRoute(playground.path, endpoint, methods=["POST"]))
    app.include_router(probe_router(gateway))
    app.include_router(admin_router(gateway, own_port=True))
    return app


class _Endpoint:
    """One operation as an ASGI application."""

    def __init__(self, gateway: Gateway, operation: Operation) -> None:
        self.gateway = gateway
        self.operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(self.gateway, self.operation, scope, receive, send).run()


class _Document:
    """The OpenAPI document. It takes 8 ms to make, so it is made once per configuration."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._config: GatewayConfig | None = None
        self._made: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        config = self._gateway.config
        if config is not self._config:
            self._made, self._config = document(config), config
        return self._made


def _pages(gateway: Gateway, endpoints: dict[str, _Endpoint]) -> FastAPI:
    """Creates the application for the rarely requested paths.

    It also knows the POST paths of `endpoints`, to refuse wrong methods.
    """
    app = FastAPI(title="Octet", version=__version__, openapi_url=None)
    app.router.redirect_slashes = False  # a wrong path is an error object, not a redirect
    install(app)
    for path, endpoint in endpoints.items():
        app.router.routes.append(HttpRoute(path, endpoint, methods=["POST"]))
    described = _Document(gateway)

    @app.get("/openapi.json")
    def openapi() -> JSONResponse:
        return JSONResponse(described())

    _status_routes(app, gateway)
    app.include_router(probe_router(gateway))
    app.include_router(admin_router(gateway, own_port=False))
    return app


def _status_routes(app: FastAPI, gateway: Gateway) -> None:
    async def authenticated(request: Request) -> Principal:
        return gateway.keys.authenticate(authorization_in(request.scope["headers"]))

    @app.get("/v1/models")
    async def models(principal: Annotated[Principal, Depends(authenticated)]) -> JSONResponse:
        """The models that the key may use."""
        data = [
            _model(gateway, name, route)
            for route in gateway.routes
            for name in _names(route)
            if principal.may_use_tier(route, route.tier_of(name))
        ]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def model(
        name: str, principal: Annotated[Principal, Depends(authenticated)]
    ) -> JSONResponse:
        """One model; 404 if it is not served, 403 if it is not for this key."""
        route = gateway.routes.resolve(name, principal.may_use)
        principal.require_model(route, route.tier_of(name))
        return JSONResponse(_model(gateway, name, route))


def _names(route: Route) -> tuple[str, ...]:
    return (route.name, *route.aliases, *route.tier_aliases)


def _model(gateway: Gateway, name: str, route: Route) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "octet",
        "root": route.name,
        "max_model_len": route.context_length,  # vLLM's addition
    }
