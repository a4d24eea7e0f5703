"""Pools whose backends can do different things: a request goes to one that can do what it asks."""

from dataclasses import replace
from typing import Any

import pytest

from serve.backends.triton_grpc import TritonBackend
from tests.fake_servers import FakeTriton, running
from tests.fakes import fake_backend
from tests.serve.api.request.test_attempts import BODY, pools
from tests.serve.in_process import in_process
from tests.serve.upstreams import Scripted, whole
from tests.triton_config import triton_at

TURNS = pools(routing={"policy": "round_robin"})
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", BODY | {"prompt": [104, 105]})],
    ids=["a conversation", "token ids"],
)
async def test_what_wants_a_tokenizer_goes_to_who_has_one(path: str, body: dict[str, Any]) -> None:
    able = Scripted(whole())
    async with running(FakeTriton(token_ids=False)) as triton:
        bare = TritonBackend("fake", triton_at(triton.url))
        async with in_process(("fake", [bare, able]), pools=TURNS) as served:
            for _ in range(4):  # whoever is asked first
                assert (await served.post(path, body))[0] == 200
        assert able.asked == 4


class Without(Scripted):
    """vLLM from which the model was taken, as an adapter may be."""

    async def relay(self, path: str, body: bytes, headers: Any) -> Any:
        error = b'{"error":{"message":"The model `fake` does not exist.","code":404}}'
        self.outcomes = (error,)
        return replace(await super().relay(path, body, headers), status=404)


async def test_who_does_not_have_the_model_is_passed_over() -> None:
    without, able = Without(), Scripted(whole())
    async with in_process(("fake", [without, able]), pools=TURNS) as served:
        for _ in range(4):
            assert (await served.post("/v1/completions", BODY))[0] == 200
        assert (without.asked, able.asked) == (2, 4)
    async with in_process(("fake", [without, Without()]), pools=TURNS) as served:
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
        bare = TritonBackend("fake", triton_at(triton.url))
        async with in_process(("fake", [bare, fake_backend()]), pools=TURNS) as served:
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
    async with in_process(("fake", [fake_backend(), able]), pools=TURNS) as served:
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
