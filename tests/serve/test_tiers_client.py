"""Tiers as the official client sees them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.fake_servers import FakeOpenAI, running
from tests.serve.conftest import Served
from tests.serve.openai_clients import relay_to
from tests.serve.tiered import ALIASES, ARTIFACT, COSTS, Figures, said, tiered


@pytest.fixture
async def served() -> AsyncIterator[tuple[Served, Figures]]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        servers = {name: await enter(running(FakeOpenAI())) for name in COSTS}
        backends = {name: [relay_to(server.url)] for name, server in servers.items()}
        model = {**ALIASES, "tier": "standard"}
        yield await enter(tiered(backends, model))


@pytest.fixture
async def client(served: tuple[Served, Figures]) -> AsyncIterator[AsyncOpenAI]:
    url = f"{served[0].url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_every_kind_of_answer_says_what_served_it(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    for name, pool, measured in (
        ("exact", "bf16", "0.0004"),
        ("standard", "fp8", "0.01235"),
        ("economy", "fp4", "0.06"),
    ):
        asking: Any = {"model": "m", "extra_headers": {"X-Octet-Tier": name}}
        expected = (name, pool, ARTIFACT[:12], measured)
        for stream in (False, True):
            completion = await client.completions.with_raw_response.create(
                **asking, prompt="abc", max_tokens=3, stream=stream
            )
            chat = await client.chat.completions.with_raw_response.create(
                **asking, messages=messages, max_tokens=3, stream=stream
            )
            assert said(completion.headers) == said(chat.headers) == expected
            for parsed in (completion.parse(), chat.parse()):
                if stream:
                    assert {event.model async for event in parsed} == {"m"}
                else:
                    assert parsed.choices and parsed.model == "m"
        vectors = await client.embeddings.with_raw_response.create(**asking, input=["ab"])
        assert said(vectors.headers) == expected and vectors.parse().data


async def test_an_alias_names_a_tier_and_the_model_has_one_of_its_own(client: AsyncOpenAI) -> None:
    for model, name, pool in (
        ("m", "standard", "fp8"),
        ("n", "standard", "fp8"),
        ("m-exact", "exact", "bf16"),
        ("m-cheap", "economy", "fp4"),
    ):
        answer = await client.completions.with_raw_response.create(
            model=model, prompt="abc", max_tokens=2
        )
        assert said(answer.headers)[:2] == (name, pool)
        assert answer.parse().model == model
    again: Any = {"X-Octet-Tier": "exact"}
    answer = await client.completions.with_raw_response.create(
        model="m-exact", prompt="abc", max_tokens=2, extra_headers=again
    )
    assert said(answer.headers)[1] == "bf16"
    with pytest.raises(BadRequestError, match="'m-cheap' selects the tier 'economy'"):
        await client.completions.create(model="m-cheap", prompt="abc", extra_headers=again)


async def test_models_lists_the_aliases_of_tiers(client: AsyncOpenAI) -> None:
    listed = [model.id async for model in client.models.list()]
    assert listed == ["m", "n", "m-exact", "m-cheap"]
    assert (await client.models.retrieve("m-cheap")).id == "m-cheap"


async def test_the_status_says_who_fits_and_why_others_do_not(
    served: tuple[Served, Figures],
) -> None:
    gateway, stated = served
    del stated.kl["fp4"]
    async with gateway.session.get("/status") as answer:
        model = (await answer.json())["models"]["m"]
    assert (model["tier"], model["tier_aliases"]) == ("standard", ALIASES["tier_aliases"])
    assert list(model["tiers"]) == ["exact", "standard", "economy"]
    assert model["tiers"]["exact"] == {
        "max_kl": 0.001,
        "allow_less_exact": False,
        "order": ["bf16"],
        "unfit": {
            "fp4": "is not measured: it has no golden records",
            "fp8": "measures 0.01235",
        },
    }
    assert model["tiers"]["economy"]["order"] == ["fp8", "bf16"]
    labels = {"model": "m", "tier": "exact"}
    for pool, fits in (("bf16", 1.0), ("fp8", 0.0), ("fp4", 0.0)):
        assert await gateway.metric("octet_tier_fits", **labels, pool=pool) == fits
