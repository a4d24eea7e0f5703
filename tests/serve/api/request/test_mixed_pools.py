"""Pools whose backends can do different things: a request goes to one that can do what it asks."""

from typing import Any

import pytest

from tests.fake_servers import FakeTriton, running
from tests.fakes import fake_backend
from tests.serve.api.request.test_attempts import BODY, TURNS, pools
from tests.serve.in_process import in_process
from tests.serve.openai_clients import triton_to
from tests.serve.upstreams import Scripted, whole

TURNED = pools(routing=TURNS)
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


# vLLM from which the model was taken, as an adapter may be.
WITHOUT = (404, b'{"error":{"message":"The model `fake` does not exist.","code":404}}')


async def test_who_does_not_have_the_model_is_passed_over() -> None:
    without, able = Scripted(WITHOUT), Scripted(whole())
    async with in_process(("fake", [without, able]), pools=TURNED) as served:
        for _ in range(4):
            assert (await served.post("/v1/completions", BODY))[0] == 200
        assert (without.asked, able.asked) == (2, 4)
    async with in_process(("fake", [without, Scripted(WITHOUT)]), pools=TURNED) as served:
        status, answer = await served.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert answer["error"]["message"] == "The model `fake` does not exist."


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", BODY | {"prompt": [104, 105]}),
        ("/tokenize", {"model": "fake", "prompt": "hi"}),
    ],
    ids=["a conversation", "token ids", "a text to tokenize"],
)
async def test_while_the_one_with_a_tokenizer_is_full_nobody_is_told_that_there_is_none(
    path: str, body: dict[str, Any]
) -> None:
    async with running(FakeTriton(token_ids=False)) as triton:
        bare = triton_to(triton.url)
        async with in_process(("fake", [bare, fake_backend()]), pools=TURNED) as served:
            able = served.gateway.pools["fake"].members[1]
            able.max_in_flight = 0
            for _ in range(2):
                assert (await served.post(path, body))[0] == 503
            status, answer = await served.post("/v1/completions", BODY | {"min_p": 0.5})
            assert (status, answer["error"]["param"]) == (400, "min_p")  # of both kinds
            able.max_in_flight = None
            able.changed()
            assert (await served.post(path, body))[0] == 200


@pytest.mark.parametrize("out", ["unreachable", "ejected"])
async def test_while_the_one_that_can_is_out_nobody_is_told_that_it_cannot_be_done(
    out: str,
) -> None:
    """A 400 would tell clients never to ask again."""
    able = Scripted(whole())
    wanted = BODY | {"min_p": 0.5}  # which the embedded engine refuses
    async with in_process(("fake", [fake_backend(), able]), pools=TURNED) as served:
        member = served.gateway.pools["fake"].members[1]
        if out == "unreachable":
            member.go_out("away", reachable=False)
        else:
            member.breaker.trip()
        reply = await served.request("/v1/completions", wanted)
        assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["code"] == "backend_unavailable"
        member.come_in()
        member.breaker.reset()
        assert (await served.post("/v1/completions", wanted))[0] == 200
    async with in_process(("fake", [fake_backend()])) as served:
        status, answer = await served.post("/v1/completions", wanted)
        assert (status, answer["error"]["param"]) == (400, "min_p")
