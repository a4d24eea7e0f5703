"""The embedded engine as a backend: how it is full, how it ends, and what a slow reader costs."""

import asyncio
import threading
import time
from typing import Any

import pytest

from octet.errors import BackendError, BackendUnavailable
from serve.engine.engine import LEAST_S, MOST_S, Delivery, Engine, Generation, Pace
from serve.engine.request import Delta, Finished
from tests.fakes import FakeRunner, byte_tokenizer, fake_backend, opened
from tests.serve.clock import Clock
from tests.serve.openai_clients import asked
from tests.serve.waiting import until


async def test_a_full_queue_is_overloaded_and_not_dead() -> None:
    runner = FakeRunner()
    async with opened(fake_backend(runner, slots=1, max_waiting=1)) as backend:
        runner.gate.clear()
        streams = [backend.generate(asked(max_tokens=3)) for _ in range(2)]
        tasks = [asyncio.create_task(anext(streams[0]))]
        await until(lambda: not (backend.stats is None or not backend.stats.running))
        tasks.append(asyncio.create_task(anext(streams[1])))
        await asyncio.sleep(0)  # it has been queued
        with pytest.raises(BackendUnavailable, match="1 requests are waiting") as full:
            await anext(backend.generate(asked(max_tokens=3)))
        assert full.value.kind == "overloaded"
        assert (
            full.value.retry_after_s is not None and LEAST_S <= full.value.retry_after_s <= MOST_S
        )
        report = await backend.load()
        assert report is not None and (report.running, report.waiting) == (1, 1)
        assert report.capacity_tokens == 512  # one slot
        runner.gate.set()
        await asyncio.gather(*tasks)
        for stream in streams:
            assert isinstance([event async for event in stream][-1], Finished)
        assert await backend.ready()


def test_when_to_come_back_follows_the_pace_of_the_engine() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.until_half(1000) == LEAST_S  # nothing has been seen
    for _ in range(200):
        clock.now += 0.1
        pace.ended(busy=True)
    assert pace.until_half(100) == pytest.approx(5.0)
    assert pace.until_half(10_000) == MOST_S
    pace.ended(busy=False)
    clock.now += 3600  # nobody asked: that was no slowness
    pace.ended(busy=True)
    assert pace.until_half(100) < 6


async def test_what_a_slow_reader_leaves_lying_is_bounded_by_its_limit() -> None:
    async with opened(fake_backend()) as backend:
        stream = backend.generate(asked(max_tokens=50))
        await anext(stream)  # and reads no more
        await until(lambda: not (backend.stats is not None and backend.stats.running))
        (waiting,) = backend._streams.values()
        assert waiting.qsize() <= 50  # 49 more tokens, and the end
        events = [event async for event in stream]
        assert len(events) == 50 and isinstance(events[-1], Finished)
        assert not backend._streams


@pytest.mark.parametrize("drain_s", [0.0, 60.0])
def test_closing_drops_no_request_that_is_between_two_queues(drain_s: float) -> None:
    """A prompt that has just been read is in no queue for a moment: drained, it must still end."""
    ended: list[Any] = []
    done = threading.Event()

    def deliver(deliveries: list[Delivery]) -> None:
        for _, outcome in deliveries:
            if isinstance(outcome, BackendError) or isinstance(outcome[-1], Finished):
                ended.append(outcome)
                done.set()

    closing: list[threading.Thread] = []

    class Reading(list[Generation]):
        """The queue of those that decode: closes the engine at the moment between."""

        def append(self, generation: Generation) -> None:
            if not closing:
                closing.append(threading.Thread(target=engine.close, args=(drain_s,)))
                closing[0].start()
                while not (engine._draining if drain_s else engine._stopping):
                    time.sleep(0.001)
                if drain_s:
                    done.wait(0.05)  # long enough for a close that looks at the queues
            super().append(generation)

    runner = FakeRunner(delay_s=0.001)
    engine = Engine(runner, deliver)
    engine._decoding = Reading()
    engine.start()
    request = asked(max_tokens=20)
    engine.submit(
        Generation(request, [97], context=512, tokenizer=byte_tokenizer(), eos_token_ids=(256,))
    )
    assert done.wait(60)
    closing[0].join(60)
    (outcome,) = ended
    if drain_s:
        assert isinstance(outcome, list) and isinstance(outcome[-1], Finished)
    else:
        assert isinstance(outcome, BackendError) and outcome.kind == "lost"


async def test_a_failure_before_the_first_token_may_go_elsewhere_and_later_not() -> None:
    runner = FakeRunner(delay_s=0.005, poison=frozenset({ord("!")}))
    async with opened(fake_backend(runner)) as backend:
        with pytest.raises(BackendUnavailable) as failed:
            _ = [event async for event in backend.generate(asked(prompt="a!"))]
        assert failed.value.kind == "failed"
        stream = backend.generate(asked(max_tokens=400))
        assert isinstance(await anext(stream), Delta)
        await backend.close()
        with pytest.raises(BackendError) as lost:
            _ = [event async for event in stream]
        assert type(lost.value) is BackendError and lost.value.kind == "lost"
