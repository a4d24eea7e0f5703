"""`octet rollout`: raises a canary's share of the requests step by step, or sets it back to 0."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from octet.errors import ConfigError, GateError, OctetError, printable

__all__ = ["rollout"]

_POLL_S = 1.0
_LOST_S = 120.0  # a gateway that restarts proves its backends first
_MOST = 1024 * 1024  # bytes of an answer


def rollout(
    model: Annotated[str, typer.Argument(help="The model's public name.")],
    pool: Annotated[str | None, typer.Argument(help="One of its canaries.")] = None,
    gateway: Annotated[
        str, typer.Option(help="URL of the gateway's administration.")
    ] = "http://127.0.0.1:8000",
    key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the administrator's key.")
    ] = "OCTET_ADMIN_KEY",
    steps: Annotated[
        str, typer.Option(help="Growing shares of the requests; the last is 1.")
    ] = "0.01,0.1,0.5,1",
    timeout: Annotated[float, typer.Option(help="Longest time of a step, in seconds.")] = 3600,
    back: Annotated[bool, typer.Option("--back", help="Send the model's canary back.")] = False,
) -> None:
    """Roll out a canary: its proof, then copies for its judge, then growing shares of the requests.

    Prints each step. The canary is rolled back, and gets no requests, if its judge rules that it
    exceeds its limit, if its proof refuses it, if it fails, or if a step takes too long. Exit code
    0: promoted (with --back: sent back). 1: rolled back.
    """
    if (pool is None) != back:
        raise ConfigError(
            "name the canary to roll out, or give --back to send the model's canary back"
        )
    if not gateway.startswith(("http://", "https://")):
        raise ConfigError(f"--gateway {gateway}: should start with http:// or https://")
    try:
        urlsplit(gateway)
    except ValueError as error:
        raise ConfigError(f"--gateway {gateway}: {error}") from None
    url = f"{gateway.rstrip('/')}/admin/models/{quote(model, safe='')}/rollout"
    if back:
        state = _call("DELETE", url, key_env)
    else:
        wanted = {"pool": pool, "steps": _shares(steps), "timeout_s": timeout}
        state = _started(url, key_env, wanted)
    outcome = _followed(url, key_env, state, model)
    if outcome != ("rolled_back" if back else "promoted"):
        raise GateError(f"{state['pool']} is not promoted ({outcome}): it gets no requests")


def _shares(steps: str) -> list[float]:
    try:
        return [float(share) for share in steps.split(",")]
    except ValueError:
        raise ConfigError(f"--steps {steps}: write shares such as 0.01,0.1,0.5,1") from None


def _started(url: str, key_env: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Starts the rollout, once a reload that is under way has ended."""
    waits = False
    while True:
        try:
            return _call("POST", url, key_env, wanted)
        except _Reloading as error:
            if not waits:
                print(f"waits: {error}", flush=True)
            waits = True
            time.sleep(_POLL_S)


def _followed(url: str, key_env: str, state: dict[str, Any], model: str) -> str:
    """Prints what happens until the rollout ends; returns how."""
    printed, heard_at, followed = 0, time.monotonic(), (state["pool"], state["began"])
    try:
        while True:
            # A gateway that restarted knows its outcome alone, under the time of that.
            if state["events"] and (state["pool"], state["began"]) != followed:
                raise OctetError(f"{url}: another rollout has begun, of {state['pool']}")
            for event in state["events"][printed:]:
                print(printable(f"{event['at']}  {state['pool']} {event['text']}"), flush=True)
            printed = max(printed, len(state["events"]))
            if state["outcome"] != "running":
                if state["outcome"] == "interrupted":
                    print(f"interrupted: {state['reason']}", flush=True)
                return str(state["outcome"])
            time.sleep(_POLL_S)
            try:
                state, heard_at = _call("GET", url, key_env), time.monotonic()
            except _Unreachable:
                if time.monotonic() - heard_at > _LOST_S:
                    raise
    except KeyboardInterrupt:
        print(f"the rollout goes on; `octet rollout {model} --back` ends it", flush=True)
        raise


class _Unreachable(OctetError):
    """Raised if the gateway does not answer."""


class _Reloading(OctetError):
    """Raised if the gateway starts no rollout before its reload has ended."""


def _call(method: str, url: str, key_env: str, body: Any = None) -> dict[str, Any]:
    """Returns the gateway's JSON. Raises OctetError with its message if it refuses."""
    request = urllib.request.Request(url, method=method)
    if key := os.environ.get(key_env, "").strip():
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{key_env}: the key holds characters that no HTTP header may have")
        request.add_header("authorization", f"Bearer {key}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            content = json.loads(response.read(_MOST))
    except urllib.error.HTTPError as error:
        message, code = _error(error)
        if code == "reloading":
            raise _Reloading(message) from None
        raise ConfigError(f"{url}: {message}") from None
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise _Unreachable(f"{url}: no answer: {why}; is the gateway running there?") from None
    except ValueError:
        content = None
    if (
        not isinstance(content, dict)
        or not {"outcome", "events", "pool", "began"} <= content.keys()
    ):
        raise ConfigError(f"{url}: not the administration address of a gateway of this version")
    return content


def _error(error: urllib.error.HTTPError) -> tuple[str, str]:
    """Returns message and code of an error that the gateway returned."""
    try:
        found = json.loads(error.read(_MOST))["error"]
        return str(found["message"]), str(found["code"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"status {error.code}; is this the administration address?", ""
