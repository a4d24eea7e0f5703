"""Asking golden prompts: of every kind of backend, and of those that cannot be asked."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from octet.artifacts.golden import POSITIONS
from octet.errors import RequestError
from serve.backends.base import Backend
from serve.members.factory import make_backend
from serve.proof.plan import order
from serve.proof.probe import Unprovable
from tests.fake_servers import FLAVOURS, FakeOpenAI, FakeTriton, running
from tests.fakes import byte_tokenizer, fake_backend, opened
from tests.plain_divergence import plain_divergence
from tests.serve.openai_clients import started
from tests.serve.proof.asking import RECORDS, asked
from tests.serve.proof.contract import require_probed
from tests.serve.proof.fake_proofs import fake_golden
from tests.triton_config import triton_at
from verify.server.perplexity import with_prompts


class Limited(FakeOpenAI):
    """`most` log-probabilities of a token, or none at all; refuses more, or sends fewer."""

    most: int | None = None
    silent = False
    takes_salt = True

    async def _answer(self, request: Any, body: dict[str, Any]) -> Any:
        asked = body.get("logprobs")
        if not self.takes_salt and "cache_salt" in body:
            raise RequestError("Extra inputs are not permitted: cache_salt")
        if self.most is not None and asked is not None and asked > self.most:
            if not self.silent:
                said = f"Requested sample logprobs of {asked}, greater than max allowed"
                raise RequestError(said, param="logprobs")
            body["logprobs"] = self.most or None
        return await super()._answer(request, body)


def require_exact(probed: Any) -> None:
    """Every answer is the reference's own: same tokens, same distributions."""
    assert sorted(r.record for r in probed.responses) == RECORDS and probed.failures == []
    for response in probed.responses:
        record = fake_golden().records[response.record]
        count = min(POSITIONS, len(record.continuation_token_ids))
        assert response.tokens == record.continuation_token_ids[:count]
        assert len(response.tops) == count
        for top, golden in zip(response.tops, record.tops, strict=True):
            assert plain_divergence(golden.mapping, top) < 1e-6


@asynccontextmanager
async def triton(server: FakeTriton, tmp_path: Any) -> AsyncIterator[Backend]:
    byte_tokenizer().inner.save(str(tmp_path / "tokenizer.json"))
    config = triton_at(server.url, model="fake", tokenizer=tmp_path)
    async with opened(make_backend("fake", config)) as backend:
        yield backend


async def test_vllm_names_tokens_by_id_and_gets_a_fresh_salt() -> None:
    async with running(FakeOpenAI()) as server, started(server.url) as backend:
        require_exact(await require_probed(backend, fake_golden(), RECORDS, None))
        await asked(backend)
    salts = [body["cache_salt"] for body in server.requests]
    assert len(set(salts[:4])) == len(set(salts[4:])) == 1 and len(set(salts)) == 2
    assert all(body["temperature"] == 0 for body in server.requests)
    assert not any(body.get("ignore_eos") for body in server.requests)
    for name in ("presence_penalty", "frequency_penalty"):  # a model's own settings may have them
        assert all(body[name] == 0 for body in server.requests)
    assert all(body["repetition_penalty"] == 1 for body in server.requests)


async def test_the_ids_of_a_probe_look_like_those_of_clients() -> None:
    async with running(FakeOpenAI()) as server, started(server.url) as backend:
        probed = await asked(backend)
        await with_prompts(backend, fake_golden(), probed.responses)
    ids = [headers["x-request-id"] for headers in server.headers]
    assert len(ids) == len(set(ids)) == 2 * len(RECORDS)
    assert all(re.fullmatch("[0-9a-f]{32}", value) for value in ids)


@pytest.mark.parametrize("flavour", [name for name in FLAVOURS if name != "vllm"])
async def test_other_servers_name_tokens_by_their_text(flavour: str) -> None:
    async with (
        running(FakeOpenAI(flavour=flavour)) as server,
        started(server.url, type="openai") as backend,
    ):
        probed = await require_probed(backend, fake_golden(), RECORDS, byte_tokenizer())
    # Bytes that are not UTF-8 all read U+FFFD: what is left is exact, and enough.
    known = [top for r in probed.responses for top in r.tops if top]
    assert len(known) > 10
    for response in probed.responses:
        record = fake_golden().records[response.record]
        for token, golden in zip(response.tokens, record.continuation_token_ids, strict=False):
            assert token in (golden, -1)
        for top, reference in zip(response.tops, record.tops, strict=False):
            assert not top or plain_divergence(reference.mapping, top) < 1e-6


async def test_names_by_text_mean_nothing_without_a_tokenizer() -> None:
    async with (
        running(FakeOpenAI(flavour="sglang")) as server,
        started(server.url, type="openai") as backend,
    ):
        with pytest.raises(Unprovable, match="the golden records have no tokenizer") as error:
            await asked(backend, tokenizer=None)
    assert error.value.kind == "tokenizer" and "\n" not in str(error.value)


@pytest.mark.parametrize("token_ids", [True, False])
async def test_triton_is_asked_through_our_entry_and_through_vllms(
    token_ids: bool, tmp_path: Any
) -> None:
    async with (
        running(FakeTriton(token_ids=token_ids)) as server,
        triton(server, tmp_path) as backend,
    ):
        require_exact(await require_probed(backend, fake_golden(), RECORDS, None))


async def test_the_engine_in_this_process_is_asked() -> None:
    async with opened(fake_backend()) as backend:
        require_exact(await require_probed(backend, fake_golden(), RECORDS, None))


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "sent"])
async def test_fewer_log_probabilities_are_usable_and_said(silent: bool) -> None:
    server = Limited()
    server.most, server.silent = 5, silent
    async with running(server), started(server.url) as backend:
        probed = await asked(backend)
    assert len(probed.responses) == len(RECORDS) and probed.alternatives == 5
    assert all(len(top) == 5 for r in probed.responses for top in r.tops)
    assert probed.notes == [
        "it returns 5 log-probabilities of a token, not 20: the verdict is as certain, but misses"
        " changes of less likely tokens alone, and the stated power is that of 20"
    ]


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "not sent"])
async def test_without_log_probabilities_greedy_tokens_are_left(silent: bool) -> None:
    server = Limited()
    server.most, server.silent = 0, silent
    async with running(server), started(server.url) as backend:
        probed = await asked(backend)
    assert probed.alternatives == 0 and "no log-probabilities" in probed.notes[0]
    for response in probed.responses:
        golden = fake_golden().records[response.record].continuation_token_ids[:POSITIONS]
        assert response.tokens == golden and response.tops == ()


async def test_greedy_tokens_are_read_off_a_text_that_is_all_there_is(tmp_path: Any) -> None:
    """TensorRT-LLM's models in Triton return neither ids nor log-probabilities of others."""
    server = Limited(flavour="sglang")
    server.most, server.silent = 0, True
    async with running(server), started(server.url, type="openai") as backend:
        probed = await asked(backend)
    for response in probed.responses:
        golden = fake_golden().records[response.record].continuation_token_ids
        assert response.tokens == golden[: len(response.tokens)] and len(response.tokens) > 1


async def test_a_server_that_knows_no_salt_is_asked_without() -> None:
    server = Limited()
    server.takes_salt = False
    async with running(server), started(server.url) as backend:
        probed = await asked(backend)
    require_exact(probed)
    assert not probed.salted


async def test_another_tokenizer_is_seen_by_how_it_reads_the_prompts() -> None:
    golden = fake_golden()
    records = tuple(
        record.model_copy(update={"prompt_token_ids": record.prompt_token_ids[:-1]})
        for record in golden.records
    )
    async with running(FakeOpenAI()) as server, started(server.url) as backend:
        with pytest.raises(
            Unprovable, match=r"another tokenizer .*encodes a prompt of \d+ tokens as"
        ):
            await asked(backend, golden.model_copy(update={"records": records}))


async def test_another_tokenizer_is_seen_by_ids_that_are_none() -> None:
    async with running(FakeOpenAI()) as server, started(server.url) as backend:
        with pytest.raises(
            Unprovable, match=r"another tokenizer .*returns token \d+, and 100 exist"
        ):
            await asked(backend, vocab_size=100)


async def test_another_tokenizer_is_seen_by_texts_that_are_none_of_ours() -> None:
    server = FakeOpenAI(flavour="sglang")
    server.flavour = replace(FLAVOURS["sglang"], name="two", choice_extra={})

    def event(number: int, chunk: Any) -> bytes:
        for choice in chunk["choices"] if isinstance(chunk, dict) else ():
            for token in (choice.get("logprobs") or {"tokens": []})["tokens"][:1]:
                choice["logprobs"]["tokens"][0] = token * 2
        return FLAVOURS["sglang"].event(number, chunk)

    object.__setattr__(server.flavour, "event", event)
    async with running(server), started(server.url, type="openai") as backend:
        with pytest.raises(
            Unprovable, match=r"another tokenizer .*which is not in the artifact's vocabulary"
        ):
            await asked(backend)


async def test_no_more_are_asked_at_once_than_allowed() -> None:
    most = 0

    class Counting(FakeOpenAI):
        async def _answer(self, request: Any, body: dict[str, Any]) -> Any:
            nonlocal most
            most = max(most, self.running)
            await asyncio.sleep(0)
            return await super()._answer(request, body)

    done: list[int] = []
    async with running(Counting()) as server, started(server.url) as backend:
        probed = await asked(
            backend,
            records=order(fake_golden(), 0)[:16],
            concurrency=3,
            advance=lambda: done.append(1),
        )
    assert len(probed.responses) == len(done) == 16 and most == 3
