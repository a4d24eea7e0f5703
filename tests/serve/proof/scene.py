"""A started pool of one server and its proof, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from serve.config import PoolConfig
from serve.members.proof_state import MemberProof
from serve.routing import Pool
from serve.routing.policies import Ask
from tests.serve.proof.exams import FakeExam, FakeExams
from tests.serve.routing.stand_ins import Server
from tests.serve.routing.virtual_time import as_test, run

__all__ = ["ADDRESS", "Scene", "play", "played"]

ADDRESS = "http://10.0.0.5:8000"


class Scene:
    """A started pool of one server."""

    def __init__(self, exam: FakeExam, server: Server, pool: Pool) -> None:
        self.exam = exam
        self.server = server
        self.pool = pool
        self.member = pool.members[0]

    @property
    def proof(self) -> MemberProof:
        assert self.member.proof is not None
        return self.member.proof

    @property
    def asked(self) -> int:
        """Probes that were begun, each look counted."""
        return len(self.exam.asked)

    def serves(self) -> bool:
        return self.pool.choose(Ask(1)) is self.member

    async def until(self, standing: str, limit_s: float) -> float:
        """Seconds until it has that standing; nobody is routed to it before it is `in`."""
        began = asyncio.get_running_loop().time()
        while self.member.standing != standing:
            assert self.serves() == (self.member.standing in ("in", "trial"))
            await asyncio.sleep(0.05)
            took = asyncio.get_running_loop().time() - began
            assert took <= limit_s, f"still {self.member} after {limit_s} s"
        return asyncio.get_running_loop().time() - began

    def serve(self, tokens: int) -> None:
        lease = self.member.lease(tokens)
        lease.served = tokens
        lease.succeeded()
        lease.release()


def play(
    act: Callable[[Scene], Awaitable[None]],
    exam: FakeExam | None = None,
    server: Server | None = None,
    **settings: Any,
) -> None:
    async def main() -> None:
        config = PoolConfig.model_validate({"health": {"probe_after_s": None}, "proof": settings})
        played, one = exam or FakeExam(), server or Server(ADDRESS)
        clock = asyncio.get_running_loop().time
        pool = Pool.of("p", [one], config, clock=clock, exams=FakeExams(played, config.proof))
        await pool.start()
        await act(Scene(played, one, pool))
        await pool.close()
        assert len(asyncio.all_tasks()) == 1 and one.connected == 0

    run(main())


def played(
    exam: Callable[[], FakeExam] = FakeExam,
    server: Callable[[], Server] = lambda: Server(ADDRESS),
    **settings: Any,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test whose first parameter is a `Scene`."""
    return lambda act: as_test(act, lambda scene: play(scene, exam(), server(), **settings), 1)
