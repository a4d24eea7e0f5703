"""Tests the settings of proofs: by the configuration, over reloads, and switched off."""

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octet.artifacts.golden import GOLDEN_FILE
from octet.proof.divergence import Measure
from octet.proof.verdict import Verdict
from octet_cli.main import app
from serve.config import EmbeddedConfig, GatewayConfig, HttpConfig
from serve.config.proof import Proof
from serve.gateway import unproven
from serve.gateway.state import Gateway
from serve.gateway.status import status as status_of
from serve.members.proof_state import MemberProof
from serve.proof.exam import Exams, directory_of
from serve.proof.probe import Probed
from serve.routing import Pool
from tests.fake_servers import FakeOpenAI, running
from tests.serve.conftest import Served, configured, serving_gateway
from tests.serve.gateway.test_reload import reload
from tests.serve.in_process import in_process
from tests.serve.proof.exams import FakeExam, FakeExams
from tests.serve.proof.fake_proofs import WORSE, served, write_proofs
from tests.serve.routing.stand_ins import Server
from tests.serve.waiting import until

BODY = {"model": "m", "prompt": "abc", "max_tokens": 2}
VLLM = HttpConfig(type="vllm", url="http://h:1")


def text(proof: str, *servers: FakeOpenAI) -> str:
    backends = ", ".join(f"{{type: vllm, url: '{s.url}', model: fake}}" for s in servers)
    quiet = "health: {probe_after_s: null, interval_s: 60, load_interval_s: 60, reconnect_s: 0.02}"
    pool = f"{{backends: [{backends}], {quiet}, proof: {proof}}}"
    return f"models: {{m: {{pool: p}}}}\npools: {{p: {pool}}}\n"


def standings(gateway: Served) -> list[str]:
    return [member.standing for member in gateway.gateway.pools["p"].members]


def states(gateway: Served) -> list[str]:
    told = status_of(gateway.gateway)["pools"]["p"]["backends"]
    return [entry["proof"]["state"] for entry in told]


async def test_members_that_stay_keep_their_proof_and_new_ones_are_proven_first(
    tmp_path: Path, proofs: Path
) -> None:
    async with (
        running(served()) as first,
        running(served()) as second,
        running(served(WORSE)) as wrong,
    ):
        proof = f"{{golden: {proofs}}}"
        gateway = configured(tmp_path / "octet.yaml", text(proof, first))
        async with serving_gateway(gateway) as it:
            assert standings(it) == ["in"]
            asked = len(first.requests)
            await reload(it, text(proof, first, second, wrong))
            assert standings(it) == ["in", "in", "refused"]
            assert len(first.requests) == asked and len(second.requests) >= 24
            sooner = f"{{golden: {proofs}, every_s: 10, share: 0.5}}"
            await reload(it, text(sooner, first, second, wrong))
            assert len(first.requests) == asked  # only when it is asked has changed
            assert gateway.pools["p"].config.proof.every_s == 10


async def test_settings_of_what_it_serves_are_proven_before_they_are_taken_over(
    tmp_path: Path, proofs: Path
) -> None:
    async with running(served()) as server:
        gateway = configured(tmp_path / "octet.yaml", text("{}", server))
        async with serving_gateway(gateway) as it:
            assert (standings(it), states(it)) == (["in"], ["none"])
            await reload(it, text(f"{{golden: {proofs}}}", server))
            assert (standings(it), states(it)) == (["in"], ["proven"])
            asked = len(server.requests)
            # It is quantized, and said not to be.
            await reload(it, text(f"{{golden: {proofs}, weights: original}}", server))
            assert len(server.requests) >= asked + 24
            assert (standings(it), states(it)) == (["refused"], ["refused"])
            status, answer = await it.post("/v1/completions", BODY)
            assert status == 503 and "no backend" in answer["error"]["message"]
            await reload(it, text(f"{{golden: {proofs}, enabled: false}}", server))
            assert (standings(it), states(it)) == (["in"], ["none"])


async def test_golden_records_that_are_damaged_change_nothing_at_a_reload(
    tmp_path: Path, proofs: Path
) -> None:
    damaged = write_proofs(tmp_path / "damaged")
    whole = (damaged / GOLDEN_FILE).read_text()
    (damaged / GOLDEN_FILE).write_text(whole[: len(whole) // 2])
    async with running(served()) as server:
        gateway = configured(tmp_path / "octet.yaml", text(f"{{golden: {proofs}}}", server))
        async with serving_gateway(gateway) as it:
            with pytest.raises(Exception, match=r"golden\.json: altered"):
                await reload(it, text(f"{{golden: {damaged}}}", server))
            assert states(it) == ["proven"]


def test_an_embedded_backend_brings_its_own_golden_records(tmp_path: Path, proofs: Path) -> None:
    bare = EmbeddedConfig(type="embedded", path=tmp_path)
    own = EmbeddedConfig(type="embedded", path=proofs)
    assert directory_of(Proof(), own) == proofs
    assert directory_of(Proof(), bare) is directory_of(Proof(), VLLM) is None
    other = Proof(golden=tmp_path / "other")
    assert directory_of(other, own) == directory_of(other, VLLM) == tmp_path / "other"
    assert directory_of(Proof(golden=proofs, enabled=False), own) is None


async def test_what_is_declared_decides_what_is_proven(proofs: Path) -> None:
    async def key(proof: Proof) -> object:
        exam = await Exams(proof).find(VLLM)
        assert exam is not None
        return exam.key

    same = [Proof(golden=proofs), Proof(golden=proofs, every_s=7, share=0.5, timeout_s=3)]
    others = [
        Proof(golden=proofs, weights="original"),
        Proof(golden=proofs, kv_cache="e4m3"),
        Proof(golden=proofs, engine="vllm-gpu"),
    ]
    first, second = [await key(proof) for proof in same]
    assert first == second and len({first, *[await key(proof) for proof in others]}) == 4


def test_check_says_what_each_pool_is_proven_with_and_warns_of_those_without(
    tmp_path: Path, proofs: Path
) -> None:
    path = tmp_path / "octet.yaml"
    path.write_text(
        f"""
        models: {{a: {{pool: p}}, b: {{pool: [{{type: vllm, url: 'http://h:1'}}]}}}}
        pools: {{p: {{backends: [{{type: vllm, url: 'http://h:2'}}], proof: {{golden: {proofs}}}}}}}
        """
    )
    given = ["serve", "--config", str(path), "--check"]
    lines = CliRunner().invoke(app, given).stdout.splitlines()
    (proven,) = [line for line in lines if "to be proven by" in line]
    found, _, power = proven.partition("; ")
    assert found == "pool p: to be proven by 64 golden records: fp8 weights, e5m2 cache"
    assert power.startswith("about half of the faults that were not simulated are refused if they")
    assert "change perplexity by 2 to 4 % after 24 prompts and 1.2 to 2.5 % after 64;" in power
    (warned,) = [line for line in lines if "UNPROVEN" in line]
    assert warned.startswith("warning: pool b: SERVES UNPROVEN") and "proof.golden" in warned
    lines = CliRunner().invoke(app, [*given, "--no-proof"]).stdout.splitlines()
    warned_of = [line for line in lines if "UNPROVEN" in line]
    assert len(warned_of) == 2 and all("--no-proof" in line for line in warned_of)
    path.write_text(path.read_text().replace(str(proofs), str(tmp_path)))
    refused = CliRunner().invoke(app, given)
    assert refused.exit_code == 2 and "pools.p.proof.golden: " in refused.stderr


def test_check_says_where_only_the_mean_is_judged(tmp_path: Path) -> None:
    bare, path = write_proofs(tmp_path / "bare", scenarios=False), tmp_path / "octet.yaml"
    backends = "backends: [{type: vllm, url: 'http://h:2'}]"
    path.write_text(f"models: {{a: {{pool: {{{backends}, proof: {{golden: {bare}}}}}}}}}")
    said = CliRunner().invoke(app, ["serve", "--config", str(path), "--check"]).stdout
    found = re.search(
        r"only the mean divergence is tested, with a bound of ([\d.]+) nats, and", said
    )
    assert found is not None and 0 < float(found[1]) < 1


def test_without_proof_means_every_pool() -> None:
    config = GatewayConfig.model_validate(
        {
            "models": {"a": {"pool": [VLLM]}, "b": {"pool": "p"}},
            "pools": {"p": {"backends": [VLLM], "proof": {"every_s": 7}}},
        }
    ).without_proof()
    assert [pool.proof.enabled for pool in config.all_pools.values()] == [False, False]
    assert config.pools["p"].proof.every_s == 7


async def test_a_gateway_without_proof_stays_so_over_a_reload(tmp_path: Path, proofs: Path) -> None:
    async with running(served(WORSE)) as wrong:
        gateway = configured(tmp_path / "octet.yaml", text("{enabled: false}", wrong))
        gateway.proves = False
        async with serving_gateway(gateway) as it:
            await reload(it, text(f"{{golden: {proofs}}}", wrong))
            assert (standings(it), states(it)) == (["in"], ["none"])
            assert status_of(it.gateway)["unproven_pools"] == ["p"]
            assert await it.metric("octet_pool_unproven", pool="p") == 1
            assert await it.metric("octet_backend_proof_state", pool="p", backend="p-1") == 0


async def test_what_serves_unproven_is_said_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unproven, "EVERY_S", 0.001)
    pool = {"backends": [VLLM], "health": {"probe_after_s": None}}
    async with in_process(("p", [Server()]), pools={"p": pool}) as client:
        task = asyncio.create_task(unproven.keep_warning(client.gateway))
        await until(lambda: len(caplog.records) >= 3)
        task.cancel()
    lines = {r.getMessage() for r in caplog.records if r.levelno == logging.WARNING}
    assert lines == {*unproven.unproven({"p": client.gateway.pools["p"].config})}
    assert all("SERVES UNPROVEN" in line for line in lines)


async def test_it_listens_and_says_whom_it_asks_before_they_have_answered(
    capfd: pytest.CaptureFixture[str],
) -> None:
    answer = asyncio.Event()

    class Held(FakeExam):
        async def probe(self, *given: Any, **options: Any) -> Probed:
            await answer.wait()
            return await super().probe(*given, **options)

    backends = [Server("a"), Server("b")]
    pool = Pool.of("p", backends, exams=FakeExams(Held(seconds=0.0)))
    config = GatewayConfig.model_validate({"models": {"m": {"pool": "p"}}, "pools": {"p": {}}})
    async with serving_gateway(Gateway(config, {"p": pool}), patience_s=0.0) as it:
        said = capfd.readouterr().err
        assert "pool p: proving p-1, p-2 by a fake exam; each serves once its" in said
        assert "serves yet" not in said
        async with it.session.get("/health") as response:
            assert response.status == 200
        async with it.session.get("/ready") as response:
            assert response.status == 503
        answer.set()
        await until(lambda: it.gateway.ready)
        async with it.session.get("/ready") as response:
            assert response.status == 200


async def test_a_pool_is_unproven_while_its_backend_is_down_or_yet_to_be_found(
    tmp_path: Path, proofs: Path
) -> None:
    later = f"{{file: {tmp_path / 'later.yaml'}}}"
    path = tmp_path / "octet.yaml"
    down = "backends: [{type: vllm, url: 'http://127.0.0.1:9'}]"
    lines = [
        "models: {m: {pool: bare, fallback: [found, proven]}}",
        f"pools: {{bare: {{{down}}}, found: {{discover: [{later}]}},",
        f"  proven: {{{down}, proof: {{golden: {proofs}}}}}}}",
    ]
    async with serving_gateway(configured(path, "\n".join(lines))) as it:
        assert not it.gateway.ready
        assert status_of(it.gateway)["unproven_pools"] == ["bare", "found"]
        for pool, value in {"bare": 1, "found": 1, "proven": 0}.items():
            assert await it.metric("octet_pool_unproven", pool=pool) == value


def test_status_is_json_whatever_was_measured() -> None:
    nan = float("nan")
    proof = MemberProof("x", "a", lambda: 0.0)
    assert json.loads(json.dumps(proof.as_json(0), allow_nan=False))["outcome"] is None
    figures = Measure(nan, nan, float("inf"), nan, nan, nan, None, 0, 0)
    proof.verdict = Verdict("inconclusive", figures, None, None, None, (), (), "nothing came")
    told = json.loads(json.dumps(proof.as_json(0), allow_nan=False))
    assert told["kl"] is None and told["kl_interval"] == [None, None]
