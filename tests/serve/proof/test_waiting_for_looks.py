"""Requests that wait until it is known whether a proven backend is still the one it was."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from octet.errors import BackendUnavailable
from serve.config.proof import Proof
from tests.serve.api.request.test_attempts import TURNS, ask, busy, dead, failed, pools, refused
from tests.serve.in_process import Client, in_process
from tests.serve.proof.exams import FakeExam, FakeExams
from tests.serve.upstreams import Scripted, whole
from tests.serve.waiting import until


class Looked(Scripted):
    """Says that it is ready only once `says` is set, to True."""

    def __init__(self, *outcomes: Any, address: str) -> None:
        super().__init__(*outcomes, address=address)
        self.says: asyncio.Future[bool] | None = None

    async def ready(self) -> bool:
        return True if self.says is None else await asyncio.shield(self.says)


@asynccontextmanager
async def proven(*backends: Scripted) -> AsyncIterator[Client]:
    """A gateway over these, each of which has proven itself."""
    exams = FakeExams(FakeExam(seconds=0), Proof())
    health = {"probe_after_s": None, "timeout_s": 30}  # that a look may take, and who waits for it
    settings = pools(routing=TURNS, health=health)
    async with in_process(("fake", list(backends)), exams=exams, pools=settings) as served:
        assert [m.standing for m in served.gateway.pools["fake"].members] == ["in"] * len(backends)
        yield served


def doubt(served: Client, index: int) -> "asyncio.Future[bool]":
    """Its connection ended, and nobody knows yet what that means: the look waits for the future."""
    member = served.gateway.pools["fake"].members[index]
    backend: Any = member.backend
    backend.says = asyncio.get_running_loop().create_future()
    member.doubt("its connection ended in order")
    return backend.says


@pytest.mark.parametrize("failure", [dead, refused, failed, lambda: busy(1)])
async def test_who_fails_while_the_other_is_looked_into_waits_for_the_other(failure: Any) -> None:
    failing, other = Scripted(failure()), Looked(whole(), address="10.0.0.2:80")
    async with proven(failing, other) as served:
        look = doubt(served, 1)
        asking = asyncio.create_task(ask(served))
        await until(lambda: failing.asked)
        await asyncio.sleep(0.05)
        assert not asking.done()
        look.set_result(True)
        assert (await asking)[0] == 200 and other.asked == 1


async def test_of_two_that_are_looked_into_the_second_may_be_the_one_that_answers() -> None:
    gone, other = Looked(whole(), address="10.0.0.1:80"), Looked(whole(), address="10.0.0.2:80")
    async with proven(gone, other) as served:
        first, second = doubt(served, 0), doubt(served, 1)
        asking = asyncio.create_task(ask(served))
        await asyncio.sleep(0.05)
        first.set_result(False)
        await asyncio.sleep(0.05)
        assert not asking.done()
        second.set_result(True)
        assert (await asking)[0] == 200 and (gone.asked, other.asked) == (0, 1)


async def test_nobody_waits_for_one_that_would_not_be_asked_again() -> None:
    """The failed backend itself is looked into: a connection that was refused stays refused."""

    class Refusing(Looked):
        async def relay(self, *_arguments: Any) -> Any:
            self.says = asyncio.get_running_loop().create_future()
            raise BackendUnavailable("it cannot be reached", kind="refused")

    async with proven(Refusing(address="10.0.0.1:80")) as served:
        async with asyncio.timeout(10):
            assert (await ask(served))[0] == 503
