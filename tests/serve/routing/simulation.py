"""A discrete-event simulation of servers that batch: policies against each other, no sleeping.

A server runs what fits into its KV cache, each request for tokens / SPEED seconds, and queues the
others; it remembers the prefixes that it saw last, and takes a tenth of the time for the prompts of
those. Other traffic than ours may reach it too.
"""

import heapq
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from serve.backends.base import LoadReport
from serve.config import PoolConfig
from serve.members.member import Lease
from serve.routing import Member, Pool
from serve.routing.policies import Ask
from tests.serve.clock import Clock
from tests.serve.routing.stand_ins import servers

SPEED = 100.0  # tokens a second of each running request
REPORT_EVERY_S = 1.0


@dataclass
class Request:
    arrival_s: float
    prompt: int  # tokens
    answer: int  # tokens
    prefix: bytes = b""
    to: int | None = None  # a server that it reaches without us
    longest: int = 0  # answer that the client allows; what is known beforehand


@dataclass
class Host:
    kv_tokens: int
    remembers: int  # prefixes
    running: int = 0
    tokens: int = 0  # of those that run
    queue: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def start_what_fits(self) -> None:
        while self.queue and self.tokens + self.queue[0][0] <= self.kv_tokens:
            tokens, begin = self.queue.popleft()
            self.running += 1
            self.tokens += tokens
            begin()

    def hit(self, prefix: bytes) -> bool:
        if not prefix:
            return False
        known = prefix in self.seen
        self.seen[prefix] = None
        self.seen.move_to_end(prefix)
        if len(self.seen) > self.remembers:
            self.seen.popitem(last=False)
        return known


@dataclass
class Outcome:
    waits_s: list[float]  # before a request runs
    slowdowns: list[float]  # latency over what it would be alone
    hits: int  # of the prefix cache
    requests: int
    most_of_mean: (
        float  # the greatest load that one had when it was chosen, in means, if it had four
    )
    pool: Pool

    def wait_s(self, part: float) -> float:
        return sorted(self.waits_s)[int(part * len(self.waits_s))]


def simulate(
    policy: str,
    requests: Iterable[Request],
    *,
    hosts: int = 8,
    kv_tokens: int = 10_000,
    remembers: int = 40,
    seed: int = 1,
    **routing: Any,
) -> Outcome:
    clock = Clock(0.0)
    config = PoolConfig.model_validate({"routing": {"policy": policy} | routing})
    pool = Pool.of("p", servers(hosts), config, clock=clock, rng=random.Random(seed))
    machines = [Host(kv_tokens, remembers) for _ in range(hosts)]
    of = dict(zip(pool.members, machines, strict=True))
    outcome = Outcome([], [], 0, 0, 0.0, pool)
    events: list[tuple[float, int, Callable[[], None]]] = []
    order = itertools.count()

    def at(seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(events, (seconds, next(order), happens))

    def arrive(request: Request) -> None:
        lease: Lease | None = None
        if request.to is None:
            member = pool.choose(Ask(request.prompt + request.longest, prefix=request.prefix))
            assert isinstance(member, Member)
            mean = sum(m.outstanding_tokens for m in pool.members) / hosts
            if member.in_flight >= 4:
                share = member.outstanding_tokens / mean
                outcome.most_of_mean = max(outcome.most_of_mean, share)
            lease = member.lease(request.prompt + request.longest)
            host = of[member]
        else:
            host = machines[request.to]

        def begin() -> None:
            hit = host.hit(request.prefix)
            alone_s = (request.prompt + request.answer) / SPEED
            takes_s = (request.prompt * (0.1 if hit else 1) + request.answer) / SPEED
            if lease is not None:
                outcome.requests += 1
                outcome.hits += hit
                outcome.waits_s.append(clock.now - request.arrival_s)
                outcome.slowdowns.append((clock.now - request.arrival_s + takes_s) / alone_s)
            at(clock.now + takes_s, end)

        def end() -> None:
            host.running -= 1
            host.tokens -= request.prompt + request.answer
            if lease is not None:
                lease.succeeded()
                lease.release()
            host.start_what_fits()

        host.queue.append((request.prompt + request.answer, begin))
        host.start_what_fits()

    def report() -> None:
        for member, host in of.items():
            usage = host.tokens / host.kv_tokens
            said = LoadReport(host.running, len(host.queue), usage, host.kv_tokens)
            member.reported(said, member.outstanding_tokens, member.in_flight)
        if events:
            at(clock.now + REPORT_EVERY_S, report)

    for request in requests:
        at(request.arrival_s, partial(arrive, request))
    at(0.0, report)
    while events:
        clock.now, _, happens = heapq.heappop(events)
        happens()
    return outcome


def uneven(count: int, rate: float, *, seed: int = 5, others: int = 0) -> list[Request]:
    """Poisson arrivals of heavy-tailed requests; every `others`-th goes to the first server."""
    rng = random.Random(seed)
    now, requests = 0.0, []
    for number in range(count):
        now += rng.expovariate(rate)
        answer = min(int(rng.lognormvariate(math.log(150), 1.2)) + 1, 4000)
        longest = min(4000, int(answer * rng.uniform(1, 3)))  # what clients ask for is a bound
        to = 0 if others and number % others == 0 else None
        requests.append(Request(now, rng.randint(20, 400), answer, b"", to, longest))
    return requests


def conversations(count: int, rate: float, *, prefixes: int, seed: int = 5) -> list[Request]:
    """Long prompts that share their beginnings, some beginnings far more often than others."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(prefixes)]
    drawn = rng.choices(range(prefixes), weights, k=count)
    now, requests = 0.0, []
    for prefix in drawn:
        now += rng.expovariate(rate)
        answer = rng.randint(20, 100)
        requests.append(Request(now, 500, answer, b"%d" % prefix, None, 100))
    return requests
