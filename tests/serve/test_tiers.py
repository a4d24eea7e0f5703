"""Tiers as clients see them: who answers a request that names one, and what its headers say."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from serve.config import GatewayConfig, Proof
from serve.gateway.reload import reload_from
from serve.http.openapi import document
from tests.fake_servers import FakeOpenAI, running
from tests.serve.api.request.test_attempts import STREAM, failed, refused
from tests.serve.conftest import configured, serving_gateway
from tests.serve.tiered import (
    ALIASES,
    ARTIFACT,
    BODY,
    OURS,
    PATH,
    TIERS,
    asked,
    config,
    error,
    figures,
    in_tiers,
    said,
    sound,
    tier,
    tiered,
)
from tests.serve.upstreams import Scripted, chunk, whole
from tests.serve.waiting import until


async def test_without_a_tier_the_order_is_the_models_whatever_is_measured() -> None:
    backends = sound()
    async with in_tiers(backends) as (served, stated):
        stated.kl = {"fp8": 5.0}
        reply = await served.request(PATH, BODY)
        assert said(reply.headers) == (None, "fp8", ARTIFACT[:12], "5")
        stated.kl = {}
        assert said((await served.request(PATH, BODY)).headers)[3] is None
        backends["fp8"][0].outcomes = (refused(),)
        assert said((await served.request(PATH, BODY)).headers)[:2] == (None, "bf16")
        assert asked(backends) == {"fp8": 3, "bf16": 1, "fp4": 0}


async def test_the_artifact_is_that_of_the_backend_that_answered() -> None:
    """Embedded backends of one pool may serve two exports."""
    backends = sound() | {"fp8": [Scripted(whole()), Scripted(whole())]}
    async with in_tiers(backends) as (served, _):
        first, second = served.gateway.pools["fp8"].members
        assert first.proof is not None and second.proof is not None
        second.proof.identity = "fedcba9876543210" * 4
        for out, artifact in ((second, "0123456789ab"), (first, "fedcba987654")):
            out.proof.state = "refused"
            out.changed()
            reply = await served.request(PATH, BODY, tier("standard"))
            assert said(reply.headers)[1:3] == ("fp8", artifact)
            out.proof.state = "proven"
            out.changed()
        first.proof.state = second.proof.state = "admitted"  # without log-probabilities
        assert said((await served.request(PATH, BODY)).headers)[1:3] == ("fp8", None)


@pytest.mark.parametrize("failure", [refused, failed])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fallback_is_more_exact_and_says_so(failure: Any, stream: bool) -> None:
    backends = sound(STREAM if stream else whole())
    body = BODY | {"stream": stream}
    async with in_tiers(backends) as (served, _):
        for broken, name, answering in (
            ("fp4", "economy", "fp8"),
            ("fp8", "economy", "bf16"),
            ("fp8", "standard", "bf16"),
        ):
            backends[broken][0].outcomes = (failure(),)
            reply = await served.request(PATH, body, tier(name))
            assert reply.status == 200 and said(reply.headers)[:2] == (name, answering)
        cheap = backends["fp4"][0].asked
        backends["bf16"][0].outcomes = (failure(),)
        for name in ("standard", "exact"):  # and not the cheap one, which would answer
            reply = await served.request(PATH, body, tier(name))
            assert reply.status in (502, 503) and said(reply.headers) == (None,) * 4
        assert backends["fp4"][0].asked == cheap


async def test_a_tier_that_allows_it_falls_back_to_less_and_does_not_call_it_its_own() -> None:
    backends = sound()
    tiers = TIERS | {"exact": {"max_kl": 0.001, "allow_less_exact": True}}
    async with in_tiers(backends, tiers=tiers) as (served, stated):
        for broken, name, answering in (
            ("none", "exact", "bf16"),
            ("bf16", "standard", "fp8"),
            ("fp8", "economy", "fp4"),
        ):
            for backend in backends.get(broken, ()):
                backend.outcomes = (refused(),)
            reply = await served.request(PATH, BODY, tier("exact"))
            assert said(reply.headers)[:2] == (name, answering)
        stated.kl["fp4"] = 0.5  # within no budget at all
        assert said((await served.request(PATH, BODY, tier("exact"))).headers)[:2] == (None, "fp4")
        stated.kl = {}  # but nobody of whom nothing is known
        error(await served.request(PATH, BODY, tier("exact")), 503, "tier_unavailable")


async def test_who_waited_for_a_pool_does_not_get_what_it_has_become() -> None:
    backends = sound() | {"fp8": [Scripted([chunk(), None])]}
    settings = config()["pools"]
    settings["fp8"] |= {"admission": {"max_tokens": 8}}
    async with (
        in_tiers(backends, pools=settings) as (served, stated),
        served.holding(backends["fp8"][0], BODY) as gone,
    ):
        second = asyncio.create_task(served.request(PATH, BODY, tier("standard")))
        gate = served.gateway.admission.gates["fp8"]
        await until(lambda: len(gate.queue))
        stated.kl["fp8"] = 0.03
        gone.set()
        async with asyncio.timeout(60):
            assert said((await second).headers)[:2] == ("standard", "bf16")
        assert backends["fp8"][0].asked == 1


async def test_when_nothing_fits_the_refusal_says_what_was_measured_and_what_to_do() -> None:
    backends = sound()
    async with in_tiers(backends) as (served, stated):
        bf16 = served.gateway.pools["bf16"]
        proof = Proof(golden=Path("golden"), every_s=20)
        bf16.config = bf16.config.model_copy(update={"proof": proof})
        del stated.kl["bf16"], stated.kl["fp4"]
        reply = await served.request(PATH, BODY, tier("exact"))
        assert error(reply, 503, "tier_unavailable") == (
            "no pool of the model 'm' fits the tier 'exact' now (at most 0.001 nats from the "
            "reference): 'fp4' is not measured: it has no golden records, 'fp8' measures 0.01235, "
            "'bf16' is not measured; choose a tier that is served now (standard, economy)"
        )
        assert reply.json()["error"]["type"] == "service_unavailable_error"
        assert reply.headers["retry-after"] == "20"
        stated.kl = {}
        off = Proof(enabled=False)
        fp8 = served.gateway.pools["fp8"]
        fp8.config = fp8.config.model_copy(update={"proof": off})
        message = error(await served.request(PATH, BODY, tier("exact")), 503, "tier_unavailable")
        assert "'fp8' is not measured: its proof is switched off" in message
        bf16.members[0].go_out("gone", reachable=False)
        reply = await served.request(PATH, BODY, tier("exact"))
        message = error(reply, 503, "tier_unavailable")
        assert message.endswith("'bf16' has no backend that serves; try again later")
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        bf16.config = bf16.config.model_copy(update={"proof": off})
        reply = await served.request(PATH, BODY, tier("exact"))
        message = error(reply, 503, "tier_unavailable")
        assert message.endswith("switched off; waiting does not help, because no pool is measured")
        assert reply.headers["retry-after"] == "60"
        assert asked(backends) == {"bf16": 0, "fp8": 0, "fp4": 0}
        labels = {"model": "m", "tier": "exact", "pool": ""}
        assert served.metric("octet_tier_requests_total", **labels) == 4


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        ("m", "exat", "unknown tier 'exat'; did you mean 'exact'?; the most exact first: exact"),
        ("m", "Standard", "did you mean 'standard'?"),
        ("m", "zzz", "unknown tier 'zzz'; the most exact first: exact, standard, economy"),
        ("m", "", "unknown tier ''; the most exact first"),
        ("m", "exact, economy", "unknown tier 'exact, economy'"),
        ("m", "x" * 5000, f"unknown tier '{'x' * 100}';"),
        ("m", "\x00é", "unknown tier '"),
        ("m-exact", "economy", "'m-exact' selects the tier 'exact', but X-Octet-Tier is"),
    ],
)
async def test_a_tier_that_cannot_be_meant_is_refused(model: str, name: str, expected: str) -> None:
    backends = sound()
    async with in_tiers(backends, ALIASES) as (served, _):
        reply = await served.request(PATH, BODY | {"model": model}, tier(name))
        message = error(reply, 400, "invalid_tier")
        assert expected in message and len(message) < 300
        assert reply.json()["error"]["param"] == "X-Octet-Tier"
        assert not any(asked(backends).values())
        assert served.metric("octet_tier_requests_total", model="m", tier=name, pool="") == 0


async def test_a_header_that_is_there_twice_is_refused_and_one_without_tiers_too() -> None:
    async with tiered(sound()) as (gateway, _):
        headers = [("X-Octet-Tier", "exact"), ("X-Octet-Tier", "economy")]
        async with gateway.session.post(PATH, json=BODY, headers=headers) as answer:
            assert answer.status == 400
            assert "X-Octet-Tier is there twice" in (await answer.json())["error"]["message"]
    async with in_tiers(sound(), tiers={}) as (served, _):
        message = error(await served.request(PATH, BODY, tier("exact")), 400, "invalid_tier")
        assert message.startswith("unknown tier 'exact': this gateway has no tiers")


CANARY = {"pool": "bf16", "fallback": [], "canary": [{"pool": "fp8", "fraction": 1.0}]}


class TestCanaries:
    async def test_one_that_fits_has_its_share_before_the_cheapest(self) -> None:
        backends = sound()
        async with in_tiers(backends, CANARY) as (served, _):
            reply = await served.request(PATH, BODY, tier("standard"))
            assert said(reply.headers)[:2] == ("standard", "fp8")
            backends["fp8"][0].outcomes = (refused(),)
            reply = await served.request(PATH, BODY, tier("standard"))
            assert said(reply.headers)[:2] == ("standard", "bf16")

    async def test_after_one_that_is_more_exact_nobody_is_asked_that_is_less(self) -> None:
        model = {"pool": "fp8", "fallback": [], "canary": [{"pool": "bf16", "fraction": 1.0}]}
        for allowed, status, answering in ((False, 503, None), (True, 200, "fp8")):
            backends = sound()
            backends["bf16"][0].outcomes = (refused(),)
            tiers = {"standard": {"max_kl": 0.02, "allow_less_exact": allowed}}
            async with in_tiers(backends, model, tiers=tiers) as (served, stated):
                reply = await served.request(PATH, BODY, tier("standard"))
                assert (reply.status, said(reply.headers)[1]) == (status, answering)
                stated.kl["bf16"], stated.low["fp8"] = 0.012, 0.011  # cannot be told apart
                reply = await served.request(PATH, BODY, tier("standard"))
                assert said(reply.headers)[:2] == ("standard", "fp8")

    async def test_one_that_does_not_fit_has_none(self) -> None:
        backends = sound()
        async with in_tiers(backends, CANARY) as (served, stated):
            for name in ("exact", "standard"):
                reply = await served.request(PATH, BODY, tier(name))
                assert said(reply.headers)[:2] == (name, "bf16")
                stated.kl["fp8"] = 0.3
            assert "fp8" not in served.gateway.admission.gates  # nor does anybody wait for it
            assert (await served.request(PATH, BODY)).headers["x-octet-precision"] == "fp8"


async def test_requests_of_a_tier_are_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backends = sound()
    async with in_tiers(backends, ALIASES, logs={"access": True}) as (served, _):
        with caplog.at_level(logging.INFO, "octet.access"):
            await served.request(PATH, BODY | {"model": "m-cheap"})
            backends["fp8"][0].outcomes = (refused(),)
            await served.request(PATH, BODY, tier("standard"))
            await served.request(PATH, BODY)
        for name, pool, count in (("economy", "fp4", 1), ("standard", "bf16", 1), ("", "fp8", 0)):
            labels = {"model": "m", "tier": name, "pool": pool}
            assert served.metric("octet_tier_requests_total", **labels) == count
        records = [record for record in caplog.records if record.name == "octet.access"]
        lines = [record.__dict__["fields"] for record in records]
        assert [line.get("tier") for line in lines] == ["economy", "standard", None]


async def test_a_reload_changes_tiers_and_costs(tmp_path: Path) -> None:
    def text(standard: float, fp8_cost: float, server: FakeOpenAI) -> str:
        pools = {
            name: {
                "backends": [{"type": "vllm", "url": server.url, "model": "fake"}],
                "health": {"probe_after_s": None},
                "precision": name,
                "cost": cost,
            }
            for name, cost in (("fp8", fp8_cost), ("bf16", 4.0))
        }
        return json.dumps(
            {
                "models": {"m": {"pool": "fp8", "fallback": ["bf16"]}},
                "tiers": {"standard": {"max_kl": standard}},
                "pools": pools,
            }
        )

    async with running(FakeOpenAI()) as server:
        with figures():
            gateway = configured(tmp_path / "octet.yaml", text(0.02, 2.0, server))
            async with serving_gateway(gateway) as served:
                for budget, cost, answering in (
                    (0.02, 2.0, "fp8"),
                    (0.02, 8.0, "bf16"),
                    (0.02, 2.0, "fp8"),
                    (0.01, 2.0, "bf16"),
                ):
                    (tmp_path / "octet.yaml").write_text(text(budget, cost, server))
                    await reload_from(gateway, gateway.path)
                    headers = tier("standard")
                    async with served.session.post(PATH, json=BODY, headers=headers) as answer:
                        assert said(answer.headers)[:2] == ("standard", answering)


def test_the_openapi_document_has_the_headers() -> None:
    described = document(GatewayConfig.model_validate(config()))
    post = described["paths"]["/v1/embeddings"]["post"]
    headers = post["responses"]["200"]["headers"]
    assert {f"X-Octet-{name.title()}" for name in OURS} < headers.keys()
    assert {"$ref": "#/components/parameters/tier"} in post["parameters"]
    assert described["components"]["parameters"]["tier"]["schema"]["enum"] == list(TIERS)
    without = document(GatewayConfig.model_validate(config(tiers={})))
    post = without["paths"][PATH]["post"]
    assert "X-Octet-Tier" not in post["responses"]["200"]["headers"]
    assert "tier" not in without["components"]["parameters"]
