"""Tests hostile messages and tensors of servers: shown on one line, and parsed quickly."""

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from serve.backends.bounds import MAX_EVENT
from serve.backends.openai_errors import failure, from_event
from serve.backends.triton_errors import error_of
from serve.backends.triton_tensors import read_outputs
from tests.serve.longest_step import MOST_S, least_seconds

ESCAPES = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202e\u2028\r\nnext"
SOURCES: dict[str, Callable[[str], Exception]] = {
    "an error object": lambda text: failure(
        "b", 400, {}, json.dumps({"error": {"message": text}}).encode()
    ),
    "a text": lambda text: failure("b", 500, {}, text.encode()),
    "an error that is no object": lambda text: failure("b", 500, {}, json.dumps([text]).encode()),
    "an event": lambda text: from_event("b", {"message": text}),
    "an event's refusal": lambda text: from_event("b", {"message": text, "code": 400}),
    "Triton": lambda text: error_of("b", grpc.StatusCode.INTERNAL, text),
    "Triton's model": lambda text: error_of("b", None, text),
    "our own entry": lambda text: error_of(
        "b", None, json.dumps({"message": text, "param": None, "code": None})
    ),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_servers_message_cannot_control_the_terminal(source: Callable[[str], Exception]) -> None:
    shown = str(source(f"no such thing: {ESCAPES}"))
    assert shown.isprintable() and "no such thing" in shown


@pytest.mark.parametrize("text", ["x" * 8_000_000, "[" * 8_000_000, " " * 8_000_000], ids=[0, 1, 2])
@pytest.mark.parametrize("code", [None, grpc.StatusCode.INTERNAL])
def test_a_long_message_takes_no_time(text: str, code: Any) -> None:
    def shorten() -> None:
        assert len(str(error_of("b", code, text))) < 3000

    assert least_seconds(shorten) < MOST_S


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL", "INT32", "INT64", "FP32"])
def test_a_tensor_of_many_elements_is_not_read(datatype: str) -> None:
    response = pb.ModelInferResponse(raw_output_contents=[bytes(MAX_EVENT)])
    response.outputs.add(name="text_output", datatype=datatype)

    def read() -> None:
        with pytest.raises(ValueError, match="text_output has more than 16384 elements"):
            read_outputs(response)

    assert least_seconds(read) < MOST_S
