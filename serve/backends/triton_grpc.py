"""Triton over gRPC streaming: the vLLM backend, Octet's Python entry, TensorRT-LLM's models.

Each request is one ModelStreamInfer call on a shared channel. The generated stubs are used
directly: tritonclient's own asyncio client drops request parameters and the status of errors. (The
header `triton_grpc_error` would give errors of the model a status, but with it Triton 2.51 crashes
after a few refused requests.)

There are no keepalive pings: by default Triton answers those of a waiting client with GOAWAY
"too_many_pings" (2.51: 4 s after the first, at one a second) and closes the connection. `hold`
detects a vanished host, and then ends the calls that wait for it.

The module also reads Triton's load and the incarnation of a model.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import aiohttp
import grpc
import grpc.aio
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from octet.errors import BackendError, BackendUnavailable, FailureKind, NeedsTokenizer, RequestError
from serve.backends.base import Incarnation, LoadReport, generate_one_token, sooner_or_later
from serve.backends.bounds import MAX_EVENT
from serve.backends.connection import hold_open
from serve.backends.openai_http import report
from serve.backends.prometheus import load_of, samples
from serve.backends.triton_errors import error_of
from serve.backends.triton_prompt import end_tokens, unsupported
from serve.backends.triton_tensors import Inputs, Signature, read_outputs
from serve.backends.triton_trtllm import IdsDialect, TextDialect
from serve.backends.triton_vllm import VllmDialect
from serve.config import TritonConfig
from serve.engine.request import Event, GenerateRequest
from serve.engine.tokenizer import Tokenizer

__all__ = ["TritonBackend"]

_kind = model_config_pb2.ModelInstanceGroup.Kind.Name
_PENDING = "nv_inference_pending_request_count"


READY_TIMEOUT_S = 5.0  # longer than a health check waits: it distinguishes "no" from "no answer"
# Exceptions that reading a malformed response may raise.
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_EVENT),
    ("grpc.max_send_message_length", -1),
    # By default gRPC waits up to two minutes before it reconnects to a server that was away.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


Dialect: TypeAlias = VllmDialect | TextDialect | IdsDialect


class TritonBackend:
    """One decoupled model of one Triton server."""

    accepts_extra = False
    context_length: int | None = None  # Triton does not report it; the model itself refuses

    def __init__(self, model: str, config: TritonConfig) -> None:
        self.name = f"triton {config.url}"
        self.models = (model,)
        self._model = config.model or model
        self._config = config
        self.tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else None
        self._channel: grpc.aio.Channel | None = None
        self._negotiated: tuple[Signature, Dialect] | None = None  # set once its metadata was read
        self._calls: set[Any] = set()  # in progress
        self._given_up: dict[Any, BackendError] = {}  # calls that the gateway ends, and why
        self._instances = 1  # of the model; in the Python backend, each is a process of its own

    async def start(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._config.url, options=_OPTIONS)
        self._stub = pb_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            self._give_up("closed by the gateway", "lost")
            await channel.close(grace=None)

    async def ready(self) -> bool:
        """Returns Triton's own state of the model: still ready if a Python model's process died."""
        if self._channel is None:
            return False
        try:
            request = pb.ModelReadyRequest(name=self._model)
            answer = await self._stub.ModelReady(request, timeout=READY_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def load(self) -> LoadReport | None:
        """Reads the load from Triton's metrics page over HTTP; None without `metrics_url`."""
        url, timeout = self._config.metrics_url, aiohttp.ClientTimeout(total=READY_TIMEOUT_S)
        if url is None:
            return None
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(url, allow_redirects=False) as response,
            ):
                page = await report(response) if response.status == 200 else b""
        except (aiohttp.ClientError, OSError):
            return None
        if page is None:
            return None
        pending = samples(page, (_PENDING,)).get(_PENDING, ())
        mine = [value for labels, value in pending if labels.get("model") == self._model]
        return load_of(page) or (LoadReport(0, round(sum(mine)), None, None) if mine else None)

    async def incarnation(self) -> Incarnation | None:
        """Reads the incarnation from the model's configuration, versions and statistics.

        A reload resets the model's statistics to zero (2.51: those of ModelStatistics;
        `nv_inference_count` goes on). Nothing else indicates it: the connections stay, and the
        model is READY before and after. Triton reloads only if a file of the model has changed.
        """
        if self._channel is None:
            return None
        stub, name, timeout = self._stub, self._model, READY_TIMEOUT_S
        try:
            config = await stub.ModelConfig(pb.ModelConfigRequest(name=name), timeout=timeout)
            request = pb.ModelStatisticsRequest(name=name)
            answer = await stub.ModelStatistics(request, timeout=timeout)
        except grpc.aio.AioRpcError:
            return None
        digest = hashlib.sha256(config.config.SerializeToString(deterministic=True)).hexdigest()
        versions = sorted(answer.model_stats, key=lambda one: str(one.version))
        counts = [
            count
            for one in versions
            for count in (
                one.last_inference,
                one.execution_count,
                one.inference_stats.success.count,
            )
        ]
        settings = (digest, *(str(one.version) for one in versions))
        return Incarnation(settings, counts=tuple(counts))

    async def described(self) -> dict[str, Any] | None:
        """Returns Triton's version and the model's configuration; None if it does not answer."""
        if self._channel is None:
            return None
        stub, timeout = self._stub, READY_TIMEOUT_S
        try:
            server = await stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=timeout)
            request = pb.ModelConfigRequest(name=self._model)
            config = (await stub.ModelConfig(request, timeout=timeout)).config
        except grpc.aio.AioRpcError:
            return None
        return {
            "version": server.version,
            "backend": config.backend or config.platform,
            "kinds": [_kind(group.kind) for group in config.instance_group],
            "parameters": {name: value.string_value for name, value in config.parameters.items()},
        }

    async def probe(self) -> None:
        try:
            await generate_one_token(self, self._model)
        except RequestError as error:  # the gateway's own request: not a client's mistake
            raise BackendUnavailable(
                f"{self.name}: refuses to generate a token: {error}", kind="failed"
            ) from error

    async def hold(self, reopened: Callable[[], None] = lambda: None) -> None:
        host, _, port = self._config.url.rpartition(":")
        await hold_open(
            self.name,
            host.strip("[]"),
            int(port),
            tls=False,
            timeout_s=self._config.connect_timeout_s,
            reopened=reopened,
        )
        self._give_up("its host is gone", "lost")  # calls to a vanished host would wait forever

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str | tuple[int, ...]:
        if self.tokenizer is None:  # another backend of the pool may have one
            raise NeedsTokenizer(
                f"{self.name} has no chat template: give the backend a tokenizer, "
                "or send the prompt to /v1/completions",
                param="messages",
                code="unsupported_operation",
            )
        return self.tokenizer.chat_prompt(messages)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        if self._channel is None:
            raise BackendUnavailable(f"{self.name}: not started, or closed")
        signature, dialect = self._negotiated or await self._negotiate()
        message = pb.ModelInferRequest(model_name=self._model, id=request.request_id)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        if request.echo:
            raise unsupported(self.name, "echo", "no model of Triton returns its prompt scored")
        dialect.write(request, Inputs(message, signature))
        answer = dialect.answer(request)
        started = False
        try:
            async with aclosing(self._responses(message, request.headers)) as responses:
                async for response in responses:
                    delta = answer.read(read_outputs(response))
                    if delta is not None:
                        started = True
                        yield delta
                    if answer.ended:
                        break
            for event in answer.finish():
                started = True
                yield event
        except RequestError as error:
            if not started:
                raise
            raise BackendError(f"{self.name}: {error}") from error
        except BackendError as error:
            raise sooner_or_later(error, started=started) from error
        except _UNREADABLE as error:
            garbled = BackendError(
                f"{self.name}: a response cannot be read ({error!r})", kind="garbled"
            )
            raise sooner_or_later(garbled, started=started) from error

    async def _responses(
        self, message: pb.ModelInferRequest, headers: Mapping[str, str]
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """Makes one call, cancelled when the iterator closes. Raises BackendError, RequestError."""
        # The client's content-type describes an HTTP body; gRPC sets its own.
        metadata = tuple(item for item in headers.items() if item[0] != "content-type")
        call = self._stub.ModelStreamInfer(metadata=metadata)
        self._calls.add(call)
        try:
            await call.write(message)
            await call.done_writing()
            async for response in call:
                if response.error_message:
                    raise self._error(None, response.error_message)
                yield response.infer_response
        except grpc.aio.AioRpcError as error:
            raise self._error(error.code(), error.details() or "") from error
        except asyncio.InvalidStateError as error:  # the call ended while the request was written
            code, details = await call.code(), await call.details()
            raise self._error(code, details or str(error)) from error
        except asyncio.CancelledError as error:
            if (reason := self._given_up.get(call)) is None:
                raise
            raise reason from error
        finally:
            self._calls.discard(call)
            self._given_up.pop(call, None)
            call.cancel()  # dropping the call would leave the model running

    def _give_up(self, reason: str, kind: FailureKind) -> None:
        """Ends the calls in progress: their requests fail with a BackendError."""
        for call in self._calls:
            self._given_up[call] = BackendError(f"{self.name}: {reason}", kind=kind)
            call.cancel()

    async def _negotiate(self) -> tuple[Signature, Dialect]:
        """Reads the model's inputs and configuration once, and chooses its dialect."""
        timeout = self._config.connect_timeout_s
        try:
            metadata = await self._stub.ModelMetadata(
                pb.ModelMetadataRequest(name=self._model), timeout=timeout
            )
            config = await self._stub.ModelConfig(
                pb.ModelConfigRequest(name=self._model), timeout=timeout
            )
        except grpc.aio.AioRpcError as error:
            failure = self._error(error.code(), error.details() or error.code().name)
            kind = failure.kind if isinstance(failure, BackendError) else "failed"
            raise BackendUnavailable(str(failure), kind=kind) from error
        groups = config.config.instance_group
        self._instances = sum(group.count * max(1, len(group.gpus)) for group in groups)
        signature = Signature.of(metadata)
        self._negotiated = signature, self._dialect(signature, config.config)
        return self._negotiated

    def _dialect(self, signature: Signature, config: Any) -> Dialect:
        inputs = signature.inputs
        # An ensemble is decoupled if one of its models is; its own configuration may not show it.
        stream = config.platform == "ensemble" or config.model_transaction_policy.decoupled
        if "sampling_parameters" in inputs:
            return VllmDialect(self.name, signature, self.tokenizer)
        if {"text_input", "max_tokens"} <= inputs.keys():
            setting = config.parameters["accumulate_tokens"].string_value.lower()
            cumulative = setting in ("true", "yes", "1", "t")
            return TextDialect(
                self.name, signature, self.tokenizer, cumulative=cumulative, stream=stream
            )
        if {"input_ids", "request_output_len"} <= inputs.keys():
            found = self._config.tokenizer
            ends = end_tokens(found, self.tokenizer) if found and self.tokenizer else ()
            return IdsDialect(self.name, self.tokenizer, ends, stream=stream)
        raise BackendUnavailable(
            f"{self.name}: the model '{self._model}' takes {', '.join(sorted(inputs)) or 'nothing'}"
            ": neither the vLLM backend's inputs nor TensorRT-LLM's",
            kind="failed",
        )

    def _error(self, code: grpc.StatusCode | None, details: str) -> BackendError | RequestError:
        error = error_of(self.name, code, details)
        if isinstance(error, BackendError) and error.kind in ("refused", "lost", "dead", "failed"):
            self._negotiated = None  # the model may come back, or be reloaded, with other inputs
            # Triton never answers the requests of a process that died. With several instances it
            # is unknown which requests those are, so their deadlines end them.
            if error.kind == "dead" and self._instances <= 1:
                self._give_up("its model died", "dead")
        return error
