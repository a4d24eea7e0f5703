"""Load on a gateway by the official client, and what became of each request.

async with Load(url, "python-lm") as load:
    ...  # break things
assert not load.lost
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from openai import APIError, AsyncOpenAI

__all__ = ["Load", "Outcome"]

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self",
    "for index in range(",
)


@dataclass
class Outcome:
    """One request: when it was sent, how much came, and the error that ended it, if one did."""

    sent: float  # time.monotonic()
    streamed: bool
    tokens: int = 0  # events with text; for a whole answer, its completion_tokens
    error: Exception | None = None
    ended: float = 0.0

    @property
    def lost(self) -> bool:
        """Failed though nothing of its answer had arrived: another backend could have answered."""
        return self.error is not None and self.tokens == 0


@dataclass
class Load:
    """`workers` clients, each asking again as soon as it has its answer; two of three streamed."""

    url: str
    model: str
    workers: int = 8
    max_tokens: int = 24
    pause_s: float = 0.0  # before it asks again: while a server starts, which needs the same cores
    outcomes: list[Outcome] = field(default_factory=list)
    _stopping: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _asking: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self._client = AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120
        )
        self._asking.set()
        self._tasks = [asyncio.create_task(self._work(i)) for i in range(self.workers)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Lets the requests under way come to their end."""
        self.stop()
        await asyncio.gather(*self._tasks)
        await self._client.close()

    def stop(self) -> None:
        """No new requests from here on."""
        self._stopping = True
        self._asking.set()

    def hold(self) -> None:
        """No new requests until `go_on`."""
        self._asking.clear()

    def go_on(self) -> None:
        self._asking.set()

    @property
    def under_way(self) -> list[Outcome]:
        return [o for o in self.outcomes if not o.ended]

    async def completed(self, count: int, timeout_s: float = 300.0) -> None:
        """Waits for `count` more whole answers."""
        wanted = len(self.whole) + count
        async with asyncio.timeout(timeout_s):
            while len(self.whole) < wanted:
                await asyncio.sleep(0.05)

    @property
    def whole(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.error is None and o.ended]

    @property
    def lost(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.lost]

    @property
    def broken(self) -> list[Outcome]:
        """Ended in an error event after a part of the answer."""
        return [o for o in self.outcomes if o.error is not None and o.tokens]

    def summary(self) -> str:
        errors = Counter(str(o.error)[:160] for o in self.outcomes if o.error is not None)
        return f"{len(self.whole)} whole, {len(self.broken)} broken, {len(self.lost)} lost {errors}"

    async def _work(self, worker: int) -> None:
        index = worker
        while not self._stopping:
            await self._asking.wait()
            index += 1
            outcome = Outcome(time.monotonic(), streamed=index % 3 != 0)
            self.outcomes.append(outcome)
            try:
                await self._ask(outcome, f"# {index}\n{PROMPTS[index % len(PROMPTS)]}")
            except APIError as error:
                outcome.error = error
                await asyncio.sleep(0.05)
            outcome.ended = time.monotonic()
            await asyncio.sleep(self.pause_s)

    async def _ask(self, outcome: Outcome, prompt: str) -> None:
        ask = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "extra_body": {"ignore_eos": True},
        }
        if not outcome.streamed:
            answer = await self._client.completions.create(**ask)
            assert answer.usage is not None
            reason = answer.choices[0].finish_reason
            assert reason == "length", f"a whole answer ended with {reason}"
            outcome.tokens = answer.usage.completion_tokens
            return
        reason = None
        async with await self._client.completions.create(**ask, stream=True) as stream:
            async for chunk in stream:
                if chunk.choices:
                    outcome.tokens += bool(chunk.choices[0].text)
                    reason = chunk.choices[0].finish_reason or reason
        assert reason == "length", f"a stream of {outcome.tokens} pieces ended with {reason}"
