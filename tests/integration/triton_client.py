"""A plain client of one Triton: gRPC for requests, HTTP for control and counters."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

from tritonclient.grpc import service_pb2

from tests.integration.servers.launch import TritonServer

__all__ = ["Refused", "counters", "load_model", "pieces", "text_request"]


class Refused(Exception):
    """What Triton said instead of an answer."""


def text_request(model: str, text: str, *, stream: bool, **sampling: Any) -> Any:
    """A request of the tensors that the Python and the vLLM entry share."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in (("text_input", text), ("sampling_parameters", json.dumps(sampling))):
        tensor = message.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value.encode())
    tensor = message.inputs.add(name="stream", datatype="BOOL", shape=[1])
    tensor.contents.bool_contents.append(stream)
    tensor = message.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
    tensor.contents.bool_contents.append(True)
    return message


async def pieces(stub: Any, message: Any) -> AsyncIterator[str]:
    """Texts of the responses as they come; leaving the iterator cancels the request.

    Raises Refused with what Triton said.
    """
    call = stub.ModelStreamInfer()
    try:
        await call.write(message)
        await call.done_writing()
        async for answer in call:
            if answer.error_message:
                raise Refused(answer.error_message)
            response = answer.infer_response
            names = [output.name for output in response.outputs]
            if "text_output" in names:
                content = response.raw_output_contents[names.index("text_output")]
                yield content[4:].decode()  # one string, behind its length
    finally:
        call.cancel()


def load_model(server: TritonServer, name: str) -> str:
    """Asks an explicitly controlled server for a model; the reason if it is refused, else ""."""
    url = f"http://127.0.0.1:{server.http_port}/v2/repository/models/{name}/load"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["error"])


def counters(server: TritonServer, model: str) -> dict[str, float]:
    """Triton's metrics of one model, summed over their other labels."""
    with urllib.request.urlopen(server.metrics_url, timeout=60) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        match = re.fullmatch(r'(nv_\w+)\{.*model="([^"]+)".*\} (\S+)', line)
        if match and match[2] == model:
            found[match[1]] = found.get(match[1], 0.0) + float(match[3])
    return found
