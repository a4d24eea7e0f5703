"""Triton over gRPC streaming: the vLLM backend's interface, and our own Python entry's.

One ModelStreamInfer call a request, on a shared channel. The generated stubs are used directly:
tritonclient's own asyncio client drops request parameters and the status of errors. An error of the
model comes as a message of the stream, without a status: our own entry's refusals are JSON, which
tells a bad request from a broken model. (The header `triton_grpc_error` would give a status; but
with it Triton 2.51 crashes after a few refused requests.)
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from octet.errors import BackendError, BackendUnavailable, RequestError
from serve.backends.base import PROBE, LoadReport
from serve.backends.held import hold_open
from serve.config import TritonConfig
from serve.tokenizer import Tokenizer
from serve.types import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)

__all__ = ["TritonBackend"]

READY_TIMEOUT_S = 2.0
_REPORTS = ("finish_reason", "num_input_tokens", "num_output_tokens")


class TritonBackend:
    """One decoupled model of one Triton server."""

    accepts_extra = False
    context_length: int | None = None  # Triton does not say; the model behind it refuses

    def __init__(self, model: str, config: TritonConfig) -> None:
        self.name = f"triton {config.url}"
        self.models = (model,)
        self._model = config.model or model
        self._config = config
        self._tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else None
        self._channel: grpc.aio.Channel | None = None
        self._inputs: frozenset[str] | None = None  # of the model, once its metadata was read

    async def start(self) -> None:
        self._channel = grpc.aio.insecure_channel(
            self._config.url,
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        self._stub = pb_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(grace=None)
            self._channel = None

    async def ready(self) -> bool:
        """What Triton says of the model: it says ready of a Python model whose process died."""
        if self._channel is None:
            return False
        try:
            request = pb.ModelReadyRequest(name=self._model)
            answer = await self._stub.ModelReady(request, timeout=READY_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.ready)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    async def load(self) -> LoadReport | None:
        return None

    async def probe(self) -> None:
        request = GenerateRequest(
            request_id="probe",
            model=self._model,
            prompt=PROBE,
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
        )
        try:
            async with aclosing(self.generate(request)) as events:
                async for _ in events:
                    pass
        except RequestError as error:  # the request is ours: no client made a mistake
            raise BackendUnavailable(
                f"{self.name}: refuses to generate a token: {error}", kind="failed"
            ) from error

    async def hold(self) -> None:
        host, _, port = self._config.url.rpartition(":")
        await hold_open(
            self.name,
            host.strip("[]"),
            int(port),
            tls=False,
            timeout_s=self._config.connect_timeout_s,
        )

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str | tuple[int, ...]:
        if self._tokenizer is None:
            raise RequestError(
                f"{self.name} has no chat template: give the backend a tokenizer, "
                "or send the prompt to /v1/completions",
                param="messages",
            )
        return self._tokenizer.chat_prompt(messages)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        if self._channel is None:
            raise BackendUnavailable(f"{self.name}: not started, or closed")
        inputs = await self._model_inputs()
        message = self._message(request, inputs)
        call = self._stub.ModelStreamInfer()
        started = False
        answer = _Answer(request)
        try:
            await call.write(message)
            await call.done_writing()
            async for response in call:
                if response.error_message:
                    raise self._error(None, response.error_message, started)
                delta = answer.read(_outputs(response.infer_response))
                if delta is not None:
                    started = True
                    yield delta
        except grpc.aio.AioRpcError as error:
            raise self._error(error.code(), error.details() or "", started) from error
        except asyncio.InvalidStateError as error:  # the call ended while the request was written
            code, details = await call.code(), await call.details()
            raise self._error(code, details or str(error), started) from error
        finally:
            call.cancel()  # dropping the call would leave the model running
        yield answer.finished(self.name)

    async def _model_inputs(self) -> frozenset[str]:
        """The names of the model's inputs; asked once."""
        if self._inputs is None:
            request = pb.ModelMetadataRequest(name=self._model)
            timeout = self._config.connect_timeout_s
            try:
                metadata = await self._stub.ModelMetadata(request, timeout=timeout)
            except grpc.aio.AioRpcError as error:
                details = error.details() or error.code().name
                raise BackendUnavailable(f"{self.name}: {details}") from error
            self._inputs = frozenset(tensor.name for tensor in metadata.inputs)
        return self._inputs

    def _message(self, request: GenerateRequest, inputs: frozenset[str]) -> pb.ModelInferRequest:
        """Raises RequestError for what the model behind Triton has no input for."""
        if request.echo:
            raise RequestError(f"'echo' is not supported by {self.name}", param="echo")
        message = pb.ModelInferRequest(model_name=self._model, id=request.request_id)
        prompt = request.prompt
        if not isinstance(prompt, str) and "input_ids" in inputs:
            ids = message.inputs.add(name="input_ids", datatype="INT64", shape=[len(prompt)])
            ids.contents.int64_contents.extend(prompt)
        else:
            text = prompt if isinstance(prompt, str) else self._as_text(prompt)
            _add_text(message, "text_input", text)
        _add_text(message, "sampling_parameters", json.dumps(_sampling(request)))
        flags = {"stream": True, "exclude_input_in_output": True}
        flags |= {f"return_{report}": True for report in _REPORTS}
        if request.logprobs is not None:
            if "return_logprobs" not in inputs:
                reason = f"the model '{self._model}' of {self.name} does not return any"
                raise RequestError(f"'logprobs': {reason}", param="logprobs")
            flags["return_logprobs"] = True
        for name, value in flags.items():
            if name in inputs:
                tensor = message.inputs.add(name=name, datatype="BOOL", shape=[1])
                tensor.contents.bool_contents.append(value)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        return message

    def _as_text(self, ids: tuple[int, ...]) -> str:
        """A text that the model's tokenizer turns into exactly `ids`. Raises RequestError.

        The tokenizer at the other end may put a BOS in front, so one in `ids` is left out.
        """
        if self._tokenizer is None:
            raise RequestError(
                f"{self.name} takes text, not token ids: give the backend a tokenizer",
                param="prompt",
            )
        for start in (0, 1):
            text = str(self._tokenizer.inner.decode(list(ids[start:]), skip_special_tokens=False))
            if tuple(self._tokenizer.encode(text)) == ids:
                return text
        raise RequestError(
            f"{self.name} takes text, and no text has exactly these token ids", param="prompt"
        )

    def _error(self, code: grpc.StatusCode | None, details: str, started: bool) -> Exception:
        """What a failed call means for the request.

        A dead model process keeps its model "ready" and says so in the message alone.
        """
        line = f"{self.name}: {' '.join(details.split())}"
        gone = (
            code == grpc.StatusCode.UNAVAILABLE
            or "is not healthy" in details
            or "Request for unknown model" in details
        )
        if gone:
            self._inputs = None  # the model may come back as another
            return BackendError(line) if started else BackendUnavailable(line)
        refusal = None if started else _refusal(details)
        return refusal or BackendError(line)


class _Answer:
    """Reads the responses of one request: deltas as they come, the counts at the end."""

    def __init__(self, request: GenerateRequest) -> None:
        self._logprobs = request.logprobs
        self._reason = ""
        self._stop_reason: str | int | None = None
        self._read = self._written = 0
        self._offset = 0  # characters before the next token

    def read(self, outputs: dict[str, Any]) -> Delta | None:
        """The delta of one response, or None if it brings no text, token or log-probability."""
        reason = outputs.get("finish_reason", "")
        if reason and reason != "None":  # the vLLM backend writes Python's None until the end
            self._reason = reason
        if "stop_reason" in outputs:  # our own entry's, as JSON
            self._stop_reason = json.loads(outputs["stop_reason"])
        self._read = outputs.get("num_input_tokens", self._read)
        self._written += outputs.get("num_output_tokens", 0)
        text = outputs.get("text_output", "")
        positions = None
        if self._logprobs is not None:
            positions = tuple(
                map(self._position, json.loads(outputs.get("logprobs") or "[]") or ())
            )
        token_ids = tuple(p.chosen.token_id for p in positions or ())
        if not text and not token_ids:
            return None
        return Delta(text, token_ids, positions)

    def finished(self, name: str) -> Finished:
        reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
        if self._reason not in reasons:
            said = f"with '{self._reason}'" if self._reason else "without a finish_reason"
            raise BackendError(f"{name}: the answer ended {said}")
        return Finished(reasons[self._reason], Usage(self._read, self._written), self._stop_reason)

    def _position(self, entries: dict[str, dict[str, Any]]) -> PositionLogprobs:
        """One position: token id -> {logprob, rank, decoded_token}, the chosen token first.

        Our own entry adds `bytes`, and to the chosen token its `text_offset`.
        """
        tokens = [
            TokenLogprob(int(i), e.get("decoded_token") or "", _bytes_of(e), e["logprob"])
            for i, e in entries.items()
        ]
        best = sorted(tokens, key=lambda token: -(token.logprob or 0.0))[: self._logprobs]
        chosen, first = tokens[0], next(iter(entries.values()))
        offset = first.get("text_offset", self._offset)
        self._offset = offset + len(chosen.text)
        return PositionLogprobs(chosen, tuple(best), offset)


def _refusal(details: str) -> RequestError | None:
    """What our own entry says of a request that it refuses: JSON, with the field at fault."""
    try:
        error = json.loads(details)
        return RequestError(str(error["message"]), param=error["param"], code=error["code"])
    except (ValueError, TypeError, KeyError):
        return None


def _bytes_of(entry: dict[str, Any]) -> bytes:
    if "bytes" in entry:
        return bytes(entry["bytes"])
    return str(entry.get("decoded_token") or "").encode()


def _sampling(request: GenerateRequest) -> dict[str, Any]:
    """vLLM's SamplingParams, as JSON; `max_tokens: null` runs to the end of the context."""
    parameters: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
    }
    optional = {
        "seed": request.seed,
        "stop": list(request.stop) or None,
        "stop_token_ids": list(request.stop_token_ids) or None,
        "logprobs": request.logprobs,
        "ignore_eos": request.ignore_eos or None,
    }
    return parameters | {name: value for name, value in optional.items() if value is not None}


def _add_text(message: pb.ModelInferRequest, name: str, text: str) -> None:
    tensor = message.inputs.add(name=name, datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())


def _outputs(response: pb.ModelInferResponse) -> dict[str, Any]:
    """The first element of each output tensor: strings decoded, numbers as int."""
    found: dict[str, Any] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if not raw:
            continue
        if tensor.datatype == "BYTES":  # u32 little-endian length, then the bytes
            length = int.from_bytes(raw[:4], "little")
            found[tensor.name] = raw[4 : 4 + length].decode(errors="replace")
        else:
            dtype = {"UINT32": "<u4", "INT32": "<i4", "INT64": "<i8", "FP32": "<f4"}
            found[tensor.name] = np.frombuffer(raw, dtype[tensor.datatype])[0].item()
    return found
