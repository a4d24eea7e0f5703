"""A hostile Triton: what its model answers over gRPC."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from serve.backends.bounds import MAX_EVENT
from tests.fake_servers import FakeTriton, running
from tests.serve.in_process import in_process
from tests.serve.openai_clients import triton_to

Outputs = dict[str, tuple[str, bytes]]  # name: datatype and raw contents


def text(value: str | bytes) -> tuple[str, bytes]:
    raw = value if isinstance(value, bytes) else value.encode()
    return "BYTES", len(raw).to_bytes(4, "little") + raw


def number(value: int, datatype: str = "INT64") -> tuple[str, bytes]:
    return datatype, value.to_bytes(8, "little", signed=True)


TOKEN: Outputs = {"text_output": text("a"), "num_output_tokens": number(1)}
END: Outputs = {"finish_reason": text("stop"), "num_input_tokens": number(3)}
# The responses of one request; a text is an error of the model.
ANSWERS: dict[str, list[Outputs | str]] = {
    "sound": [TOKEN, TOKEN | END],
    "nothing": [],
    "only empty ones": [{}, {}, {}],
    "no reason": [TOKEN],
    "an odd reason": [TOKEN, END | {"finish_reason": text("\x1b[2J")}],
    "aborted": [TOKEN, END | {"finish_reason": text("abort")}],
    "an error": ["it failed"],
    "a late error": [TOKEN, "it failed \x1b[2J"],
    "a long error": ["x" * 5_000_000],
    "an error of our own": [json.dumps({"message": {"a": 1}, "param": [1], "code": {}})],
    "half an error of our own": [json.dumps({"message": "m"})],
    "negative counts": [TOKEN, END | {"num_output_tokens": number(-(10**12))}],
    "huge counts": [TOKEN, END | {"num_input_tokens": number(2**62)}],
    "counts as text": [TOKEN, END | {"num_input_tokens": text("3")}],
    "a text of numbers": [{"text_output": number(7)}, END],
    "a reason of numbers": [TOKEN, {"finish_reason": number(7)}],
    "half a number": [TOKEN, END | {"num_input_tokens": ("INT64", b"abc")}],
    "a text that is cut off": [{"text_output": ("BYTES", b"\xff\xff\xff\x7fabc")}, END],
    "not UTF-8": [{"text_output": text(b"\xff\xfe")}, TOKEN | END],
    "many texts": [{"text_output": ("BYTES", bytes(4_000_000))}, END],
    "many numbers": [{"num_output_tokens": ("INT64", bytes(4_000_000))}, END],
    "an unknown datatype": [{"text_output": ("FP64", bytes(8))}, TOKEN | END],
    "too large a message": [{"text_output": text("x" * (MAX_EVENT + 1))}, END],
    "a large text": [{"text_output": text("x" * 1_000_000)}, TOKEN | END],
    "log-probabilities": [TOKEN | {"logprobs": text("[1, 2]")}, END],
    "log-probabilities without end": [TOKEN | {"logprobs": text("[" * 2_000_000)}, END],
    "log-probabilities that are none": [
        TOKEN | {"logprobs": text('[{"5": {"logprob": "a"}}]')},
        END,
    ],
    "a stop reason that is no JSON": [TOKEN | END | {"stop_reason": text("{")}],
}


class HostileTriton(FakeTriton):
    answer: list[Outputs | str]

    async def _answer(self, _message: Any) -> AsyncIterator[Any]:
        for outputs in self.answer:
            if isinstance(outputs, str):
                yield pb.ModelStreamInferResponse(error_message=outputs)
                continue
            response = pb.ModelInferResponse()
            for name, (datatype, raw) in outputs.items():
                response.outputs.add(name=name, datatype=datatype, shape=[1])
                response.raw_output_contents.append(raw)
            yield pb.ModelStreamInferResponse(infer_response=response)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_hostile_triton(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with running(HostileTriton()) as triton:
        backends = [triton_to(triton.url)]
        pools = {"fake": {"ejection": {"failures": 10**6}, "health": {"probe_after_s": None}}}
        async with in_process(("fake", backends), pools=pools) as served:
            for name, answer in ANSWERS.items():
                triton.answer = answer
                logprobs = {"logprobs": 1} if "log-prob" in name else {}
                body = {"model": "fake", "prompt": "abc", "stream": stream, **logprobs}
                reply = await served.request("/v1/completions", body)
                last = reply.body
                if reply.headers["content-type"].startswith("text/event-stream"):
                    last = reply.body.split(b"\n\n")[-2].removeprefix(b"data: ")
                    assert last == b"[DONE]" or "error" in json.loads(last), name
                else:
                    assert (reply.status < 400) == ("error" not in json.loads(last)), name
                assert b"internal_error" not in last, name
                sound = name in ("sound", "not UTF-8", "an unknown datatype", "a large text")
                assert (b"[DONE]" in last or b"choices" in last) == sound, name
    # The server is in this process, too, and logs that its calls were cancelled.
    ours = [r for r in caplog.records if r.name.startswith("serve")]
    assert not [r for r in ours if r.levelno >= logging.ERROR]
