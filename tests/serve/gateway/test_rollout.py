"""Rollouts: what clients get at each step, how they end, and what a restart makes of them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from octet.errors import BackendError, ConfigError, RequestError
from serve.config import GatewayConfig
from serve.config.checks import load_config
from serve.gateway import rollout as rollout_file
from serve.gateway.rollout import Rollouts
from serve.gateway.status import status as status_of
from serve.members.proof_state import MemberProof
from serve.routing import Pool
from serve.routing.judgement import Judgement
from serve.telemetry.metrics import Metrics
from tests.fakes import FakeRunner, fake_backend
from tests.serve.in_process import Client
from tests.serve.judging import BODY, JUDGE, drawing, judged
from tests.serve.waiting import until

PATH = "/v1/completions"


@asynccontextmanager
async def rolling(
    tmp_path: Path, tilt: float = 0.0, **settings: Any
) -> AsyncIterator[tuple[Client, list[str]]]:
    """A canary that diverges by `tilt`, clients without end, and who answered them."""
    canary = settings.pop("backend", None) or drawing(tilt)
    admin = {"rollouts_file": str(tmp_path / "rollouts.json")}
    settings = {"admin": admin} | settings
    async with judged(drawing(), drawing(), canary=canary, **settings) as served:
        answered: list[str] = []
        clients = asyncio.create_task(_ask_forever(served, answered))
        try:
            yield served, answered
        finally:
            clients.cancel()
            await asyncio.gather(clients, return_exceptions=True)
            await until(lambda: not served.gateway.background)


async def _ask_forever(served: Client, answered: list[str]) -> None:
    while True:
        reply = await served.request(PATH, BODY)
        answered.append(reply.headers.get("x-octet-backend", "none"))
        assert reply.status == 200, reply.body
        await asyncio.sleep(0.001)


def ended(served: Client) -> Any:
    return served.gateway.rollouts.state("m")["outcome"] != "running"


def record(tmp_path: Path) -> Any:
    (found,) = json.loads((tmp_path / "rollouts.json").read_text())["canaries"]
    return found["outcome"], found["share"]


async def test_a_good_canary_is_promoted_share_by_share(tmp_path: Path) -> None:
    async with rolling(tmp_path) as (served, answered):
        rollouts = served.gateway.rollouts
        rollouts.start("m", "next", [0.5, 1.0], 60.0)
        assert record(tmp_path) == ("running", 0.0)
        await until(lambda: ended(served))
        state = rollouts.state("m")
        assert (state["outcome"], state["share"]) == ("promoted", 1.0), state
        assert record(tmp_path) == ("promoted", 1.0)
        texts = [event["text"] for event in state["events"]]
        assert [text for text in texts if text.startswith("gets")] == [
            "gets copies alone",
            "gets a share of 0.5 of the requests",
            "gets a share of 1 of the requests",
        ]
        assert served.metric("octet_canary_share", model="m", pool="next") == 1
        labels = {"model": "m", "pool": "next", "outcome": "promoted"}
        assert served.metric("octet_rollouts_total", **labels) == 1
        assert "next/next-1" in answered
        with pytest.raises(RequestError, match="is promoted already"):
            rollouts.start("m", "next", [1.0], 60.0)

        rollouts.back("m")
        answered.clear()
        await until(lambda: len(answered) > 20)
        assert set(answered[1:]) == {"main/main-1"}
        assert record(tmp_path) == ("rolled_back", 0.0)


async def test_no_client_gets_a_token_of_a_corrupted_canary(tmp_path: Path) -> None:
    async with rolling(tmp_path, tilt=4.0) as (served, answered):
        served.gateway.rollouts.start("m", "next", [0.5, 1.0], 60.0)
        await until(lambda: ended(served))
        await asyncio.sleep(0.1)
        state = served.gateway.rollouts.state("m")
        assert (state["outcome"], state["share"]) == ("rolled_back", 0.0)
        assert "exceeds its limit" in state["reason"]
        assert set(answered) == {"main/main-1"}
        assert record(tmp_path) == ("rolled_back", 0.0)
        canary = status_of(served.gateway)["models"]["m"]["canary"]
        assert canary == [{"pool": "next", "fraction": 0.0, "share": 0.0}]


async def test_a_promoted_canary_that_turns_bad_gets_no_more_requests(tmp_path: Path) -> None:
    """And none after a restart, either."""
    async with rolling(tmp_path) as (served, answered):
        gateway = served.gateway
        gateway.rollouts.start("m", "next", [1.0], 60.0)
        await until(lambda: ended(served))
        (member,) = gateway.pools["next"].members
        bad = drawing(4.0)
        await bad.start()
        with patch.object(member.backend, "generate", bad.generate):
            await until(lambda: gateway.pools["next"].rolled_back)
            answered.clear()
            await until(lambda: len(answered) > 20)
            assert set(answered[1:]) == {"main/main-1"}
        assert record(tmp_path) == ("rolled_back", 0.0)
        await bad.close()

        # Once it is repaired, it is rolled out anew.
        gateway.rollouts.start("m", "next", [1.0], 60.0)
        await until(lambda: ended(served))
        assert record(tmp_path) == ("promoted", 1.0)


async def test_a_canary_that_dies_is_rolled_back(tmp_path: Path) -> None:
    with patch.object(rollout_file, "_OUT_S", 0.3):
        async with rolling(tmp_path) as (served, _):
            served.gateway.rollouts.start("m", "next", [0.5, 1.0], 60.0)
            await until(lambda: served.gateway.rollouts.shares[("m", "next")] == 0.5)
            (member,) = served.gateway.pools["next"].members
            await member.backend.close()
            await until(lambda: ended(served))
            state = served.gateway.rollouts.state("m")
    assert (state["outcome"], state["share"]) == ("rolled_back", 0.0)
    assert "no backend of the pool serves (next-1 " in state["reason"]


async def test_a_canary_that_fails_each_copy_is_rolled_back_in_time(tmp_path: Path) -> None:
    async with rolling(tmp_path) as (served, answered):
        (member,) = served.gateway.pools["next"].members

        async def fail(_request: Any) -> Any:
            raise BackendError("it fails", kind="overloaded")
            yield

        with patch.object(member.backend, "generate", fail):
            served.gateway.rollouts.start("m", "next", [1.0], 0.5)
            await until(lambda: ended(served))
        reason = served.gateway.rollouts.state("m")["reason"]
        assert "0 answers" in reason or "not decided" in reason or "no backend" in reason
        assert set(answered) == {"main/main-1"}


async def test_a_canary_that_cannot_be_judged_is_rolled_back(tmp_path: Path) -> None:
    async with rolling(tmp_path) as (served, answered):
        (reference,) = served.gateway.pools["ref"].members

        async def refuse(_request: Any) -> Any:
            raise RequestError("prompt_logprobs are not supported")
            yield

        with patch.object(reference.backend, "generate", refuse):
            served.gateway.rollouts.start("m", "next", [1.0], 60.0)
            await until(lambda: ended(served))
        reason = served.gateway.rollouts.state("m")["reason"]
        assert reason.startswith("it cannot be judged: refused: ref-1: prompt_logprobs")
        assert set(answered) == {"main/main-1"}


async def test_without_a_proven_reference_nothing_is_promoted(tmp_path: Path) -> None:
    async with rolling(tmp_path) as (served, answered):
        (reference,) = served.gateway.pools["ref"].members
        reference.proof = None
        served.gateway.rollouts.start("m", "next", [1.0], 0.5)
        await until(lambda: ended(served))
        state = served.gateway.rollouts.state("m")
        assert state["outcome"] == "rolled_back"
        assert "not decided within 0.5 s" in state["reason"] and "unproven" in state["reason"]
        assert set(answered) == {"main/main-1"}


async def test_a_rollout_that_waits_says_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_file, "_OUT_S", 0.1)
    async with rolling(tmp_path) as (served, _):
        (member,) = served.gateway.pools["next"].members
        member.proof = MemberProof("next", "identity", time.monotonic)
        served.gateway.rollouts.start("m", "next", [1.0], 0.5)
        await until(lambda: ended(served))
        state = served.gateway.rollouts.state("m")
        waits = [x["text"] for x in state["events"] if x["text"].startswith("still waits")]
        assert waits == ["still waits: next-1 unproven: it has not been probed yet"]
        assert state["reason"].endswith("(next-1 unproven: it has not been probed yet)")


async def test_one_rollout_at_a_time_and_it_can_be_sent_back(tmp_path: Path) -> None:
    async with judged(
        *(drawing(), drawing()),
        canary=drawing(),
        admin={"rollouts_file": str(tmp_path / "rollouts.json")},
    ) as served:
        rollouts = served.gateway.rollouts
        with pytest.raises(RequestError, match="no canary of 'm' was rolled out"):
            rollouts.state("m")
        with pytest.raises(RequestError, match="nothing to send back"):
            rollouts.back("m")
        rollouts.start("m", "next", [1.0], 60.0)
        with pytest.raises(RequestError, match="'next' is being rolled out for 'm' already") as e:
            rollouts.start("m", "next", [1.0], 60.0)
        assert e.value.status == 409
        rollouts.back("m")
        await until(lambda: ended(served))
        assert rollouts.state("m")["reason"] == "an administrator sent it back"


async def test_a_reload_in_the_middle_changes_no_share(tmp_path: Path) -> None:
    """Not even one that makes the judgement anew, as another key for a backend does."""
    async with rolling(tmp_path) as (served, _):
        gateway = served.gateway
        gateway.rollouts.start("m", "next", [0.5, 1.0], 60.0)
        await until(lambda: gateway.rollouts.shares["m", "next"] == 0.5)
        pool = gateway.pools["next"]
        assert pool.config.judge is not None
        pool.judgement = Judgement(pool.config.judge)
        gateway.rollouts.apply(gateway.config)
        assert gateway.rollouts.shares["m", "next"] == 0.5
        await until(lambda: ended(served))
        assert gateway.rollouts.state("m")["outcome"] == "promoted"


async def test_a_canary_that_exceeds_hides_no_rollout_of_another(tmp_path: Path) -> None:
    gateway = stand_in(tmp_path, others={"other": 0.1, "idle": 0.0})
    for name in ("next", "other", "idle"):
        backends = [fake_backend(FakeRunner())]
        gateway.pools[name] = Pool.of(name, backends, gateway.config.pools[name])
    rollouts = Rollouts(gateway)
    rollouts.shares["m", "other"] = 0.0
    rollouts.start("m", "next", [1.0], 60.0)
    rollouts.shares["m", "other"] = 0.1
    for name in ("other", "idle"):
        rollouts.exceeded(gateway.pools[name])
    assert rollouts.shares == {("m", "next"): 0.0, ("m", "other"): 0.0}
    assert rollouts.state("m")["pool"] == "next"
    with pytest.raises(RequestError, match="'next' is being rolled out"):
        rollouts.start("m", "other", [1.0], 60.0)
    await rollouts.close()


@pytest.mark.parametrize(
    ("model", "pool", "steps", "message"),
    [
        ("x", "next", [1.0], "no model 'x'"),
        ("m", "nxt", [1.0], "the pool 'nxt' is no canary of 'm' (its canaries: next)"),
        ("m", "main", [1.0], "the pool 'main' is no canary of 'm'"),
        ("m", "next", [], "steps: give at most 20 shares"),
        ("m", "next", [0.5, 0.1, 1.0], "in ascending order"),
        ("m", "next", [0.0, 1.0], "each should be above 0"),
        ("m", "next", [0.1], "the last should be 1"),
    ],
)
async def test_mistakes_are_refused_in_one_line(
    tmp_path: Path, model: str, pool: str, steps: list[float], message: str
) -> None:
    rollouts = Rollouts(stand_in(tmp_path))
    with pytest.raises(RequestError) as refused:
        rollouts.start(model, pool, steps, 60.0)
    assert message in str(refused.value) and "\n" not in str(refused.value)


class StandIn:
    """A gateway that serves nothing."""

    def __init__(self, config: GatewayConfig, processes: int = 1) -> None:
        self.config = config
        self.processes = processes
        self.pools: dict[str, Any] = {}
        self.metrics = Metrics()


def stand_in(
    tmp_path: Path | None,
    *,
    url: str = "http://a",
    judge: bool = True,
    processes: int = 1,
    others: Mapping[str, float] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """`others`: the shares of more canaries. `settings`: of the canary `next`."""
    shares = {"next": 0.0} | dict(others or {})
    backends = [{"type": "vllm", "url": url}]
    pools: dict[str, Any] = {name: {"backends": backends} for name in ("main", "ref", *shares)}
    for name in shares:
        pools[name] |= {"judge": JUDGE} if judge else {}
    pools["next"] |= settings or {}
    canary = [{"pool": name, "fraction": share} for name, share in shares.items()]
    model = {"pool": "main", "canary": canary}
    admin = {} if tmp_path is None else {"rollouts_file": str(tmp_path / "rollouts.json")}
    content = {"models": {"m": model}, "pools": pools, "admin": admin}
    return StandIn(GatewayConfig.model_validate(content), processes)


def test_what_cannot_be_rolled_out_says_what_to_set(tmp_path: Path) -> None:
    for gateway, message in (
        (stand_in(None), "set admin.rollouts_file"),
        (stand_in(tmp_path, judge=False), "set pools.next.judge"),
        (stand_in(tmp_path, processes=2), "a rollout needs a single one"),
    ):
        with pytest.raises(RequestError, match=message):
            Rollouts(gateway).start("m", "next", [1.0], 60.0)


KEPT = {"promoted": 1.0, "rolled_back": 0.0}


@pytest.mark.parametrize("outcome", ["promoted", "rolled_back", "running"])
def test_a_restart_keeps_an_outcome_and_ends_what_ran(tmp_path: Path, outcome: str) -> None:
    write(tmp_path, outcome, KEPT.get(outcome, 0.0))
    rollouts = Rollouts(stand_in(tmp_path))
    assert rollouts.shares == {("m", "next"): KEPT.get(outcome, 0.0)}
    found = rollouts.state("m")
    assert found["outcome"] == ("interrupted" if outcome == "running" else outcome)


def write(tmp_path: Path, outcome: str, share: float) -> None:
    gateway = stand_in(tmp_path)
    settings = rollout_file._settings(gateway.config.pools["next"])
    record = {"model": "m", "pool": "next", "share": share, "outcome": outcome, "reason": ""}
    record |= {"at": "2026-11-27T00:00:00+00:00", "settings": settings}
    document = {"version": 1, "canaries": [record]}
    (tmp_path / "rollouts.json").write_text(json.dumps(document))


def test_an_outcome_counts_however_often_the_pool_is_proven_and_judged(tmp_path: Path) -> None:
    write(tmp_path, "promoted", 1.0)
    judge = JUDGE | {"tokens_per_minute": 5, "share": 0.5}
    proof = {"timeout_s": 120, "weights": "quantized"}  # a default that is written out
    settings: dict[str, Any] = {"judge": judge, "proof": proof}
    assert Rollouts(stand_in(tmp_path, settings=settings)).shares == {("m", "next"): 1.0}
    settings["judge"] = judge | {"max_kl": 0.9}
    assert Rollouts(stand_in(tmp_path, settings=settings)).shares == {}
    settings = {"proof": {"weights": "original"}}
    assert Rollouts(stand_in(tmp_path, settings=settings)).shares == {}


def test_an_outcome_does_not_count_for_other_backends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind the pool's name may be another checkpoint: its share is the file's."""
    write(tmp_path, "promoted", 1.0)
    assert Rollouts(stand_in(tmp_path, url="http://b")).shares == {}
    assert "does not count" in caplog.text


def test_an_outcome_counts_again_once_the_settings_are_back(tmp_path: Path) -> None:
    """As after a restart: the file says what counts, and a reload does not forget it."""
    write(tmp_path, "promoted", 1.0)
    gateway = stand_in(tmp_path)
    rollouts = Rollouts(gateway)
    rollouts.apply(stand_in(tmp_path, url="http://b").config)
    assert rollouts.shares == {} and rollouts.status("m") is None
    with pytest.raises(RequestError, match="nothing to send back"):
        rollouts.back("m")
    rollouts.apply(gateway.config)
    assert rollouts.shares == {("m", "next"): 1.0}


def test_a_canary_goes_back_even_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    """And the administrator hears that a restart would undo it."""
    write(tmp_path, "promoted", 1.0)
    rollouts = Rollouts(stand_in(tmp_path))
    with patch("os.replace", side_effect=OSError(28, "No space left on device")):
        state = rollouts.back("m")
    assert (state["outcome"], state["share"]) == ("rolled_back", 0.0)
    assert "a restart may undo this" in state["reason"] and "No space left" in state["reason"]
    with pytest.raises(RequestError, match="nothing to send back"):
        rollouts.back("m")


@pytest.mark.parametrize("content", ["", "[]", '{"version": 2, "canaries": []}', '{"a": 1}'])
def test_a_file_of_something_else_stops_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "rollouts.json").write_text(content)
    with pytest.raises(ConfigError, match=r"admin.rollouts_file: .*not what Octet writes"):
        Rollouts(stand_in(tmp_path))


def test_a_rollout_whose_file_cannot_be_written_does_not_begin(tmp_path: Path) -> None:
    gateway = stand_in(tmp_path / "absent")
    rollouts = Rollouts(gateway)
    with pytest.raises(RequestError, match="not written: No such file") as refused:
        rollouts.start("m", "next", [1.0], 60.0)
    assert refused.value.status == 503
    assert rollouts.shares == {} and rollouts.status("m") is None


CONFIG = """
models: {m: {pool: main, canary: [{pool: next, fraction: 0}]}}
pools:
  main: {backends: [{type: vllm, url: "http://127.0.0.1:9"}]}
  next:
    backends: [{type: vllm, url: "http://127.0.0.1:9"}]
    judge: {reference: REFERENCE, max_kl: 0.1}
  bf16: {backends: [{type: vllm, url: "http://127.0.0.1:9"}], PROOF}
"""


@pytest.mark.parametrize(
    ("reference", "proof", "message"),
    [
        ("bf61", "proof: {golden: g}", "judge.reference: unknown pool 'bf61'; did you mean 'bf16'"),
        ("next", "proof: {golden: g}", "judge.reference: is the pool itself"),
        ("bf16", "", "judge.reference: 'bf16' is never proven"),
    ],
)
def test_a_reference_that_cannot_judge_is_refused_at_the_start(
    tmp_path: Path, reference: str, proof: str, message: str
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(CONFIG.replace("REFERENCE", reference).replace("PROOF", proof))
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert message in str(refused.value)
