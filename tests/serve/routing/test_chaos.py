"""Whatever happens to servers, in any order: the dead are out, and the well come back."""

import asyncio
from typing import cast, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from octet.errors import BackendError, FailureKind
from serve.config import PoolConfig
from serve.members.member import Lease
from serve.routing import Pool
from serve.routing.policies import Ask
from tests.serve.routing.stand_ins import Server, servers
from tests.serve.routing.virtual_time import virtual

KINDS = get_args(FailureKind)
ACTIONS = (
    "die",
    "restart",
    "hang",
    "wake",
    "load",
    "loaded",
    "break",
    "mend",
    "request",
    "succeed",
)
STEP = st.tuples(
    st.integers(0, 2),
    st.sampled_from((*ACTIONS, *KINDS)),
    st.sampled_from((0.0, 0.001, 0.3, 2.5, 40.0)),  # seconds until the next
)


def act(server: Server, action: str) -> None:
    if action == "die":
        server.die()
    elif action == "restart" and not server.alive:
        server.restart()
    elif action in ("hang", "wake"):
        server.hangs = action == "hang"
    elif action in ("load", "loaded"):
        server.says_ready = action == "loaded"
    elif action in ("break", "mend"):
        dead = BackendError("Stub process is not healthy", kind="dead")
        server.probe_error = dead if action == "break" else None


@settings(max_examples=25, deadline=None)
@given(st.lists(STEP, max_size=40), st.sampled_from((None, 10.0)))
@virtual
async def test_whatever_happens_the_dead_are_out_and_the_well_come_back(
    steps: list[tuple[int, str, float]], probe_after_s: float | None
) -> None:
    backends = servers(3)
    health = {"probe_after_s": probe_after_s, "probe_timeout_s": 5}
    config = PoolConfig.model_validate({"health": health, "ejection": {"failures": 2}})
    pool = Pool.of("p", backends, config, clock=asyncio.get_running_loop().time)
    await pool.start()
    leases: list[Lease] = []
    for number, action, pause_s in steps:
        act(backends[number], action)
        if action == "request" and (chosen := pool.choose(Ask(7))) is not None:
            leases.append(chosen.lease(7))
        elif action == "succeed" and leases:
            leases[0].succeeded()
        elif action in KINDS and leases:
            lease = leases.pop(number % len(leases))
            lease.failed(BackendError("x", kind=cast(FailureKind, action)))
            lease.release()
        await asyncio.sleep(pause_s)
        for backend, member in zip(backends, pool.members, strict=True):
            if not backend.alive and pause_s:
                assert not member.up and pool.choose(Ask(1)) is not member
    for lease in leases:
        lease.release()
    for backend in backends:
        for action in ("restart", "wake", "loaded", "mend"):
            act(backend, action)
    await asyncio.sleep(200)
    for member in pool.members:
        assert member.up and member.available
        assert (member.in_flight, member.outstanding_tokens) == (0, 0)
        member.lease(1).succeeded()
        assert member.breaker.state == "closed"
    await pool.close()
    assert len(asyncio.all_tasks()) == 1 and not any(b.connected for b in backends)
