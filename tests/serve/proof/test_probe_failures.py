"""Prompts that are not answered, and why."""

from typing import Any

import pytest

from octet.errors import RequestError
from serve.proof.probe import Unprovable
from tests.fake_servers import FakeOpenAI, running
from tests.fakes import FakeRunner, byte_tokenizer, fake_backend
from tests.serve.openai_clients import dead_url, started
from tests.serve.proof.asking import RECORDS, asked
from tests.serve.proof.fake_proofs import fake_golden
from tests.serve.upstreams import STREAM_HEAD, forever, scripted


async def test_prompts_that_do_not_fit_are_left_out_and_said() -> None:
    runner = FakeRunner(context=40)
    server = FakeOpenAI()
    server.engine = fake_backend(runner)
    server.card = {"max_model_len": 40}
    async with running(server), started(server.url) as backend:
        assert await backend.ready()
        probed = await asked(backend)
        with pytest.raises(Unprovable, match="shorter than every golden prompt"):
            await asked(backend, records=[60, 61])
    assert len(server.requests) == len(probed.responses) == 2
    assert probed.notes == [
        "2 of 4 golden prompts are longer than its context and left out: one has 55 tokens, it was"
        " started for 40"
    ]


async def test_a_server_that_does_not_say_its_context_refuses_what_does_not_fit() -> None:
    server = FakeOpenAI()
    server.engine = fake_backend(FakeRunner(context=40))
    async with running(server), started(server.url, type="openai") as backend:
        probed = await asked(backend, tokenizer=byte_tokenizer())
    assert [failure.kind for failure in probed.failures] == ["context", "context"]
    assert len(probed.responses) == 2


async def test_a_refused_model_name_is_one_clear_line() -> None:
    class Strict(FakeOpenAI):
        async def _answer(self, request: Any, body: dict[str, Any]) -> Any:
            raise RequestError(f"The model `{body['model']}` does not exist.", status=404)

    async with running(Strict()) as server, started(server.url) as backend:
        with pytest.raises(Unprovable) as error:
            await asked(backend)
    assert error.value.kind == "refused"
    assert str(error.value).endswith("refuses the golden prompts: The model `fake` does not exist.")


async def test_a_server_that_is_busy_is_not_gone() -> None:
    runner = FakeRunner()
    runner.gate.clear()
    server = FakeOpenAI()
    server.engine = fake_backend(runner)
    async with running(server), started(server.url) as backend:
        probed = await asked(backend, timeout_s=0.2)
        runner.gate.set()
    assert (probed.state, len(probed.failures), probed.responses) == ("busy", 4, [])
    assert probed.notes == [
        "4 of 4 golden prompts were not answered in time: no answer in 0.2 s, though it is ready"
    ]
    assert probed.tokens == sum(len(fake_golden().records[n].prompt_token_ids) for n in RECORDS)
    assert server.cancelled == 4 and server.running == 0


async def test_what_came_in_time_is_kept() -> None:
    golden = fake_golden()
    async with running(FakeOpenAI()) as server, started(server.url) as backend:
        long = golden.records[60].model_copy(update={"prompt": "!wait"})
        records = tuple(long if n == 60 else r for n, r in enumerate(golden.records))
        probed = await asked(backend, golden.model_copy(update={"records": records}), timeout_s=1.0)
    assert probed.state == "answered" and len(probed.responses) == 3
    assert [(f.record, f.kind) for f in probed.failures] == [(60, "busy")]


@pytest.mark.parametrize(
    ("fault", "kind", "state"),
    [
        ("!busy", "busy", "busy"),
        ("!limit", "busy", "busy"),
        ("!error", "failed", "failed"),
        ("!key", "failed", "failed"),
        ("!dead", "gone", "gone"),
        ("!reset", "gone", "gone"),
        ("!die", "gone", "gone"),
        ("!garbage", "failed", "failed"),
    ],
)
async def test_how_a_server_fails_is_told(fault: str, kind: str, state: str) -> None:
    golden = fake_golden()
    records = tuple(r.model_copy(update={"prompt": fault}) for r in golden.records)
    async with running(FakeOpenAI()) as server, started(server.url) as backend:
        probed = await asked(backend, golden.model_copy(update={"records": records}))
    assert {failure.kind for failure in probed.failures} == {kind}
    assert probed.state == state and len(probed.notes) == 1 and "\n" not in probed.notes[0]


async def test_a_server_that_is_not_there_is_gone() -> None:
    async with started(dead_url()) as backend:
        probed = await asked(backend)
    assert probed.state == "gone" and "cannot be reached" in probed.notes[0]


async def test_one_that_neither_answers_nor_says_that_it_is_ready_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scripted(forever(STREAM_HEAD)) as upstream, started(upstream.url) as backend:

        async def not_ready() -> bool:
            return False

        monkeypatch.setattr(backend, "ready", not_ready)  # as of a host that hangs
        probed = await asked(backend, timeout_s=0.1)
    assert probed.state == "gone"
