"""A backend that serves while what it is proven with changes."""

import asyncio
from typing import Any

import pytest

from serve.config import HttpConfig, PoolConfig
from serve.routing import pool as pool_module
from tests.serve.proof.exams import RECORD_TOKENS, FakeExam, FakeExams
from tests.serve.proof.scene import ADDRESS, Scene, play, played
from tests.serve.routing.stand_ins import Server


async def examined(scene: Scene, exam: FakeExam | None, **settings: Any) -> Any:
    """What is ready to be taken over: `swap`'s arguments."""
    config = PoolConfig.model_validate({"health": {"probe_after_s": None}, "proof": settings})
    exams = FakeExams(exam, config.proof)
    provers = await scene.pool.examined(scene.pool.members, exams)
    return config, {"exams": exams, "provers": provers}


def commit(scene: Scene, ready: Any) -> None:
    config, arguments = ready
    scene.pool.swap(config, scene.pool.members, **arguments)


@pytest.mark.parametrize("proven_before", [True, False])
@pytest.mark.parametrize("idle_close", [True, False])
def test_a_life_that_came_after_the_examination_is_asked_for_itself(
    idle_close: bool, proven_before: bool
) -> None:
    new = FakeExam(key="new")

    async def act(scene: Scene) -> None:
        ready = await examined(scene, new)
        new.says[ADDRESS] = "worse"
        scene.exam.says[ADDRESS] = "worse"
        if idle_close:
            scene.server.close_idle()
        else:
            scene.server.die()
            await asyncio.sleep(0.001)
            scene.server.restart()
        await asyncio.sleep(0.9)
        commit(scene, ready)
        assert not scene.serves() and scene.member.standing == "unproven"
        await scene.until("refused", 2)

    play(act, enabled=proven_before)


def test_one_that_lives_on_serves_by_what_it_was_examined_with() -> None:
    new = FakeExam(key="new", identity="b" * 64)

    async def act(scene: Scene) -> None:
        commit(scene, await examined(scene, new))
        assert scene.serves() and scene.pool.proven.artifact == "b" * 64
        await asyncio.sleep(1000)
        assert scene.serves() and len(new.asked) == 1
        assert scene.proof.tokens == 2 * 24 * RECORD_TOKENS  # what was spent stays spent
        assert scene.proof.outcomes["as_expected"] == 2

    play(act)


@played()
async def test_proof_that_is_no_longer_wanted_is_not_asked_for(scene: Scene) -> None:
    commit(scene, await examined(scene, None, enabled=False))
    scene.exam.says[ADDRESS] = "worse"
    await asyncio.sleep(1000)
    assert scene.serves() and scene.member.proof is None and scene.asked == 1


def test_whether_log_probabilities_are_needed_is_taken_over_at_once() -> None:
    exam = FakeExam(alternatives=0)

    async def act(scene: Scene) -> None:
        assert scene.serves()
        waiting = scene.member.lease(1)
        commit(scene, await examined(scene, exam, without_logprobs="refuse"))
        assert not scene.serves() and scene.member.standing == "refused" and waiting.maybe_restarted
        waiting.release()
        commit(scene, await examined(scene, exam, without_logprobs="admit"))
        await scene.until("in", 2)

    play(act, exam, without_logprobs="admit")


@played(every_s=86400)
async def test_a_shorter_interval_is_not_waited_for_as_long_as_the_one_before(scene: Scene) -> None:
    scene.serve(10_000_000)
    commit(scene, await examined(scene, scene.exam, every_s=10))
    await asyncio.sleep(60)
    assert scene.asked >= 5


@pytest.mark.parametrize(
    ("settings", "least", "most"), [({}, 10, 11), ({"patience_s": 90}, 59, 65)]
)
def test_who_joins_is_waited_for_as_long_as_others_can_wait(
    settings: Any, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else can be changed meanwhile; it gets no request before it is proven anyway."""
    entry = HttpConfig(type="vllm", url="http://10.0.0.6:8000", model="m")
    joining = Server("http://10.0.0.6:8000")
    monkeypatch.setattr(pool_module, "make_backend", lambda _model, _config: joining)

    async def act(scene: Scene) -> None:
        scene.exam.busy.add(joining.name)
        scene.exam.seconds = 1000
        began = asyncio.get_running_loop().time()
        member = await scene.pool.prepare(entry, **settings)
        assert least <= asyncio.get_running_loop().time() - began <= most
        scene.pool.swap(scene.pool.config, [*scene.pool.members, member])
        assert member.standing == "unproven" and scene.serves()

    play(act)
    assert joining.connected == 0
