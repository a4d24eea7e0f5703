"""Tiers over pools that are really probed: who is measured anew changes place."""

import asyncio
from typing import Any

from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from serve.config import GatewayConfig
from serve.gateway.state import Gateway
from serve.routing import Pool
from tests.serve.in_process import Client
from tests.serve.proof.exams import FakeExam, FakeExams, verdict
from tests.serve.tiered import config
from tests.serve.upstreams import Scripted, whole
from tests.serve.waiting import until

BODY = {"model": "m", "prompt": "abc", "max_tokens": 4}


class Restarted(Scripted):
    """Its server can end each connection, as one that starts anew."""

    def __init__(self) -> None:
        super().__init__(whole())
        self._ended = asyncio.Event()

    async def hold(self, _reopened: Any = None) -> None:
        await self._ended.wait()
        self._ended.clear()

    def restart(self) -> None:
        self._ended.set()


class Measuring(FakeExam):
    """Every answer measures `kl` nats, at most twice that."""

    def __init__(self, kl: float) -> None:
        super().__init__(seconds=0.0)
        self.kl = kl

    async def judge(self, responses: Any, looks: int) -> Verdict:
        assert all(isinstance(response, Response) for response in responses)
        return verdict("as_expected", self.kl)


async def test_a_backend_that_measures_worse_after_a_restart_leaves_the_tier() -> None:
    exams = {"fp8": Measuring(0.008), "bf16": Measuring(0.0001), "fp4": Measuring(0.03)}
    backends = {name: Restarted() for name in exams}
    settings = GatewayConfig.model_validate(config())
    pools = {}
    for name, exam in exams.items():
        quick = settings.pools[name].health.model_copy(update={"reconnect_s": 0.01})
        pool = settings.pools[name].model_copy(update={"health": quick})
        proof = FakeExams(exam, pool.proof)
        pools[name] = Pool.of(name, [backends[name]], pool, exams=proof)
    gateway = Gateway(settings, pools)
    await gateway.start()
    served = Client(gateway)

    async def first_by(precision: str) -> str:
        """The divergence of its first answer; until then the others keep the budget, too."""
        async with asyncio.timeout(60):
            while True:
                headers = {"x-octet-tier": "standard"}
                reply = await served.request("/v1/completions", BODY, headers)
                if reply.status == 200:
                    assert float(reply.headers["x-octet-divergence"]) <= 0.02
                    assert reply.headers["x-octet-artifact"] == "a" * 12
                    if reply.headers["x-octet-precision"] == precision:
                        return reply.headers["x-octet-divergence"]
                await asyncio.sleep(0.005)

    try:
        assert await first_by("fp8") == "0.016"
        exams["fp8"].kl = 0.02
        backends["fp8"].restart()
        assert await first_by("bf16") == "0.0002"
        await until(lambda: gateway.pools["fp8"].proven.kl is not None)
        assert gateway.pools["fp8"].proven.kl == 0.04
        assert await first_by("bf16") == "0.0002"
        exams["fp8"].kl = 0.006
        backends["fp8"].restart()
        assert await first_by("fp8") == "0.012"
        assert backends["fp4"].asked == 0
    finally:
        await gateway.close()
