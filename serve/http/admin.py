"""Administration: reload, adding, removing and proving backends, /status, /ui and /metrics.

It is served on an address of its own, or beside the clients' paths; there, /admin needs a key of
its own. /admin refuses requests from web pages of another `Origin` than its own. Where it needs no
key, it also refuses a `Host` that a web page's own domain could be (DNS rebinding).
"""

import hashlib
import hmac
import ipaddress
import re

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import TypeAdapter, ValidationError

from octet.errors import OctetError, RequestError, nearest
from serve.access.keys import authorization_in
from serve.api.request.exchange import read_body
from serve.config import BackendConfig, HttpConfig
from serve.config.problems import one_line, problems_of
from serve.config.section import Fraction, Name, Seconds, Section
from serve.gateway import status
from serve.gateway.discovery import refuse_unfit
from serve.gateway.reload import reload_from
from serve.gateway.state import Gateway
from serve.http.status_page import render, wants_page
from serve.http.ui import add_page
from serve.routing import Member, Pool

__all__ = ["admin_router", "probe_router"]

MAX_SECTION = 64 * 1024  # bytes of a backend's section
_BACKEND: TypeAdapter[BackendConfig] = TypeAdapter(BackendConfig)


class _Wanted(Section):
    """The body that starts a rollout."""

    pool: Name
    steps: tuple[Fraction, ...] = (0.01, 0.1, 0.5, 1.0)
    timeout_s: Seconds = 3600.0


def probe_router(gateway: Gateway) -> APIRouter:
    """Returns /health and /ready, which are served at both addresses."""
    router = APIRouter()

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        """Reports that the process is alive: 200 as long as it can answer."""
        return JSONResponse({"status": "alive"})

    @router.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        """Reports whether to send traffic here: 503 while draining, or if no backend works."""
        state = status.readiness(gateway)
        return JSONResponse(state, 200 if state["ready"] else 503)

    return router


def admin_router(gateway: Gateway, own_port: bool) -> APIRouter:
    """Returns /metrics, /status, /ui and /admin.

    Without `own_port` these are beside the clients' paths: /admin then needs the administrator's
    key, and the router is empty if administration has a port of its own.
    """

    def is_admin(request: Request) -> bool:
        digest = gateway.config.admin.sha256
        if digest is None:
            return own_port and _is_own_host(gateway, request.headers.getlist("host"))
        try:
            sent_key = authorization_in(request.scope["headers"]) or b""
        except RequestError:
            return False
        scheme, _, key = sent_key.decode("latin-1").partition(" ")
        sent = hashlib.sha256(key.strip().encode()).hexdigest()
        return scheme.lower() == "bearer" and hmac.compare_digest(sent, digest)

    async def require_admin(request: Request) -> None:
        if gateway.config.admin.sha256 is None and not own_port:
            raise RequestError(f"no such path: {request.url.path}", status=404, code="not_found")
        if not _is_own_page(request):
            message = (
                "administration is not for other web pages: an Origin that differs from Host is"
                " refused"
            )
            raise RequestError(message, status=403, code="origin_refused")
        if gateway.config.admin.sha256 is None and not is_admin(request):
            message = (
                "administration without a key needs a Host that is an IP address, localhost, a "
                "name without dots, or admin.host: use one, or set admin.sha256"
            )
            raise RequestError(message, status=403, code="host_refused")
        if not is_admin(request):
            message = "administration needs its key: 'Authorization: Bearer KEY'"
            raise RequestError(message, status=401, code="invalid_api_key")

    router = APIRouter()
    if gateway.config.admin.port is not None and not own_port:
        return router

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus metrics."""
        content, content_type = gateway.metrics.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    @router.get("/status")
    async def show_status(request: Request) -> Response:
        """Models, pools, backends and queues; where the backends are, for administrators alone.

        A page for a browser, JSON for others.
        """
        found = status.status(gateway, addresses=is_admin(request))
        if wants_page(request.headers.get("accept", "")):
            return HTMLResponse(render(found))
        return JSONResponse(found)

    add_page(router, gateway, is_admin, own_port=own_port)
    admin = APIRouter(
        prefix="/admin", dependencies=[Depends(require_admin)], include_in_schema=own_port
    )
    _add_admin(admin, gateway)
    router.include_router(admin)
    return router


def _is_own_page(request: Request) -> bool:
    """Decides whether a request comes from no web page, or from one of this address.

    The scheme is not compared: behind a proxy that ends TLS, the gateway does not know it.
    """
    origins, hosts = request.headers.getlist("origin"), request.headers.getlist("host")
    return not origins or [origin.partition("://")[2] for origin in origins] == hosts


def _is_own_host(gateway: Gateway, hosts: list[str]) -> bool:
    """Decides whether the `Host` cannot be the domain of a web page that resolves to this address.

    Only names with dots can be registered.
    """
    if len(hosts) != 1:
        return False
    host = hosts[0].lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name in ("localhost", gateway.config.admin.host.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(re.fullmatch(r"[a-z0-9_-]+", name))
    return True


def _add_admin(admin: APIRouter, gateway: Gateway) -> None:
    @admin.post("/reload")
    async def reload() -> JSONResponse:
        """Reads the configuration file again: all of it is taken over, or nothing."""
        try:
            return JSONResponse(await reload_from(gateway, gateway.path))
        except RequestError:
            raise
        except OctetError as error:
            raise _refusal(error, "config_refused") from error

    @admin.get("/backends")
    async def backends() -> JSONResponse:
        """Every pool's backends, as /status shows them."""
        pools = status.status(gateway, addresses=True)["pools"]
        return JSONResponse({name: pool["backends"] for name, pool in pools.items()})

    @admin.post("/pools/{pool_name:path}/backends")
    async def add(pool_name: str, request: Request) -> JSONResponse:
        """Starts one more backend; the body is one as in the configuration file, as JSON."""
        body = await read_body(request.receive, dict(request.scope["headers"]), MAX_SECTION)
        config = _backend_config(body)
        async with gateway.changing:
            pool = _pool(gateway, pool_name)
            try:
                refuse_unfit(config, pool.members, gateway.config.models_of(pool_name))
                member = await pool.prepare(config, "admin")
            except OctetError as error:
                raise _refusal(error, "backend_refused") from error
            pool.swap(pool.config, [*pool.members, member])
        return JSONResponse(status.backend(gateway, member, addresses=True), 201)

    @admin.post("/pools/{pool_name:path}/backends/{name:path}/proof")
    async def prove(pool_name: str, name: str) -> JSONResponse:
        """Proves a backend on all of its golden prompts, as soon as it can be reached."""
        pool = _pool(gateway, pool_name)
        member = _member(pool, name)
        if not pool.prove_again(member):
            message = f"{pool.name}/{name} needs no proof: the pool's proof names no golden records"
            raise RequestError(message, code="no_proof")
        return JSONResponse(status.backend(gateway, member, addresses=True), 202)

    @admin.get("/models/{model:path}/rollout")
    async def rollout(model: str) -> JSONResponse:
        """The latest rollout of a canary of the model: its share, and what happened."""
        return JSONResponse(gateway.rollouts.state(model))

    @admin.post("/models/{model:path}/rollout")
    async def roll_out(model: str, request: Request) -> JSONResponse:
        """Rolls out a canary: `pool`, `steps` (its shares, the last 1) and `timeout_s` for each."""
        body = await read_body(request.receive, dict(request.scope["headers"]), MAX_SECTION)
        gateway.require_accepting()
        try:
            wanted = _Wanted.model_validate_json(body)
        except ValidationError as error:
            line = one_line(problems_of(error, _Wanted), {})
            raise RequestError(line, code="rollout_refused") from None
        if gateway.reloading.locked():  # the rollout should be of what the new file lists
            raise RequestError(
                "the gateway is reloading its configuration: roll out when that is done",
                status=409,
                code="reloading",
                retry_after_s=1,
            )
        found = gateway.rollouts.start(model, wanted.pool, wanted.steps, wanted.timeout_s)
        return JSONResponse(found, 202)

    @admin.delete("/models/{model:path}/rollout")
    async def roll_back(model: str) -> JSONResponse:
        """Sends a canary back that is being rolled out, or was promoted: it gets no requests."""
        return JSONResponse(gateway.rollouts.back(model))

    @admin.delete("/pools/{pool_name:path}/backends/{name:path}")
    async def remove(pool_name: str, name: str, drain: bool = True) -> JSONResponse:
        """Gives a backend no more requests; those that it has finish, or with drain=false end."""
        async with gateway.changing:
            pool = _pool(gateway, pool_name)
            member = _member(pool, name)
            pool.swap(pool.config, [other for other in pool.members if other is not member])
            for source in gateway.discoveries:
                if source.pool is pool and source.origin == member.origin:
                    assert member.config is not None
                    source.drop(member.config)
        finishing = member.in_flight if drain else 0
        if not drain:
            await member.backend.close()
        return JSONResponse({"name": name, "finishing": finishing})


def _backend_config(body: bytes) -> BackendConfig:
    try:
        return _BACKEND.validate_json(body)
    except ValidationError as error:
        line = one_line(problems_of(error, HttpConfig), {})
        raise RequestError(line, code="backend_refused") from None


def _pool(gateway: Gateway, name: str) -> Pool:
    pool = gateway.pools.get(name)
    if pool is None:
        message = f"no pool '{name[:100]}'{nearest(name[:100], gateway.pools)}"
        raise RequestError(message, status=404, code="pool_not_found")
    return pool


def _member(pool: Pool, name: str) -> Member:
    names = {member.name: member for member in pool.members}
    if name not in names:
        message = f"no backend '{name[:100]}' in pool '{pool.name}'{nearest(name[:100], names)}"
        raise RequestError(message, status=404, code="backend_not_found")
    return names[name]


def _refusal(error: OctetError, code: str) -> RequestError:
    return RequestError(f"nothing has changed: {error}", status=400, code=code)
