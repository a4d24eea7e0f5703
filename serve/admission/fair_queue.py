"""Orders waiting requests: by priority, then among keys by weight, then within a key by arrival.

The keys of a priority share by start-time fair queuing (Goyal, Vin and Cheng, "Start-time Fair
Queuing", SIGCOMM 1996, section 2), in tokens. A key's next request starts, in virtual time, at
S = max(v, F), where F = S + tokens / weight is when its last one ended and v the start of the
request that went last; the smallest S goes. While two keys both wait, the tokens they got, each
divided by its weight, differ by at most one longest request of each, divided by its weight
(theorem 1). S does not depend on the request itself, so one that leaves the queue changes nothing
for others.

`Longest` finds the flow with the most waiting requests for its weight.
"""

import heapq
from bisect import insort
from collections import OrderedDict

__all__ = ["FairQueue", "Flow"]


class Flow:
    """The requests of one key at one priority; times are virtual, in tokens / weight."""

    __slots__ = ("bound", "finish", "key", "level", "listed", "start", "waiting", "weight")

    def __init__(self, key: str, level: "_Level") -> None:
        self.key = key
        self.level = level
        self.weight = 1.0
        self.start = 0.0  # of its first waiting request
        self.finish = 0.0  # of the request that went last
        self.waiting: OrderedDict[object, int] = OrderedDict()  # oldest first, with their tokens
        self.listed = False  # in the level's heap; an empty flow may stay there until it is on top
        self.bound = 0  # for `Longest`: waiting requests in its entry; 0: it has none


class Longest:
    """A heap with one valid entry per flow: an upper bound on its number of waiting requests.

    A growing flow gets a new entry each time its length doubles, and the top is made exact when it
    is read. That costs O(log flows), amortized, and nothing when a flow shrinks.
    """

    def __init__(self) -> None:
        # (-length / weight, order of entry, length, flow)
        self._heap: list[tuple[float, int, int, Flow]] = []
        self._entries = 0
        self._flows = 0  # that have a valid entry

    def grew(self, flow: Flow) -> None:
        """Records that a request was added to `flow`."""
        length = len(flow.waiting)
        if length > flow.bound:
            self._flows += not flow.bound
            flow.bound = 1 << (length - 1).bit_length()
            heapq.heappush(self._heap, self._entry(flow))
            if len(self._heap) > 4 * self._flows + 64:  # mostly invalid entries
                self._heap = [entry for entry in self._heap if entry[2] == entry[3].bound]
                heapq.heapify(self._heap)

    def first(self) -> Flow | None:
        """Returns the longest flow for its weight; None if nothing waits."""
        heap = self._heap
        while heap:
            _, _, length, flow = heap[0]
            waiting = len(flow.waiting)
            if length == flow.bound == waiting:
                return flow
            if length == flow.bound and waiting:
                flow.bound = waiting
                heapq.heapreplace(heap, self._entry(flow))
                continue
            heapq.heappop(heap)
            if length == flow.bound:  # empty
                flow.bound = 0
                self._flows -= 1
        return None

    def _entry(self, flow: Flow) -> tuple[float, int, int, Flow]:
        self._entries += 1
        return -flow.bound / flow.weight, self._entries, flow.bound, flow


class _Level:
    """One priority."""

    __slots__ = ("flows", "heap", "longest", "priority", "requests", "tokens", "virtual")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.virtual = 0.0  # v
        self.requests = 0  # waiting
        self.tokens = 0  # of the waiting requests
        self.flows: dict[str, Flow] = {}
        # (start, order of entry, flow); a start may be too early, and is corrected on top.
        self.heap: list[tuple[float, int, Flow]] = []
        self.longest = Longest()

    def earliest(self) -> Flow:
        """Returns the flow whose first request starts first; corrects the top of the heap."""
        heap = self.heap
        while True:
            start, order, flow = heap[0]
            if not flow.waiting:
                heapq.heappop(heap)
                flow.listed = False
            elif start != flow.start:
                heapq.heapreplace(heap, (flow.start, order, flow))
            else:
                return flow


class FairQueue:
    """Waiting requests of any type, each with its tokens. O(log keys) per operation.

    Priorities are few (-100 to 100), and searched in order.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._requests = 0
        self._entries = 0
        self._levels: dict[int, _Level] = {}
        self._order: list[_Level] = []  # highest priority first

    def __len__(self) -> int:
        return self._requests

    def flow(self, key: str, priority: int, weight: float) -> Flow:
        """Returns the flow of `key`, for the methods below."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(priority)
            insort(self._order, level, key=lambda level: -level.priority)
        flow = level.flows.get(key)
        if flow is None:
            flow = level.flows[key] = Flow(key, level)
        flow.weight = weight
        return flow

    def pass_by(self, flow: Flow, tokens: int) -> None:
        """Counts a request that was admitted without waiting towards its key's share."""
        level = flow.level
        level.virtual = start = max(level.virtual, flow.finish)
        flow.finish = start + tokens / flow.weight

    def push(self, flow: Flow, request: object, tokens: int) -> None:
        """Adds a request behind those of its flow."""
        level = flow.level
        if not flow.waiting:
            flow.start = max(level.virtual, flow.finish)
            if not flow.listed:
                self._entries += 1
                heapq.heappush(level.heap, (flow.start, self._entries, flow))
                flow.listed = True
        flow.waiting[request] = tokens
        level.longest.grew(flow)
        self._count(level, 1, tokens)

    def first(self) -> tuple[Flow, object, int] | None:
        """Returns the request that goes next, with its flow and its tokens."""
        for level in self._order:
            if level.requests:
                flow = level.earliest()
                request, tokens = next(iter(flow.waiting.items()))
                return flow, request, tokens
        return None

    def pop(self, flow: Flow) -> None:
        """Removes the request that `first` returned, because it is admitted."""
        _, tokens = flow.waiting.popitem(last=False)
        flow.level.virtual = max(flow.level.virtual, flow.start)
        flow.start = flow.finish = flow.start + tokens / flow.weight
        self._count(flow.level, -1, -tokens)

    def remove(self, flow: Flow, request: object) -> None:
        """Removes a request that will not run; it does not count towards its key's share."""
        self._count(flow.level, -1, -flow.waiting.pop(request))

    def tokens_before(self, priority: int) -> int:
        """Returns the tokens that wait at `priority` and above."""
        return sum(level.tokens for level in self._order if level.priority >= priority)

    def tokens_ahead(self, flow: Flow) -> int:
        """Returns the waiting tokens that go before a new request of `flow`, if nothing else comes.

        These are the tokens of higher priorities, of its own flow, and of each other flow those
        that start before it: as many as its weight gives that flow until then. O(waiting requests).
        """
        level = flow.level
        ahead = sum(other.tokens for other in self._order if other.priority > level.priority)
        mine = sum(flow.waiting.values())
        start = (flow.start if mine else max(level.virtual, flow.finish)) + mine / flow.weight
        for other in level.flows.values():
            if other is not flow and other.waiting and other.start < start:
                share = int((start - other.start) * other.weight)
                ahead += min(share, sum(other.waiting.values()))
        return ahead + mine

    def to_push_out(self, newcomer: Flow) -> tuple[Flow, object] | None:
        """Returns the request whose place `newcomer` may take in a full queue.

        That is the last request of the longest flow: of those of the lowest priority that waits,
        the one with the most requests for its weight (the fattest flow pays, as in RFC 8290,
        section 4.1.2). So a key that floods the queue only pushes out itself. None if that priority
        is above the newcomer's, or if the newcomer's own flow would be the longest.
        """
        level = next(level for level in reversed(self._order) if level.requests)
        if level.priority > newcomer.level.priority:
            return None
        longest = level.longest.first()
        assert longest is not None
        if level is newcomer.level:
            with_it = (len(newcomer.waiting) + 1) / newcomer.weight
            if len(longest.waiting) / longest.weight <= with_it:  # always, if it is the newcomer
                return None
        return longest, next(reversed(longest.waiting))

    def _count(self, level: _Level, requests: int, tokens: int) -> None:
        level.requests += requests
        level.tokens += tokens
        self._requests += requests
        self.tokens += tokens
