"""Priorities first, shares by weight within the bound of the theorem, first come within a key."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.admission.fair_queue import FairQueue, Flow

Request = tuple[str, int]  # its key, and its number
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 5.0])


class Reference:
    """The definition, word for word, over plain lists."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, str], list[tuple[object, int]]] = defaultdict(list)
        self.start: dict[tuple[int, str], float] = {}
        self.finish: dict[tuple[int, str], float] = defaultdict(float)
        self.virtual: dict[int, float] = defaultdict(float)

    def push(self, flow: tuple[int, str], request: object, tokens: int) -> None:
        if not self.waiting[flow]:
            self.start[flow] = max(self.virtual[flow[0]], self.finish[flow])
        self.waiting[flow].append((request, tokens))

    def pop(self, flow: tuple[int, str], weight: float) -> object:
        request, tokens = self.waiting[flow].pop(0)
        self.virtual[flow[0]] = max(self.virtual[flow[0]], self.start[flow])
        self.start[flow] = self.finish[flow] = self.start[flow] + tokens / weight
        return request

    def may_be_next(self, flow: tuple[int, str]) -> bool:
        waiting = [other for other, requests in self.waiting.items() if requests]
        highest = max(priority for priority, _ in waiting)
        earliest = min(self.start[other] for other in waiting if other[0] == highest)
        return flow[0] == highest and self.start[flow] == earliest


operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"), st.sampled_from("abcd"), st.sampled_from([0, 0, 5]), st.integers(1, 50)
        ),
        st.tuples(
            st.just("pass"), st.sampled_from("abcd"), st.sampled_from([0, 5]), st.integers(1, 50)
        ),
        st.tuples(st.just("pop"), st.just(""), st.just(0), st.just(0)),
        st.tuples(st.just("remove"), st.just(""), st.just(0), st.integers(0, 100)),
    ),
    max_size=80,
)


@settings(max_examples=300)
@given(operations, st.tuples(WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS))
def test_the_queue_does_what_the_definition_says(
    operations: list[tuple[str, str, int, int]], chosen: tuple[float, ...]
) -> None:
    weights = dict(zip("abcd", chosen, strict=True))
    queue, reference = FairQueue(), Reference()
    inside: list[tuple[Flow, object, int]] = []
    for number, (operation, key, priority, amount) in enumerate(operations):
        if operation == "push":
            flow = queue.flow(key, priority, weights[key])
            queue.push(flow, number, amount)
            reference.push((priority, key), number, amount)
            inside.append((flow, number, amount))
        elif operation == "pass":
            queue.pass_by(queue.flow(key, priority, weights[key]), amount)
            where = priority, key
            reference.virtual[priority] = max(reference.virtual[priority], reference.finish[where])
            reference.finish[where] = reference.virtual[priority] + amount / weights[key]
            if reference.waiting[where]:
                return  # never: a request passes by only where nobody waits
        elif operation == "pop" and inside:
            found = queue.first()
            assert found is not None
            flow, request, tokens = found
            where = flow.level.priority, flow.key
            assert reference.may_be_next(where)
            assert reference.pop(where, weights[flow.key]) == request  # FIFO in its key
            queue.pop(flow)
            inside.remove((flow, request, tokens))
        elif operation == "remove" and inside:
            flow, request, tokens = inside.pop(amount % len(inside))
            queue.remove(flow, request)
            reference.waiting[flow.level.priority, flow.key].remove((request, tokens))
        assert len(queue) == len(inside)
        assert queue.tokens == sum(tokens for *_, tokens in inside)
        assert queue.tokens_before(5) == sum(t for f, _, t in inside if f.level.priority == 5)
        assert (queue.first() is None) == (not inside)


@given(
    st.lists(
        st.tuples(WEIGHTS, st.lists(st.integers(1, 200), min_size=30, max_size=30)),
        min_size=2,
        max_size=6,
    )
)
def test_shares_follow_weights_within_the_theorems_bound(
    keys: list[tuple[float, list[int]]],
) -> None:
    queue, flows = FairQueue(), []
    for number, (weight, sizes) in enumerate(keys):
        flow = queue.flow(str(number), 0, weight)
        flows.append(flow)
        for i, tokens in enumerate(sizes):
            queue.push(flow, (number, i), tokens)
    got = [0.0] * len(keys)
    while all(flow.waiting for flow in flows):
        found = queue.first()
        assert found is not None
        flow, _, tokens = found
        queue.pop(flow)
        got[flows.index(flow)] += tokens / flow.weight
        for i, (weight, sizes) in enumerate(keys):
            for j, (other, others) in enumerate(keys):
                assert got[i] - got[j] <= max(sizes) / weight + max(others) / other + 1e-6


@given(st.integers(1, 20), st.integers(1, 100), WEIGHTS)
def test_a_newcomer_waits_for_at_most_one_request_of_each_other_key(
    others: int, backlog: int, weight: float
) -> None:
    queue = FairQueue()
    for number in range(others):
        for i in range(backlog):
            queue.push(queue.flow(f"flood {number}", 0, 5.0), i, 1 + (7 * i + number) % 50)
    for _ in range(others * backlog // 2):
        found = queue.first()
        assert found is not None
        queue.pop(found[0])
    newcomer = queue.flow("quiet", 0, weight)
    queue.push(newcomer, "mine", 10_000)  # the size of a request does not delay itself
    before = 0
    while (found := queue.first()) is not None and found[0] is not newcomer:
        queue.pop(found[0])
        before += 1
    assert found is not None and before <= others


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from([0, 0, 5]), st.integers(1, 50)),
        max_size=40,
    ),
    st.tuples(WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS),
    st.integers(0, 10),
)
def test_what_goes_before_a_newcomer_is_known(
    waiting: list[tuple[str, int, int]], chosen: tuple[float, ...], gone: int
) -> None:
    queue, weights = FairQueue(), dict(zip("abcd", chosen, strict=True))
    for number, (key, priority, tokens) in enumerate(waiting):
        queue.push(queue.flow(key, priority, weights[key]), number, tokens)
    for _ in range(min(gone, len(waiting))):
        first = queue.first()
        assert first is not None
        queue.pop(first[0])
    newcomer = queue.flow("a", 0, weights["a"])
    ahead = queue.tokens_ahead(newcomer)
    queue.push(newcomer, "new", 1)
    went = 0
    while (first := queue.first()) is not None and first[1] != "new":
        went += first[2]
        queue.pop(first[0])
    # Of each other flow, the request that has begun by then goes whole.
    assert ahead <= went <= ahead + 3 * 51


def test_one_that_leaves_costs_its_key_nothing() -> None:
    queue = FairQueue()
    a, b = queue.flow("a", 0, 1.0), queue.flow("b", 0, 1.0)
    queue.push(a, "large", 1_000_000)
    queue.remove(a, "large")
    queue.push(b, "b", 10)
    queue.push(a, "a", 10)
    found = queue.first()
    assert found is not None and found[1] == "a"  # which was listed first, and has had nothing


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=150),
    st.tuples(*[WEIGHTS] * 6),
)
def test_the_fattest_key_of_the_lowest_priority_makes_room(
    operations: list[tuple[str, bool]], chosen: tuple[float, ...]
) -> None:
    weights = dict(zip("abcdef", chosen, strict=True))
    priority = dict(zip("abcdef", (0, 0, 0, 0, 1, 2), strict=True))
    queue = FairQueue()
    for number, (key, comes) in enumerate(operations):
        flow = queue.flow(key, priority[key], weights[key])
        if comes:
            queue.push(flow, number, 5)
        elif flow.waiting:
            queue.remove(flow, next(iter(flow.waiting)))
        if number % 3 or not len(queue):
            continue
        waiting = {k: queue.flow(k, priority[k], weights[k]).waiting for k in weights}
        lowest = min(priority[k] for k, requests in waiting.items() if requests)
        longest = max(
            len(requests) / weights[k] for k, requests in waiting.items() if priority[k] == lowest
        )
        found = queue.to_push_out(queue.flow("new", 1, 1.0))
        if lowest > 1 or (lowest == 1 and longest <= 1):
            assert found is None
            continue
        assert found is not None
        assert len(found[0].waiting) / found[0].weight == longest
        assert found[0].level.priority == lowest
        assert found[1] == list(found[0].waiting)[-1]


def test_what_is_kept_of_the_past_is_bounded() -> None:
    queue = FairQueue()
    flows = [queue.flow(str(i), 0, 1.0) for i in range(5)]
    for turn in range(2000):
        flow = flows[turn * 7 % 5]
        for i in range(turn % 33):
            queue.push(flow, (turn, i), 1)
        if len(queue):
            queue.to_push_out(flow)
        while flow.waiting:
            queue.remove(flow, next(iter(flow.waiting)))
    level = flows[0].level
    assert len(level.heap) <= 5 and len(level.longest._heap) <= 4 * 5 + 65
