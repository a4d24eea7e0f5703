"""Admission as clients meet it: through the whole gateway, before a backend that is held back."""

import asyncio
import hashlib
from typing import Any

from tests.serve.in_process import Client, Reply, in_process
from tests.serve.upstreams import Scripted, whole
from tests.serve.waiting import until

BODY = {"model": "fake", "prompt": "abc", "max_tokens": 9}  # ten tokens, as estimated


class Held(Scripted):
    """Answers one request each time it is let."""

    def __init__(self) -> None:
        super().__init__(whole())
        self.turns = asyncio.Semaphore(0)
        self.order: list[bytes] = []

    async def relay(self, path: str, body: bytes, headers: Any) -> Any:
        self.order.append(body)
        await self.turns.acquire()
        return await super().relay(path, body, headers)


def budget(**admission: Any) -> dict[str, Any]:
    return {"fake": {"health": {"probe_after_s": None}, "admission": admission}}


async def settled(served: Client, *, queued: int) -> None:
    """Waits until so many are in the queue."""
    await until(lambda: served.metric("octet_queue_requests", pool="fake") == queued)


async def test_what_does_not_fit_waits_and_what_does_not_fit_there_is_told_when() -> None:
    backend = Held()
    async with in_process(("fake", [backend]), pools=budget(max_tokens=25, max_queue=3)) as served:
        asking = [asyncio.create_task(served.request("/v1/completions", BODY)) for _ in range(9)]
        refused: list[Reply] = []
        while len(refused) < 4:
            await asyncio.sleep(0)
            refused = [task.result() for task in asking if task.done()]
        for reply in refused:
            error = reply.json()["error"]
            assert (reply.status, error["code"]) == (503, "overloaded")
            assert int(reply.headers["retry-after"]) >= 1
        await settled(served, queued=3)
        assert served.metric("octet_queue_tokens", pool="fake") == 30
        assert served.metric("octet_admitted_tokens", pool="fake") == 20
        assert served.metric("octet_admission_limit_tokens", pool="fake") == 25
        assert len(backend.order) == 2
        rejected = {"pool": "fake", "reason": "queue_full"}
        assert served.metric("octet_admission_rejections_total", **rejected) == 4
        for _ in range(5):
            backend.turns.release()
        replies = await asyncio.gather(*asking)
        assert sorted(reply.status for reply in replies) == [200] * 5 + [503] * 4


async def test_a_client_that_leaves_the_queue_is_never_seen_by_a_backend() -> None:
    backend = Held()
    async with in_process(("fake", [backend]), pools=budget(max_tokens=10)) as served:
        first = asyncio.create_task(served.request("/v1/completions", BODY))
        gone = asyncio.Event()
        leaves = asyncio.create_task(served.request("/v1/completions", BODY, gone=gone))
        await settled(served, queued=1)
        gone.set()
        await leaves
        assert served.metric("octet_queue_requests", pool="fake") == 0
        backend.turns.release()
        assert (await first).status == 200 and len(backend.order) == 1


async def test_keys_share_by_weight_and_priorities_go_first() -> None:
    backend = Held()
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} | more
        for name, more in (
            ("heavy", {"weight": 3}),
            ("light", {"weight": 1}),
            ("urgent", {"priority": 10}),
        )
    ]
    access, pools = {"keys": keys}, budget(max_tokens=10)
    async with in_process(("fake", [backend]), access=access, pools=pools) as served:

        def ask(name: str) -> asyncio.Task[Reply]:
            headers = {"authorization": f"Bearer {name}"}
            # The user's name is in the body, which the backend sees.
            asking = served.request("/v1/completions", BODY | {"user": name}, headers)
            return asyncio.create_task(asking)

        tasks = [ask("light")]
        await until(lambda: backend.order)
        tasks += [ask(name) for name in ("light", "heavy") for _ in range(12)]
        await settled(served, queued=24)
        tasks += [ask("urgent"), ask("urgent")]
        await settled(served, queued=26)
        for _ in tasks:
            backend.turns.release()
        assert {reply.status for reply in await asyncio.gather(*tasks)} == {200}
    names = [body.rpartition(b'"user": "')[2].partition(b'"')[0].decode() for body in backend.order]
    assert names[:3] == ["light", "urgent", "urgent"]
    assert 11 <= names[3:19].count("heavy") <= 13  # of 16
