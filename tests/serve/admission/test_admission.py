"""Key, pool and memory together: what each refusal says, and that a ticket gives all back."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octet.errors import RequestError
from serve.access.keys import ANONYMOUS, Keys, Principal
from serve.admission.admission import Admission, Ticket
from serve.admission.memory import Memory
from serve.config import KeyConfig, Limits, PoolConfig
from tests.serve.clock import Clock
from tests.serve.routing.virtual_time import virtual


@dataclass
class Pool:
    """What admission needs of one."""

    name: str = "pool"
    config: PoolConfig = field(default_factory=PoolConfig)
    capacity_tokens: int | None = None
    returning: bool = False


def pool(name: str = "pool", **admission: Any) -> Pool:
    return Pool(name, PoolConfig.model_validate({"admission": admission}))


def principal(**limits: Any) -> Principal:
    key = KeyConfig.model_validate({"name": "team", "sha256": "0" * 64} | limits)
    return Keys([key])._by_digest["0" * 64][1]


def make(limits: Limits | None = None, **more: Any) -> Admission:
    return Admission(limits, clock=asyncio.get_running_loop().time, chance=lambda: 0.0, **more)


async def admit(
    admission: Admission, pool: Pool, tokens: int, who: Principal = ANONYMOUS, **more: Any
) -> Ticket:
    return await admission.admit(pool, who, tokens=tokens, **{"deadline": None} | more)


def in_flight(admission: Admission, name: str = "pool") -> tuple[int, int, int]:
    gate = admission.gates[name]
    return gate.tokens, gate.requests, len(gate.queue)


async def test_a_ticket_gives_back_once() -> None:
    admission = make()
    ticket = await admit(admission, pool(max_tokens=100), 60)
    assert in_flight(admission) == (60, 1, 0) and ticket.queued_s == 0
    ticket.settle(10, 20)  # a pool's budget goes by what may still come
    assert in_flight(admission) == (60, 1, 0)
    ticket.release()
    ticket.release()
    assert in_flight(admission) == (0, 0, 0)


@virtual
async def test_the_wait_in_the_queue_is_told() -> None:
    admission, small = make(), pool(max_tokens=100)
    first = await admit(admission, small, 100)
    asyncio.get_running_loop().call_later(7.0, first.release)
    second = await admit(admission, small, 100)
    assert second.queued_s == 7.0
    second.release()


@virtual
async def test_the_wait_for_a_start_is_no_time_of_service() -> None:
    admission, small = make(), pool(max_tokens=100)
    gone, served = [await admit(admission, small, 50) for _ in range(2)]
    for ticket in (gone, served):
        ticket.pause()
    await asyncio.sleep(60.0)
    gone.release()
    served.resume()
    await asyncio.sleep(4.0)
    served.resume()  # a second attempt
    await asyncio.sleep(4.0)
    served.release()
    assert admission.gates["pool"].drain.stay_s == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("most", "capacity", "limit"), [(None, 500, 1000), (300, 500, 300), (None, None, None)]
)
async def test_the_budget_is_configured_or_twice_the_kv_cache(
    most: int | None, capacity: int | None, limit: int | None
) -> None:
    admission, backends = make(), pool(max_tokens=most)
    backends.capacity_tokens = capacity
    await admit(admission, backends, 1)
    assert admission.status()["pools"]["pool"]["limit_tokens"] == limit


@virtual
async def test_a_capacity_that_becomes_known_is_taken_over() -> None:
    admission, backends = make(), pool()
    await admit(admission, backends, 10)
    backends.capacity_tokens = 50
    await admit(admission, backends, 10)
    assert admission.gates["pool"].limit is None  # asked at most once a second
    await asyncio.sleep(1)
    await admit(admission, backends, 10)
    assert admission.gates["pool"].limit == 100


async def test_a_prompt_over_the_configured_limit_is_the_clients_mistake() -> None:
    admission = make(Limits(max_prompt_tokens=1000))
    with pytest.raises(RequestError) as caught:
        await admit(admission, pool(), 1_000_100, prompt_tokens=1_000_000)
    error = caught.value
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert str(error) == "the prompt has about 1000000 tokens; the limit is 1000"
    await admit(admission, pool(), 1100, prompt_tokens=1000)


async def test_a_refused_request_is_not_charged_and_counts_by_reason() -> None:
    admission, full = make(), pool(max_tokens=10, max_queue=0)
    who = principal(requests_per_minute=2, tokens_per_minute=100, max_in_flight=2)
    ticket = await admit(admission, full, 10, who)
    with pytest.raises(RequestError) as caught:
        await admit(admission, full, 90, who)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert who.headers()["x-ratelimit-remaining-requests"] == "1"
    assert who.headers()["x-ratelimit-remaining-tokens"] == "90"
    with pytest.raises(RequestError) as caught:
        await admit(admission, full, 91, who)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    ticket.settle(1, 2)
    assert ticket.principal.headers()["x-ratelimit-remaining-tokens"] == "97"
    assert admission.status()["pools"]["pool"]["rejected"] == {
        "queue_full": 1,
        "rate_limit_exceeded": 1,
    }


@virtual
async def test_a_client_that_goes_while_it_waits_is_charged_no_tokens() -> None:
    admission, small = make(), pool(max_tokens=10)
    who = principal(requests_per_minute=5, tokens_per_minute=100, tokens_per_day=100)
    first = await admit(admission, small, 10)
    waiting = asyncio.create_task(admit(admission, small, 50, who))
    await asyncio.sleep(1)
    assert who.headers()["x-ratelimit-remaining-tokens"] == "50"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert who.headers()["x-ratelimit-remaining-tokens"] == "100"
    assert who.headers()["x-ratelimit-remaining-requests"] == "4"  # it did ask
    first.release()
    assert in_flight(admission) == (0, 0, 0)


async def test_a_fallback_takes_its_ticket_along() -> None:
    admission = make()
    who = principal(requests_per_minute=5)
    ticket = await admit(admission, pool("fp8"), 10, who)
    await ticket.move_to(pool("fp8"), deadline=None)
    assert in_flight(admission, "fp8") == (10, 1, 0)
    await ticket.move_to(pool("bf16"), deadline=None)
    assert in_flight(admission, "fp8") == (0, 0, 0) and in_flight(admission, "bf16") == (10, 1, 0)
    assert ticket.principal.headers()["x-ratelimit-remaining-requests"] == "4"
    other = await admit(admission, pool("full", max_tokens=5, max_queue=0), 5)
    with pytest.raises(RequestError):
        await ticket.move_to(pool("full", max_tokens=5, max_queue=0), deadline=None)
    ticket.release()
    other.release()
    for name in ("fp8", "bf16", "full"):
        assert in_flight(admission, name) == (0, 0, 0)


async def test_a_ticket_that_stays_keeps_its_place() -> None:
    admission, small = make(), pool(max_tokens=10)
    ticket = await admit(admission, small, 10)
    waiting = asyncio.create_task(admit(admission, small, 10))
    await asyncio.sleep(0)
    await ticket.move_to(small, deadline=None)
    assert not waiting.done()
    ticket.release()
    (await waiting).release()


async def test_memory_refuses_beside_requests_under_way_and_never_the_only_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    statm, clock = tmp_path / "proc/self/statm", Clock()
    memory = Memory(4096 * 1000, clock=clock, root=tmp_path)
    admission = make(memory=memory)

    def resident(pages: int) -> None:
        statm.write_text(f"9999 {pages * 4096 // memory.page_bytes} 0 0 0 0 0")
        clock.now += 1

    resident(2000)
    ticket = await admit(admission, pool(), 10)  # nothing is under way: this heap may never shrink
    for ask in (admission.require_memory, lambda: admit(admission, pool(), 10).send(None)):
        with pytest.raises(RequestError) as caught:
            ask()
        error = caught.value
        assert (error.status, error.code) == (503, "overloaded")
        assert error.retry_after_s is not None and error.retry_after_s >= 1
    assert admission.rejections["", "memory"] == 2
    resident(500)
    (await admit(admission, pool(), 10)).release()
    ticket.release()


async def test_a_reload_takes_over_the_limits() -> None:
    admission = make(Limits(max_prompt_tokens=10))
    admission.reload(Limits(max_memory_bytes=123))
    assert admission.memory.limit == 123
    (await admit(admission, pool(), 1, prompt_tokens=1000)).release()


async def test_a_reload_forgets_the_gates_of_pools_that_nobody_uses() -> None:
    admission = make()
    (await admit(admission, pool("gone"), 1)).release()
    ticket = await admit(admission, pool("used"), 1)
    admission.reload(Limits())
    assert list(admission.gates) == ["used"]
    ticket.release()
    (await admit(admission, pool("gone"), 1)).release()


steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "settle", "release", "cancel", "move", "wait"]),
        st.integers(0, 60),
    ),
    max_size=50,
)


@settings(max_examples=150, deadline=None)
@given(steps)
@virtual
async def test_after_any_sequence_keys_and_pools_are_as_before(
    steps: list[tuple[str, int]],
) -> None:
    admission = make()
    pools = [
        pool("a", max_tokens=50, max_queue=3, max_wait_s=2.0),
        pool("b", max_tokens=30, max_queue=1, max_wait_s=2.0),
    ]
    who = principal(tokens_per_day=10**6, max_in_flight=6)
    tickets: list[Ticket] = []
    tasks: list[asyncio.Task[None]] = []

    async def ask(number: int) -> None:
        asked = pools[number % 2]
        tickets.append(await admit(admission, asked, number + 1, who))
        gate = admission.gates[asked.name]
        assert gate.requests == 1 or gate.tokens <= (gate.limit or 0)

    async def move(ticket: Ticket, to: Pool) -> None:
        await ticket.move_to(to, deadline=None)

    for step, number in steps:
        if step == "admit":
            tasks.append(asyncio.create_task(ask(number)))
        elif step == "wait":
            await asyncio.sleep(number / 20)
        elif step == "cancel" and tasks:
            tasks[number % len(tasks)].cancel()
        elif tickets:
            ticket = tickets[number % len(tickets)]
            if step == "settle":
                ticket.settle(1, 1)
            elif step == "release":
                ticket.release()
            elif step == "move":
                moving = asyncio.create_task(move(ticket, pools[number % 2]))
                await asyncio.wait((moving,), timeout=0.1)
                moving.cancel()
                tasks.append(moving)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert result is None or isinstance(result, RequestError | asyncio.CancelledError)
    for ticket in tickets:
        ticket.release()
    for name in admission.gates:
        assert in_flight(admission, name) == (0, 0, 0)
    rates = who._rates
    assert rates is not None
    assert (rates.in_flight, rates.reserved) == (0, 0)
