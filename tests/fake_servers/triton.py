"""A fake Triton with one decoupled model: the vLLM backend, or our own Python entry."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc.aio
import numpy as np
from aiohttp import web
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from octet.errors import RequestError
from serve.engine.request import Finished, GenerateRequest
from tests.fake_servers.base import FakeServer, asked, fault_of

__all__ = ["FakeTriton", "tensors"]

CONTEXT = 512  # tokens, of the fake engine
_CONTENTS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
}


class FakeTriton(FakeServer, pb_grpc.GRPCInferenceServiceServicer):
    """The vLLM backend's interface, or with `token_ids` our Python entry's.

    `!stub` fails as a dead Python process does, `!internal` as an exception in the model, `!full`
    as a queue policy does, `!die` after two tokens, `!wait` never answers, `!endless` does not say
    why it ended, `!nonsense` leaves contents out.
    """

    FLAGS = (
        "stream",
        "exclude_input_in_output",
        "return_finish_reason",
        "return_num_input_tokens",
        "return_num_output_tokens",
    )

    def __init__(self, delay_s: float = 0.0, *, token_ids: bool = True, logprobs: bool = True):
        super().__init__(delay_s)
        self.batched = False  # whether shapes begin with the batch
        self.decoupled = True
        self.platform = "python"
        self.instances = 1
        self.parameters: dict[str, str] = {}
        self.token_ids = token_ids
        self.inputs = {"text_input": "BYTES", "sampling_parameters": "BYTES"}
        self.inputs |= dict.fromkeys(self.FLAGS, "BOOL")
        self.inputs |= {"input_ids": "INT64"} if token_ids else {}
        self.inputs |= {"return_logprobs": "BOOL"} if logprobs else {}
        self.metadata: list[dict[str, str]] = []  # of each call
        self.metrics = ""  # the page, on HTTP
        self.metrics_url = ""
        self.executed = 0  # requests, since the model was loaded

    async def start(self, port: int = 0) -> None:
        await self.engine.start()
        self._server = grpc.aio.server()
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        self._http = web.AppRunner(app)
        await self._http.setup()
        await web.TCPSite(self._http, "127.0.0.1", 0).start()
        self.metrics_url = f"http://127.0.0.1:{self._http.addresses[0][1]}/metrics"

    async def stop(self) -> None:
        self.runner.gate.set()
        await self._server.stop(grace=0)
        await self._http.cleanup()
        await self.engine.close()

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def ServerMetadata(self, _request: Any, _context: Any) -> Any:
        return pb.ServerMetadataResponse(name="triton", version="2.51.0")

    async def ModelReady(self, request: Any, _context: Any) -> Any:
        return pb.ModelReadyResponse(ready=request.name == "fake")

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        await self._require_known(request.name, context)
        batch = [-1] if self.batched else []
        listed = [
            pb.ModelMetadataResponse.TensorMetadata(
                name=name, datatype=datatype, shape=[*batch, *self.dims(name)]
            )
            for name, datatype in self.inputs.items()
        ]
        return pb.ModelMetadataResponse(name="fake", inputs=listed)

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        await self._require_known(request.name, context)
        config = model_config_pb2.ModelConfig(name="fake", platform=self.platform)
        config.model_transaction_policy.decoupled = self.decoupled
        config.instance_group.add(count=self.instances)
        for name, value in self.parameters.items():
            config.parameters[name].string_value = value
        return pb.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        await self._require_known(request.name, context)
        answer = pb.ModelStatisticsResponse()
        stats = answer.model_stats.add(name="fake", version="1", execution_count=self.executed)
        stats.inference_stats.success.count = self.executed
        return answer

    def reload(self) -> None:
        """Its model is loaded again: nothing shows it but its statistics."""
        self.executed = 0

    async def _require_known(self, name: str, context: Any) -> None:
        if name != "fake":
            text = f"Request for unknown model: '{name}' is not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)

    def dims(self, name: str) -> list[int]:
        """The dimensions of an input, as its configuration has them: without the batch."""
        return [-1] if name == "input_ids" else [1]

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> Any:
        self.running += 1
        self.executed += 1
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            async for message in requests:
                async for response in self._answer(message):
                    yield response
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, message: Any) -> AsyncIterator[Any]:
        if message.model_name != "fake":
            text = f"Request for unknown model: '{message.model_name}' is not found"
            yield pb.ModelStreamInferResponse(error_message=text)
            return
        try:
            body = self.read({t.name: self._elements(t) for t in message.inputs})
        except ValueError as error:
            yield pb.ModelStreamInferResponse(error_message=str(error))
            return
        self.requests.append(body | {"inputs": sorted(t.name for t in message.inputs)})
        fault = fault_of(body)
        if failure := await _failure(fault):
            yield pb.ModelStreamInferResponse(error_message=failure)
            return
        limit = body.get("max_tokens") or CONTEXT  # past the context there is nothing: no mistake
        body |= {"model": "fake", "max_tokens": min(limit, CONTEXT)}
        wanted = asked(body, self.engine, len(self.requests))
        count = 0
        try:
            async for event in self.engine.generate(wanted):
                count += 1
                if fault == "!die" and count == 3:
                    yield pb.ModelStreamInferResponse(error_message="the model raised")
                    return
                if fault == "!endless" and isinstance(event, Finished):
                    break
                answer = self.write(event, wanted, body)
                if fault == "!nonsense" and count == 3:
                    del answer.raw_output_contents[1:]
                yield pb.ModelStreamInferResponse(infer_response=answer)
                if body.get("stopped"):
                    break
        except RequestError as error:
            yield pb.ModelStreamInferResponse(error_message=self.refusal(error))
            return
        final = pb.ModelInferResponse()
        final.parameters["triton_final_response"].bool_param = True
        yield pb.ModelStreamInferResponse(infer_response=final)

    def _elements(self, tensor: Any) -> list[Any]:
        """Raises ValueError for what Triton would refuse: names, datatypes, shapes."""
        if tensor.name not in self.inputs:
            raise ValueError(f"unexpected inference input '{tensor.name}' for model 'fake'")
        if tensor.datatype != self.inputs[tensor.name]:
            raise ValueError(f"inference input '{tensor.name}' data-type is '{tensor.datatype}'")
        dims, shape = self.dims(tensor.name), list(tensor.shape)
        wanted = [1, *dims] if self.batched else dims
        same = len(shape) == len(wanted)
        if not same or any(w not in (-1, s) for w, s in zip(wanted, shape, strict=True)):
            raise ValueError(f"unexpected shape for input '{tensor.name}': {shape}")
        elements = list(getattr(tensor.contents, _CONTENTS[tensor.datatype]))
        if len(elements) != int(np.prod(shape)):
            raise ValueError(f"unexpected number of elements for input '{tensor.name}'")
        return [e.decode() if isinstance(e, bytes) else e for e in elements]

    def read(self, inputs: dict[str, list[Any]]) -> dict[str, Any]:
        """The request as an OpenAI body. Raises ValueError."""
        body: dict[str, Any] = json.loads(inputs["sampling_parameters"][0])
        if not self.token_ids:  # vLLM's backend drops nulls, and vLLM has a default of 16
            body = {name: value for name, value in body.items() if value is not None}
        return body | {"prompt": inputs.get("input_ids") or inputs["text_input"][0]}

    def write(self, event: Any, wanted: GenerateRequest, _body: dict[str, Any]) -> Any:
        """One response as the vLLM backend writes it: counts are of this response alone."""
        ended = isinstance(event, Finished)
        found: dict[str, Any] = {
            "text_output": "" if ended else event.text,
            "finish_reason": event.reason if ended else "None",
        }
        if ended and self.token_ids:
            found["stop_reason"] = json.dumps(event.stop_reason)
        if wanted.logprobs is not None and not ended:
            positions = [
                {str(t.token_id): _entry(t) for t in (p.chosen, *p.top)} for p in event.logprobs
            ]
            found["logprobs"] = json.dumps(positions)
        found["num_output_tokens"] = np.uint32(0 if ended else len(event.token_ids))
        if ended:
            found["num_input_tokens"] = np.uint32(event.usage.prompt_tokens)
        return tensors(found)

    def refusal(self, error: RequestError) -> str:
        """Our entry's is JSON; the vLLM backend's is vLLM's own text, for the one mistake here."""
        if self.token_ids:
            return json.dumps({"message": str(error), "param": error.param, "code": error.code})
        return (
            "Error generating stream: The decoder prompt (length 600) is longer than the maximum "
            "model length of 512. Make sure that `max_model_len` is no smaller."
        )


async def _failure(fault: str) -> str:
    if fault == "!stub":
        text = "Failed to process the request(s) for model 'fake_0', message: Stub process "
        return text + "'fake_0_0' is not healthy."
    if fault == "!internal":
        return "the model raised"
    if fault == "!full":
        return "Exceeds maximum queue size"
    if fault == "!wait":
        await asyncio.sleep(3600)
    return ""


def tensors(found: Mapping[str, Any]) -> Any:
    """A response with these outputs: text, or numpy numbers and arrays."""
    names = {"u4": "UINT32", "i4": "INT32", "f4": "FP32"}
    response = pb.ModelInferResponse(model_name="fake")
    for name, value in found.items():
        if isinstance(value, str):
            datatype, shape = "BYTES", [1]
            raw = len(value.encode()).to_bytes(4, "little") + value.encode()
        else:
            array = np.atleast_1d(value)
            datatype, shape, raw = names[array.dtype.str[1:]], list(array.shape), array.tobytes()
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(raw)
    return response


def _entry(token: Any) -> dict[str, Any]:
    return {"logprob": token.logprob, "rank": 1, "decoded_token": token.text}
