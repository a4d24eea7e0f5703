"""Decides whether a request may begin: by its key's limits, its pool's token budget, and memory.

`prompt_tokens` estimates how many tokens a prompt has, before any tokenizer has seen it. English
has about four characters per token, other scripts about four bytes of UTF-8 (a Chinese character
has three). Token ids are counted.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from octet.errors import RequestError
from serve.access.keys import Principal
from serve.access.rates import Charge
from serve.admission.memory import Memory
from serve.admission.token_gate import Gate, Overloaded, overloaded
from serve.config import Limits
from serve.routing.pool import Pool

__all__ = ["Admission", "Ticket", "Upload", "prompt_tokens"]

# Default limit of a pool, in KV-cache capacities: a batch that fills the cache, and the next one.
CAPACITIES = 2
LIMIT_EVERY_S = 1.0  # how often the capacity of a pool's KV caches is read


class Admission:
    """Admits the gateway's requests. Pools are known by name, and keep their queue at a reload."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        memory: Memory | None = None,
        processes: int = 1,
    ) -> None:
        """`processes` of this gateway share `limits.max_memory_bytes`."""
        limits = limits or Limits()
        self.gates: dict[str, Gate] = {}
        self.rejections: Counter[tuple[str, str]] = Counter()  # by pool ("" if none yet) and reason
        self.limits = limits
        self.memory = memory or Memory(limits.max_memory_bytes, processes=processes, clock=clock)
        self._processes = processes
        self._clock = clock
        self._chance = chance
        self._read_at: dict[str, float] = {}  # when each pool's limit was last read

    def reload(self, limits: Limits) -> None:
        """Applies new limits; those of pools and keys come with each request.

        Unused gates are removed, because their pool may be gone. If it is not, its gate is made
        anew.
        """
        if limits.max_memory_bytes != self.limits.max_memory_bytes:
            self.memory = Memory(
                limits.max_memory_bytes, processes=self._processes, clock=self._clock
            )
            self.memory.warn()
        self.limits = limits
        for name in [
            name for name, gate in self.gates.items() if not (gate.requests or gate.queue)
        ]:
            del self.gates[name], self._read_at[name]

    def require_memory(self, own: int = 0) -> None:
        """Raises RequestError (503) if memory is short. Also called while a body is read.

        `own` are the bytes of this request's body until now. While nothing else is in flight, a
        request is admitted anyway. Otherwise a heap that never shrinks would refuse requests
        forever.
        """
        if not self.memory.is_short():
            return
        if self.memory.arriving > own or any(gate.requests for gate in self.gates.values()):
            self.rejections["", "memory"] += 1
            busiest = max(self.gates.values(), key=lambda gate: gate.tokens, default=None)
            raise overloaded(
                "the gateway is short of memory",
                1.0 if busiest is None else busiest.retry_after_s(busiest.tokens),
                reason="memory",
            )

    def upload(self) -> "Upload":
        """Returns the count of one request's body, for a `with` block that ends once it is decoded.

        Raises RequestError (503) if memory is short.
        """
        self.require_memory()
        return Upload(self)

    async def admit(
        self,
        pool: Pool,
        principal: Principal,
        *,
        tokens: int,
        deadline: float | None,
        prompt_tokens: int = 0,
    ) -> "Ticket":
        """Returns when the request may begin; without yielding if there is capacity.

        `tokens` are those of the prompt and of the longest answer, `prompt_tokens` the prompt's
        alone, both estimated. `deadline` is a time of `clock`. Raises RequestError: 400 for a
        prompt over the configured limit, 429 for the key's limits, 503 if there is no capacity or
        shared limits cannot be read, 504 at the deadline. A request larger than the whole budget
        runs alone.
        """
        most = self.limits.max_prompt_tokens
        if most is not None and prompt_tokens > most:
            raise RequestError(
                f"the prompt has about {prompt_tokens} tokens; the limit is {most}",
                code="context_length_exceeded",
            )
        self.require_memory()
        tokens = max(tokens, 1)
        try:
            charge = await principal.charge(tokens)
        except RequestError as error:
            self.rejections[pool.name, error.code or ""] += 1
            raise
        ticket = Ticket(self, principal, charge, tokens)
        try:
            await self._enter(ticket, pool, deadline)
        except BaseException as error:
            # A refused request is not charged at all; one whose client went away is.
            if charge is not None:
                charge.refund(keep_request=not isinstance(error, RequestError))
            raise
        return ticket

    async def _enter(self, ticket: "Ticket", pool: Pool, deadline: float | None) -> None:
        gate = self._gate(pool)
        principal = ticket.principal
        flow = gate.queue.flow(principal.name, principal.priority, principal.weight)
        now = self._clock()
        if not gate.try_enter(flow, ticket.tokens):
            config = pool.config.admission
            try:
                await gate.wait(
                    flow,
                    ticket.tokens,
                    max_queue=config.max_queue,
                    max_wait_s=config.max_wait_s,
                    deadline=deadline,
                    starting=lambda: pool.returning,
                )
            except RequestError as error:
                reason = error.reason if isinstance(error, Overloaded) else error.code or ""
                self.rejections[pool.name, reason] += 1
                raise
            since, now = now, self._clock()
            ticket.queued_s += now - since
        ticket.enter(gate, now)

    def _gate(self, pool: Pool) -> Gate:
        gate = self.gates.get(pool.name)
        if gate is None:
            gate = self.gates[pool.name] = Gate(pool.name, self._clock, self._chance)
            self._read_at[pool.name] = -LIMIT_EVERY_S
        now = self._clock()
        if now - self._read_at[pool.name] >= LIMIT_EVERY_S:
            self._read_at[pool.name] = now
            capacity = pool.capacity_tokens
            gate.set_limit(
                pool.config.admission.max_tokens or (capacity and CAPACITIES * capacity) or None
            )
        return gate

    def status(self) -> dict[str, Any]:
        """Returns what is in flight and what is queued, in tokens and requests, by pool."""
        pools = {
            name: {
                "limit_tokens": gate.limit,
                "in_flight_tokens": gate.tokens,
                "in_flight_requests": gate.requests,
                "queued_tokens": gate.queue.tokens,
                "queued_requests": len(gate.queue),
                "rejected": {
                    reason: n for (pool, reason), n in self.rejections.items() if pool == name
                },
            }
            for name, gate in self.gates.items()
        }
        memory = {"used_bytes": self.memory.used, "limit_bytes": self.memory.limit}
        return {"pools": pools, "memory": memory}


class Upload:
    """The bytes of a body that have arrived, until its block ends.

    The sizes that clients declare are not counted: a slow one could keep all others out.
    """

    __slots__ = ("_admission", "_size")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._size = 0

    def __enter__(self) -> Callable[[int], None]:
        """Returns what to call with the size of each piece. It raises RequestError (503)."""
        return self._count

    def __exit__(self, *_: object) -> None:
        self._admission.memory.arrived(-self._size)

    def _count(self, size: int) -> None:
        self._size += size
        self._admission.memory.arrived(size)
        self._admission.require_memory(self._size)


class Ticket:
    """The right of a request to run, until `release`."""

    __slots__ = ("_admission", "_charge", "_gate", "_since", "principal", "queued_s", "tokens")

    def __init__(
        self, admission: Admission, principal: Principal, charge: Charge | None, tokens: int
    ) -> None:
        self._admission = admission
        self._charge = charge
        self._gate: Gate | None = None
        self._since: float | None = None  # None: no backend can serve it yet
        self.principal = principal
        self.tokens = tokens  # that the request counts for
        self.queued_s = 0.0

    def enter(self, gate: Gate, now: float) -> None:
        self._gate = gate
        self._since = now

    async def move_to(self, pool: Pool, *, deadline: float | None) -> None:
        """Moves from its pool's budget to that of another pool: a fallback.

        Raises RequestError as `admit` does; the ticket must be released even then.
        """
        if self._gate is not None and self._gate.pool == pool.name:
            return
        self._leave()
        await self._admission._enter(self, pool, deadline)

    def pause(self) -> None:
        """Records that it waits for a backend to start: no time of that is time to serve it."""
        self._since = None

    def resume(self) -> None:
        """Records that a backend serves it from now on; without effect if it does not wait."""
        if self._since is None:
            self._since = self._admission._clock()

    def settle(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Records the true counts for the key's rates and quota; 0 and 0 if no backend began.

        Without them the estimate stands: a client that goes away mid-answer has used tokens.
        """
        if self._charge is not None:
            self._charge.settle(prompt_tokens + completion_tokens)

    def release(self) -> None:
        """Releases everything that the request holds. Idempotent."""
        self._leave()
        charge, self._charge = self._charge, None
        if charge is not None:
            charge.release()

    def _leave(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            now, since = self._admission._clock(), self._since
            gate.leave(self.tokens, None if since is None else now - since)


BYTES_PER_TOKEN = 4
PER_MESSAGE = 4  # tokens of its role, and of what a chat template puts around it
# An image, a sound or a file: OpenAI's count for an image of 1024 by 1024 (765), rounded up to the
# next power of two. The length of its base64 means nothing.
PER_ATTACHMENT = 1024
SAMPLE = 4096  # characters that are sampled to estimate the bytes of a longer text
_ATTACHMENTS = ("image", "audio", "video", "file")
_PARTS = ("content", "output")  # fields that hold parts: of a message, or of a tool's result


def prompt_tokens(prompts: str | Iterable[Any]) -> int:
    """Estimates the tokens of a text, of token ids, of several of either, or of chat messages.

    Takes microseconds whatever the length: ids are only counted, texts only measured.
    """
    if isinstance(prompts, str):
        return _text(prompts)
    items: Sequence[Any] = prompts if isinstance(prompts, list | tuple) else list(prompts)
    if items and isinstance(items[0], int):
        return len(items)
    total = 0
    for item in items:
        if isinstance(item, str):
            total += _text(item)
        elif isinstance(item, Mapping):
            total += PER_MESSAGE + _message(item)
        else:
            total += len(item)
    return total


def _text(text: str) -> int:
    if text.isascii():
        size = len(text)
    elif len(text) <= SAMPLE:
        size = len(text.encode(errors="replace"))
    else:
        sample = text[:: len(text) // SAMPLE]
        size = len(sample.encode(errors="replace")) * len(text) // len(sample)
    return -(-size // BYTES_PER_TOKEN)


def _message(message: Mapping[str, Any]) -> int:
    """Sums all texts of a message; only the parts of its content may be attachments."""
    total = 0
    for name, value in message.items():
        if name in _PARTS and isinstance(value, list | tuple):
            total += sum(map(_part, value))
        else:
            total += _values(value)
    return total


def _part(part: Any) -> int:
    """Counts an attachment, such as `image_url`, at a fixed size, and measures a text beside it.

    Anthropic's are in `source`. The result of a tool is a part with parts of its own.
    """
    if not isinstance(part, Mapping):
        return _values(part)
    if not _is_attachment(part.get("type", _ATTACHMENTS[0])):
        return _message(part)
    attached = {name for name in part if name == "source" or _is_attachment(name)}
    others = (value for name, value in part.items() if name not in attached)
    return sum(map(_values, others)) + (PER_ATTACHMENT if attached else 0)


def _is_attachment(name: Any) -> bool:
    return isinstance(name, str) and any(kind in name for kind in _ATTACHMENTS)


def _values(found: Any) -> int:
    """Sums the texts anywhere in a JSON value."""
    if isinstance(found, str):
        return _text(found)
    if isinstance(found, Mapping):
        return sum(map(_values, found.values()))
    if isinstance(found, list | tuple):
        return sum(map(_values, found))
    return 0
