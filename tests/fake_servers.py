"""Fake vLLM and Triton servers on real loopback sockets, over the fake model of `fakes.py`.

They write what the real servers were seen to write (vLLM 0.32, Triton 2.51), in code of their own,
and misbehave on demand: a prompt that begins with `!` names the misbehaviour.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
from aiohttp import web
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from octet.errors import RequestError
from serve.backends.embedded import EmbeddedBackend
from serve.types import Delta, Finished, GenerateRequest
from tests.fakes import FakeRunner, fake_backend


class FakeServer:
    """What both have: the engine that answers, what was asked, and what was cancelled."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.engine: EmbeddedBackend = fake_backend(FakeRunner(delay_s=delay_s))
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = 0
        self.cancelled = 0
        self.url = ""


class FakeOpenAI(FakeServer):
    """`!hangup` closes without an answer, `!die` in the middle of an event, `!empty` after the
    headers, `!truncate` ends without [DONE], `!busy` is a 503, `!html` a proxy's page, `!wait`
    never answers.
    """

    async def start(self, port: int = 0) -> None:
        await self.engine.start()
        app = web.Application()
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self.engine.close()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.running += 1
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except RequestError as error:
            content = {"message": str(error), "type": "BadRequestError", "param": error.param}
            return web.json_response({"error": content | {"code": 400}}, status=400)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault = _fault(body)
        if fault == "!hangup":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if fault == "!wait":
            await asyncio.sleep(3600)
        if fault == "!busy":
            error = {"message": "queue full", "type": "ServiceUnavailable", "code": 503}
            return web.json_response({"error": error}, status=503, headers={"Retry-After": "7"})
        if fault == "!html":
            return web.Response(status=502, text="<h1>Bad Gateway</h1>", content_type="text/html")
        chat = "messages" in body
        asked = _asked(body, self.engine)
        if not body.get("stream"):
            return web.json_response(await self._whole(asked, body, chat))
        async with aclosing(cast(Any, self.engine.generate(asked))) as events:
            first = await anext(events)  # what refuses the request is raised here
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream; charset=utf-8"}
            )
            await response.prepare(request)
            await self._stream(request, response, body, _chain(first, events))
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        events: AsyncIterator[Any],
    ) -> None:
        fault, chat = _fault(body), "messages" in body
        assert request.transport is not None
        if fault == "!empty":
            request.transport.close()
            return
        count = 0
        async for event in events:
            count += 1
            chunk = _chunk(body, [_choice(event, body, chat, count == 1)], chat)
            line = f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()
            if fault == "!die" and count == 3:
                await response.write(line[:25])
                await asyncio.sleep(0.01)
                request.transport.close()
                return
            await response.write(line)
            if isinstance(event, Finished):
                usage = _usage(event)
        if (body.get("stream_options") or {}).get("include_usage"):
            chunk = _chunk(body, [], chat) | {"usage": usage}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if fault != "!truncate":
            await response.write(b"data: [DONE]\n\n")

    async def _whole(self, asked: GenerateRequest, body: dict[str, Any], chat: bool) -> Any:
        text = ""
        async for event in self.engine.generate(asked):
            if isinstance(event, Delta):
                text += event.text
            else:
                end = event
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": end.reason}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {
            "id": "cmpl-0",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": _usage(end),
        }


async def _chain(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for event in rest:
        yield event


def _fault(body: dict[str, Any]) -> str:
    prompt = body.get("prompt") or body["messages"][-1]["content"]
    return prompt.split()[0] if isinstance(prompt, str) and prompt.startswith("!") else ""


def _asked(body: dict[str, Any], engine: EmbeddedBackend) -> GenerateRequest:
    if "messages" in body:
        prompt: Any = engine.chat_prompt(body["messages"])
    else:
        prompt = body["prompt"]
    stop = body.get("stop") or []
    return GenerateRequest(
        request_id="fake",
        model=body["model"],
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        max_tokens=body.get("max_tokens", None if "messages" in body else 16),
        temperature=body.get("temperature", 1.0),
        top_p=body.get("top_p", 1.0),
        top_k=max(body.get("top_k", 0), 0),
        seed=body.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=body.get("logprobs"),
        echo=bool(body.get("echo")),
        ignore_eos=bool(body.get("ignore_eos")),
    )


def _choice(event: Any, body: dict[str, Any], chat: bool, first: bool) -> dict[str, Any]:
    text = event.text if isinstance(event, Delta) else ""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
    if isinstance(event, Finished):
        choice |= {"finish_reason": event.reason, "stop_reason": event.stop_reason}
    elif event.logprobs is not None:
        by_id = body.get("return_tokens_as_token_ids")
        choice["logprobs"] = {
            "tokens": [_name(p.chosen, by_id) for p in event.logprobs],
            "token_logprobs": [p.chosen.logprob for p in event.logprobs],
            "top_logprobs": [
                {_name(t, by_id): t.logprob for t in (p.chosen, *p.top)} for p in event.logprobs
            ],
            "text_offset": [p.text_offset for p in event.logprobs],
        }
    if isinstance(event, Delta) and body.get("return_token_ids"):
        choice["token_ids"] = list(event.token_ids)
    if not chat:
        return choice | {"text": text}
    return choice | {"delta": ({"role": "assistant"} if first else {}) | {"content": text}}


def _name(token: Any, by_id: bool | None) -> str:
    return f"token_id:{token.token_id}" if by_id else token.text


def _chunk(body: dict[str, Any], choices: list[dict[str, Any]], chat: bool) -> dict[str, Any]:
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {
        "id": "cmpl-0",
        "object": kind,
        "created": 1,
        "model": body["model"],
        "choices": choices,
    }


def _usage(end: Finished) -> dict[str, int]:
    prompt, completion = end.usage.prompt_tokens, end.usage.completion_tokens
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


class FakeTriton(FakeServer, pb_grpc.GRPCInferenceServiceServicer):
    """The vLLM backend's interface, or with `token_ids` our Python entry's.

    `!stub` fails as a dead Python process does, `!internal` as an exception in the model, `!die`
    after two tokens, `!wait` never answers.
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
        self.inputs = ["text_input", "sampling_parameters", *self.FLAGS]
        self.inputs += ["input_ids"] * token_ids + ["return_logprobs"] * logprobs

    async def start(self, port: int = 0) -> None:
        await self.engine.start()
        self._server = grpc.aio.server()
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=0)
        await self.engine.close()

    async def ModelReady(self, request: Any, _context: Any) -> Any:
        return pb.ModelReadyResponse(ready=request.name == "fake")

    async def ModelMetadata(self, _request: Any, _context: Any) -> Any:
        tensors = [pb.ModelMetadataResponse.TensorMetadata(name=name) for name in self.inputs]
        return pb.ModelMetadataResponse(name="fake", inputs=tensors)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], _context: Any) -> Any:
        self.running += 1
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
        inputs = {tensor.name: tensor for tensor in message.inputs}
        unknown = inputs.keys() - set(self.inputs)
        if message.model_name != "fake" or unknown:
            text = f"Request for unknown model: '{message.model_name}' is not found"
            yield pb.ModelStreamInferResponse(error_message=text if not unknown else str(unknown))
            return
        sampling = json.loads(inputs["sampling_parameters"].contents.bytes_contents[0])
        self.requests.append(sampling | {"inputs": sorted(inputs)})
        if "input_ids" in inputs:
            prompt: Any = list(inputs["input_ids"].contents.int64_contents)
        else:
            prompt = inputs["text_input"].contents.bytes_contents[0].decode()
        fault = _fault({"prompt": prompt})
        if failure := await _failure(fault):
            yield pb.ModelStreamInferResponse(error_message=failure)
            return
        asked = _asked(sampling | {"model": "fake", "prompt": prompt}, self.engine)
        count = 0
        try:
            async for event in self.engine.generate(asked):
                count += 1
                if fault == "!die" and count == 3:
                    yield pb.ModelStreamInferResponse(error_message="the model raised")
                    return
                yield pb.ModelStreamInferResponse(infer_response=_tensors(event, asked))
        except RequestError as error:
            text = json.dumps({"message": str(error), "param": error.param, "code": error.code})
            yield pb.ModelStreamInferResponse(error_message=text)
            return
        final = pb.ModelInferResponse()
        final.parameters["triton_final_response"].bool_param = True
        yield pb.ModelStreamInferResponse(infer_response=final)


async def _failure(fault: str) -> str:
    if fault == "!stub":
        text = "Failed to process the request(s) for model 'fake_0', message: Stub process "
        return text + "'fake_0_0' is not healthy."
    if fault == "!internal":
        return "the model raised"
    if fault == "!wait":
        await asyncio.sleep(3600)
    return ""


def _tensors(event: Any, asked: GenerateRequest) -> Any:
    """One response as the vLLM backend writes it: counts are of this response alone."""
    response = pb.ModelInferResponse(model_name="fake")
    ended = isinstance(event, Finished)
    texts = {
        "text_output": "" if ended else event.text,
        "finish_reason": event.reason if ended else "None",
    }
    if asked.logprobs is not None and not ended:
        positions = [
            {str(t.token_id): _entry(t) for t in (p.chosen, *p.top)} for p in event.logprobs
        ]
        texts["logprobs"] = json.dumps(positions)
    for name, text in texts.items():
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(
            len(text.encode()).to_bytes(4, "little") + text.encode()
        )
    read = event.usage.prompt_tokens if ended else 0
    counts = {"num_output_tokens": 0 if ended else len(event.token_ids)}
    for name, count in (counts | ({"num_input_tokens": read} if ended else {})).items():
        response.outputs.add(name=name, datatype="UINT32", shape=[1])
        response.raw_output_contents.append(count.to_bytes(4, "little"))
    return response


def _entry(token: Any) -> dict[str, Any]:
    return {"logprob": token.logprob, "rank": 1, "decoded_token": token.text}


@asynccontextmanager
async def running(server: Any) -> AsyncIterator[Any]:
    """Starts a fake server, and stops it at the end."""
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
