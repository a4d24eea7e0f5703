"""Which of many flows has the most waiting requests for its weight."""

import heapq
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

__all__ = ["Longest"]


class Queued(Protocol):
    weight: float
    bound: int  # of `Longest`: as many waiting requests as its entry says; 0: it has no entry

    @property
    def waiting(self) -> "OrderedDict[object, int]": ...


F = TypeVar("F", bound=Queued)


class Longest(Generic[F]):
    """A heap with one valid entry a flow, which says at least as many as wait.

    A growing flow gets a new entry each time its length doubles, and the top is made exact when it
    is asked for: O(log flows), spread over the operations, and nothing to do when a flow shrinks.
    """

    def __init__(self) -> None:
        # (minus the length for the weight, order of entry, length, flow)
        self._heap: list[tuple[float, int, int, F]] = []
        self._entries = 0
        self._flows = 0  # that have a valid entry

    def grew(self, flow: F) -> None:
        """A request was added to `flow`."""
        length = len(flow.waiting)
        if length > flow.bound:
            self._flows += not flow.bound
            flow.bound = 1 << (length - 1).bit_length()
            heapq.heappush(self._heap, self._entry(flow))
            if len(self._heap) > 4 * self._flows + 64:  # entries of the past
                self._heap = [entry for entry in self._heap if entry[2] == entry[3].bound]
                heapq.heapify(self._heap)

    def first(self) -> F | None:
        """The longest flow for its weight; None if nothing waits."""
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

    def _entry(self, flow: F) -> tuple[float, int, int, F]:
        self._entries += 1
        return -flow.bound / flow.weight, self._entries, flow.bound, flow
