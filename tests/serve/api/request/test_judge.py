"""Copies that a judge compares: what they find, what they cost, and that no client feels them."""

import asyncio
import hashlib
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from octet.errors import BackendError, RequestError
from serve.backends.base import LoadReport
from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import HttpConfig
from serve.gateway.status import status as status_of
from serve.routing.judgement import Judgement
from tests.fake_servers import FakeOpenAI, running
from tests.fakes import VOCABULARY, FakeRunner, fake_backend
from tests.serve.in_process import Client
from tests.serve.judging import BODY, ask, divergence, drawing, judged
from tests.serve.upstreams import Scripted, whole
from tests.serve.waiting import until


def entry(served: Client, pool: str = "main") -> Any:
    return status_of(served.gateway)["pools"][pool]["judged"]


async def test_a_pool_like_its_reference_is_within_the_limit() -> None:
    async with judged(drawing(), drawing()) as served:
        await ask(served, 70)
        found = entry(served)
    assert (found["ruling"], found["tokens"]) == ("within", 8 * found["answers"])
    assert found["copies"] == {"judged": 70}
    assert found["kl"] == pytest.approx(0.0, abs=1e-6)
    assert found["kl_interval"][0] == 0.0 and found["kl_interval"][1] <= 0.1
    assert found["agreement"] == 1.0
    assert served.metric("octet_judged_ruling", pool="main") == 1
    assert (
        served.metric("octet_judged_copies_total", pool="main", outcome="judged")
        == found["answers"]
    )


async def test_the_estimate_is_the_divergence_of_the_pool_from_the_reference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Clients ask greedily; the copies are drawn at temperature 1 all the same."""
    async with judged(drawing(1.5), drawing()) as served:
        await ask(served, 150)
        found = entry(served)
    assert found["kl"] == pytest.approx(divergence(1.5), rel=0.25)
    low, high = found["kl_interval"]
    assert low < divergence(1.5) < high
    assert found["ruling"] == "exceeds"
    assert served.metric("octet_judged_ruling", pool="main") == -1
    assert "pool main is judged: exceeds (undecided before)" in caplog.text


async def test_pools_with_other_likeliest_tokens_agree_less() -> None:
    async with judged(drawing(-2.0), drawing()) as served:
        await ask(served, 3)
        assert entry(served)["agreement"] == 0.0


async def test_a_model_of_nan_is_felt_by_no_client() -> None:
    """The embedded engine fails at NaN; a server that sends null is as far as can be."""
    flat = np.zeros(VOCABULARY, np.float32)
    wrong = fake_backend(FakeRunner(model=lambda seen: flat * np.nan))
    async with judged(drawing(), drawing(), canary=wrong) as served:
        await ask(served, 2)
        assert entry(served, "next")["copies"] == {"failed": 2}


async def test_a_token_that_the_reference_never_draws_counts_in_full() -> None:
    """Skipping such answers would hide the worst ones."""
    never = np.zeros(VOCABULARY, np.float32)
    never[97:107] = -np.inf
    reference = fake_backend(FakeRunner(model=lambda seen: never))
    async with judged(drawing(), reference) as served:
        await ask(served, 40)
        found = entry(served)
    assert found["copies"]["judged"] == found["answers"] and found["answers"] >= 15
    assert (found["ruling"], found["kl"]) == ("exceeds", None)


async def test_a_copy_from_before_a_reload_rolls_nothing_back() -> None:
    """The pool may have other backends now, of another checkpoint."""
    async with judged(drawing(4.0), drawing()) as served:
        pool = served.gateway.pools["main"]
        old = pool.judgement
        assert old is not None
        with patch.object(served.gateway.rollouts, "exceeded") as exceeded:
            assert (await served.request("/v1/completions", BODY)).status == 200
            old.add = lambda *_: setattr(old, "ruling", "exceeds") or True  # type: ignore
            pool.judgement = Judgement(old.config)
            await until(lambda: not served.gateway.background)
        assert old.ruling == "exceeds" and not exceeded.called


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "é?"}], "max_tokens": 2}


def templated() -> FakeOpenAI:
    server = FakeOpenAI()
    server.engine = fake_backend(server.runner, template=TEMPLATE)
    return server


async def test_vllm_is_judged_over_its_protocol() -> None:
    """Its tokens of a text and of a conversation, and an echo with log-probabilities."""
    async with running(templated()) as server, judged(over(server), over(server)) as served:
        for path, sent in (("/v1/chat/completions", CHAT), ("/v1/completions", BODY)):
            for _ in range(2):
                assert (await served.post(path, sent))[0] == 200
                await until(lambda: not served.gateway.background)
        found = entry(served)
        assert found["copies"] == {"judged": 4}, found
        assert found["kl"] == pytest.approx(0.0, abs=1e-5)


def over(server: FakeOpenAI) -> OpenAiHttpBackend:
    return OpenAiHttpBackend("m", HttpConfig(type="vllm", url=server.url, model="fake"))


async def test_a_key_that_is_private_is_never_copied() -> None:
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "private": private}
        for name, private in (("open", False), ("closed", True))
    ]
    async with judged(drawing(), drawing(), access={"keys": keys}) as served:
        for name in ("open", "closed"):
            headers = {"authorization": f"Bearer {name}"}
            assert (await served.request("/v1/completions", BODY, headers)).status == 200
            await until(lambda: not served.gateway.background)
        assert entry(served)["copies"] == {"judged": 1}


async def test_no_request_waits_for_a_judge_that_does_not_answer() -> None:
    stuck = FakeRunner()
    stuck.hold(0)
    reference = fake_backend(stuck)
    async with judged(drawing(), reference, judge={"max_in_flight": 2}) as served:
        async with asyncio.timeout(60):
            for _ in range(5):
                assert (await served.post("/v1/completions", BODY))[0] == 200
                await asyncio.sleep(0.05)
        assert entry(served)["in_flight"] == 2
        assert entry(served)["copies"] == {"limit": 3}
        served.gateway.drain(1.0)
        await until(lambda: not served.gateway.background)
        stuck.gate.set()
        assert entry(served)["copies"] == {"limit": 3, "cancelled": 2}


async def test_tokens_per_minute_bound_what_copies_cost() -> None:
    """A copy of three characters takes about 2 (1 + 8) tokens."""
    async with judged(drawing(), drawing(), judge={"tokens_per_minute": 50}) as served:
        await ask(served, 4)
        assert entry(served)["copies"] == {"judged": 2, "limit": 2}


TOO_LONG: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "for the reference": ({"context": 10}, {}),
    "for the judge": ({}, {"prompt": "a" * 12_000, "max_tokens": 1}),
}


@pytest.mark.parametrize("case", TOO_LONG)
async def test_a_copy_that_is_too_long_is_skipped(case: str) -> None:
    options, body = TOO_LONG[case]
    main = fake_backend(FakeRunner(context=16_000))
    async with judged(main, drawing(**options)) as served:
        await ask(served, 1, body)
        found = entry(served)
        assert (found["copies"], found["problem"]) == ({"too_long": 1}, None)


async def test_an_unproven_reference_judges_nothing() -> None:
    async with judged(drawing(), drawing()) as served:
        (member,) = served.gateway.pools["ref"].members
        member.proof = None
        await ask(served, 1)
        assert entry(served)["copies"] == {"unproven": 1}


async def test_a_busy_reference_is_left_alone() -> None:
    async with judged(drawing(), drawing()) as served:
        (member,) = served.gateway.pools["ref"].members
        member.report = LoadReport(running=4, waiting=1, kv_usage=None, capacity_tokens=None)
        await ask(served, 1)
        assert entry(served)["copies"] == {"busy": 1}


async def test_a_reference_with_another_tokenizer_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = drawing()

    async def start() -> None:
        await type(other).start(other)
        assert other.tokenizer is not None
        other.tokenizer.encode = lambda text, **_: [1, 2, 3]  # type: ignore[method-assign]

    other.start = start  # type: ignore[method-assign]
    async with judged(drawing(), other) as served:
        for prompt in ("abc", [97, 98]):
            await ask(served, 1, {"prompt": prompt})
        found = entry(served)
        assert found["copies"] == {"tokenizer": 2}
        assert "tokenize the same prompt differently" in found["problem"]
    assert caplog.text.count("cannot be judged") == 1


async def test_a_reference_that_does_not_score_prompts_is_named() -> None:
    class Mute(Scripted):
        """Answers completions, but refuses to score a prompt."""

        async def generate(self, _request: Any) -> Any:
            raise RequestError("prompt log-probabilities are not supported")
            yield

        async def post(self, _path: str, fields: Any) -> Any:
            return {"tokens": list(fields["prompt"].encode())}

    async with judged(drawing(), Mute(whole())) as served:
        await ask(served, 1)
        found = entry(served)
        assert found["copies"] == {"refused": 1}
        assert "ref-1: prompt log-probabilities are not supported" in found["problem"]


async def test_a_reference_that_fails_at_scores_serves_its_clients_still() -> None:
    async with judged(drawing(), drawing()) as served:
        (member,) = served.gateway.pools["ref"].members

        async def fail(_request: Any) -> Any:
            raise BackendError("status 500")
            yield

        with patch.object(member.backend, "generate", fail):
            await ask(served, 2)
        assert entry(served)["copies"] == {"failed": 2}
        assert not member.last_error  # nothing that counts towards an ejection


async def test_requests_that_are_not_plain_text_are_not_copied() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    async with running(templated()) as server, judged(over(server), drawing()) as served:
        assert (await served.post("/v1/chat/completions", CHAT | {"tools": tools}))[0] == 200
        await until(lambda: not served.gateway.background)
        assert entry(served)["copies"] == {"unsupported": 1}
