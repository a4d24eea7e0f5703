"""Gateways with a judge: fake models whose divergence from each other is known."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from serve.backends.embedded import EmbeddedBackend
from serve.members.proof_state import MemberProof
from tests.fakes import VOCABULARY, FakeRunner, fake_backend
from tests.serve.in_process import Client, in_process
from tests.serve.waiting import until

__all__ = ["BODY", "JUDGE", "ask", "divergence", "drawing", "judged", "prove"]

BODY = {"model": "m", "prompt": "abc", "max_tokens": 2, "temperature": 0}
# Two tokens of a prompt and an answer of eight take no time; a copy of every request.
JUDGE: dict[str, Any] = {
    "reference": "ref",
    "max_kl": 0.1,
    "share": 1.0,
    "answer_tokens": 8,
    "tokens_per_minute": 10**9,
    "max_in_flight": 64,
}


def drawing(tilt: float = 0.0, **options: Any) -> EmbeddedBackend:
    """A model that draws each token alike: of ten letters, the first likelier by `tilt` nats."""
    logits = np.full(VOCABULARY, -30.0, np.float32)
    logits[97:107] = 0.0
    logits[97] += 1.0 + tilt
    return fake_backend(FakeRunner(model=lambda seen: logits), **options)


def divergence(tilt: float) -> float:
    """KL(drawing(tilt) | drawing()) in nats per token."""
    q, p = (np.array([np.exp(1.0 + t)] + [1.0] * 9) for t in (tilt, 0.0))
    q, p = q / q.sum(), p / p.sum()
    return float((q * np.log(q / p)).sum())


def prove(*pools: Any) -> None:
    """Every backend of the pools, as if it had answered its golden prompts."""
    for member in (member for pool in pools for member in pool.members):
        member.proof = MemberProof("the test", "0123456789abcdef" * 4, time.monotonic)
        member.proof.state = "proven"
        member.changed()


@asynccontextmanager
async def judged(
    main: Any, reference: Any, *, canary: Any = None, judge: Any = (), **settings: Any
) -> AsyncIterator[Client]:
    """The model `m` of the pool `main`, or also of its `canary`, with the proven pool `ref`.

    The judge is the canary's if there is one.
    """
    # A report of load at the moment when an engine has a request waiting would cost copies.
    health = {"probe_after_s": None, "load_interval_s": 3600}
    quiet: dict[str, Any] = {"health": health, "ejection": {"failures": 2}}
    model: dict[str, Any] = {"pool": "main"}
    pools: list[tuple[str, list[Any]]] = [("main", [main]), ("ref", [reference])]
    found = {"main": quiet, "ref": quiet}
    if canary is not None:
        pools.append(("next", [canary]))
        model["canary"] = [{"pool": "next", "fraction": 0.0}]
    of = "main" if canary is None else "next"
    found[of] = quiet | {"judge": JUDGE | dict(judge)}
    settings = {"models": {"m": model}, "pools": found} | settings
    async with in_process(*pools, **settings) as served:
        prove(served.gateway.pools["ref"])
        yield served


async def ask(served: Client, count: int, body: Any = None, path: str = "/v1/completions") -> Any:
    """Sends requests one by one, each after the copy of the one before; returns the last answer."""
    reply = None
    for _ in range(count):
        reply = await served.request(path, BODY | (body or {}))
        assert reply.status == 200, reply.body
        await until(lambda: not served.gateway.background)
    return reply
