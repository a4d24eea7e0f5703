"""Who goes next: priorities first, inside one the keys by weight, inside a key by arrival.

The keys of a priority share by start-time fair queuing (Goyal, Vin and Cheng, "Start-time Fair
Queuing", SIGCOMM 1996, section 2), in tokens. A key's next request starts, in virtual time, at
S = max(v, F), where F = S + tokens / weight is when its last one ended and v the start of the
request that went last; the smallest S goes. While two keys both wait, what they got, each divided
by its weight, differs by at most one longest request of each, divided by its weight (theorem 1).
S does not depend on the request itself, so one that leaves the queue changes nothing for others.
"""

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

__all__ = ["FairQueue", "Flow"]


class Flow:
    """The requests of one key at one priority. `start` and `finish` are virtual times, in tokens
    per weight."""

    __slots__ = ("finish", "key", "level", "listed", "start", "tokens", "waiting", "weight")

    def __init__(self, key: str, level: "_Level") -> None:
        self.key = key
        self.level = level
        self.weight = 1.0
        self.start = 0.0  # of its first waiting request
        self.finish = 0.0  # of the request that went last
        self.tokens = 0  # waiting
        self.waiting: OrderedDict[object, int] = OrderedDict()  # oldest first, with their tokens
        self.listed = False  # in the level's heap; an empty flow may stay there until it is met


class _Level:
    """One priority."""

    __slots__ = ("flows", "heap", "priority", "tokens", "virtual")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.virtual = 0.0
        self.tokens = 0
        self.flows: dict[str, Flow] = {}
        # (start, order of entry, flow); a start may be too early, and is put right when met.
        self.heap: list[tuple[float, int, Flow]] = []


class FairQueue:
    """Waiting requests of any type, each with its tokens. O(log keys) an operation.

    Priorities are few (-100 to 100), and looked through in order.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._count = 0
        self._entries = 0
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # minus the priorities, ascending

    def __len__(self) -> int:
        return self._count

    def flow(self, key: str, priority: int, weight: float) -> Flow:
        """The flow of `key`, for the methods below."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(priority)
            insort(self._order, -priority)
        flow = level.flows.get(key)
        if flow is None:
            flow = level.flows[key] = Flow(key, level)
        flow.weight = weight
        return flow

    def pass_by(self, flow: Flow, tokens: int) -> None:
        """A request went without waiting: it counts in its key's share like any other."""
        level = flow.level
        level.virtual = start = max(level.virtual, flow.finish)
        flow.finish = start + tokens / flow.weight

    def push(self, flow: Flow, request: object, tokens: int) -> None:
        level = flow.level
        if not flow.waiting:
            flow.start = max(level.virtual, flow.finish)
            if not flow.listed:
                self._list(flow)
        flow.waiting[request] = tokens
        self._count += 1
        self._add_tokens(flow, tokens)

    def first(self) -> tuple[Flow, object, int] | None:
        """The request that goes next, with its flow and its tokens."""
        for priority in self._order:
            level = self._levels[-priority]
            if level.tokens and (flow := _earliest(level)) is not None:
                request, tokens = next(iter(flow.waiting.items()))
                return flow, request, tokens
        return None

    def pop(self, flow: Flow) -> None:
        """Takes out the request that `first` gave: it goes."""
        _, tokens = flow.waiting.popitem(last=False)
        self._count -= 1
        self._add_tokens(flow, -tokens)
        flow.level.virtual = max(flow.level.virtual, flow.start)
        flow.start = flow.finish = flow.start + tokens / flow.weight

    def remove(self, flow: Flow, request: object) -> None:
        """Takes out a request that will not go; its key's share is as if it had never come."""
        tokens = flow.waiting.pop(request)
        self._count -= 1
        self._add_tokens(flow, -tokens)

    def tokens_before(self, priority: int) -> int:
        """Tokens of what waits at `priority` and above."""
        return sum(
            self._levels[-negative].tokens for negative in self._order if -negative >= priority
        )

    def to_push_out(self, newcomer: Flow) -> tuple[Flow, object] | None:
        """Whose place `newcomer` may take in a full queue: the last request of the longest flow.

        That is one of the lowest priority that waits, with the most requests for its weight
        (longest queue drop, as in RFC 8290, section 4.1.2): a key that floods the queue only pushes
        out itself. None if the newcomer's own flow would be the longest.
        """
        for priority in reversed(self._order):
            level = self._levels[-priority]
            if not level.tokens:
                continue
            if level.priority > newcomer.level.priority:
                return None
            longest = max(_backlogged(level), key=lambda flow: len(flow.waiting) / flow.weight)
            if level is newcomer.level:
                mine = (len(newcomer.waiting) + 1) / newcomer.weight
                if longest is newcomer or len(longest.waiting) / longest.weight <= mine:
                    return None
            return longest, next(reversed(longest.waiting))
        return None

    def _list(self, flow: Flow) -> None:
        self._entries += 1
        heapq.heappush(flow.level.heap, (flow.start, self._entries, flow))
        flow.listed = True

    def _add_tokens(self, flow: Flow, tokens: int) -> None:
        flow.tokens += tokens
        flow.level.tokens += tokens
        self.tokens += tokens


def _backlogged(level: _Level) -> Iterator[Flow]:
    return (flow for _, _, flow in level.heap if flow.waiting)


def _earliest(level: _Level) -> Flow | None:
    """The flow whose first request starts first, with the top of the heap put right."""
    heap = level.heap
    while heap:
        start, order, flow = heap[0]
        if not flow.waiting:
            heapq.heappop(heap)
            flow.listed = False
        elif start != flow.start:
            heapq.heapreplace(heap, (flow.start, order, flow))
        else:
            return flow
    return None
