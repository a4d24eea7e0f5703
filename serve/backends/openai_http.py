"""vLLM, or any other server that speaks OpenAI's protocol, over HTTP.

`relay` is the gateway's hot path: bytes in, bytes out. `generate` asks the same server as a
`Backend`, for those who want tokens and log-probabilities rather than bytes.
"""

import errno
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp

from octet.errors import BackendError, BackendUnavailable, ConfigError, RequestError
from serve.backends.base import Relay
from serve.config import HttpConfig
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

__all__ = ["OpenAiHttpBackend"]


class OpenAiHttpBackend:
    """One upstream, over a pool of kept-alive connections without a limit."""

    accepts_extra = True
    context_length: int | None = None

    def __init__(self, model: str, config: HttpConfig) -> None:
        """`model` is the public name; raises ConfigError if the key's variable is not set."""
        self.name = f"{config.type} {config.url}"
        self.served_name = config.model or model
        self.models = (model,)
        self._config = config
        self._headers = {"accept-encoding": "identity"}  # bytes pass through, never decompressed
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise ConfigError(
                    f"{self.name}: the environment variable {config.api_key_env} is not set"
                )
            self._headers["authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self._config.connect_timeout_s,
            ),
            headers=self._headers,
            auto_decompress=False,
            read_bufsize=256 * 1024,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ready(self) -> bool:
        """GET /health for vLLM; other servers may have none, so /v1/models."""
        path = "/health" if self._config.type == "vllm" else "/v1/models"
        if self._session is None:
            return False
        try:
            async with self._session.get(self._config.url + path) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def relay(self, path: str, body: bytes, headers: Mapping[str, str]) -> Relay:
        """Raises BackendUnavailable if no response came: the request may go elsewhere."""
        if self._session is None:
            raise BackendUnavailable(f"{self.name}: not started, or closed")
        for attempt in range(2):
            try:
                response = await self._session.post(
                    self._config.url + path, data=body, headers=headers
                )
                break
            except (aiohttp.ClientError, OSError) as error:
                # A kept-alive connection that the server closed as we wrote: once more, anew.
                if attempt == 0 and _hung_up(error):
                    continue
                raise BackendUnavailable(
                    f"{self.name}: cannot be reached ({_reason(error)})"
                ) from error
        return Relay(response.status, _lower(response.headers), self._body(response))

    async def _body(self, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        ended = False
        try:
            async for piece in response.content.iter_any():
                yield piece
            ended = True
        except (aiohttp.ClientError, OSError) as error:
            raise BackendError(f"{self.name}: failed while answering ({_reason(error)})") from error
        finally:
            if ended:
                response.release()  # the connection goes back to the pool
            else:
                response.close()  # the socket closes: the server sees it and stops

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str | tuple[int, ...]:
        raise RequestError(f"{self.name} applies the chat template itself")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        fields = _completion(request, self.served_name)
        if self._config.type == "vllm":  # OpenAI's own dialect names tokens by their text alone
            fields |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        body = json.dumps(fields).encode()
        headers = {"content-type": "application/json", "x-request-id": request.request_id}
        relay = await self.relay("/v1/completions", body, headers)
        content = relay.body
        assert isinstance(content, AsyncGenerator)
        async with aclosing(content):
            if relay.status != 200:
                raise _refusal(self.name, relay.status, b"".join([p async for p in content]))
            reason: str | None = None
            stop_reason: str | int | None = None
            offset = 0
            async for event in _sse(content):
                if "error" in event:
                    raise BackendError(f"{self.name}: {event['error'].get('message')}")
                for choice in event.get("choices", ()):
                    delta = _delta(choice, offset, request.logprobs or 0)
                    offset += len(delta.text)
                    if delta.text or delta.token_ids:
                        yield delta
                    reason = choice.get("finish_reason") or reason
                    stop_reason = choice.get("stop_reason", stop_reason)
                usage = event.get("usage")
                if usage and reason:
                    counts = Usage(usage["prompt_tokens"], usage.get("completion_tokens", 0))
                    yield Finished(self._finish_reason(reason), counts, stop_reason)
                    return
            raise BackendError(f"{self.name}: the stream ended without its usage")

    def _finish_reason(self, reason: str) -> FinishReason:
        reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
        if reason not in reasons:
            raise BackendError(f"{self.name}: the answer ended with '{reason}'")
        return reasons[reason]


def _completion(request: GenerateRequest, model: str) -> dict[str, Any]:
    """The body of a streamed completion; what is at its default is left to the server's."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
        # A completion without a limit would end after 16 tokens.
        "max_tokens": request.max_tokens,
        **request.extra,
    }
    optional = {
        "top_k": request.top_k or None,
        "seed": request.seed,
        "stop": list(request.stop) or None,
        "stop_token_ids": list(request.stop_token_ids) or None,
        "logprobs": request.logprobs,
        "echo": request.echo or None,
        "ignore_eos": request.ignore_eos or None,
    }
    return body | {name: value for name, value in optional.items() if value is not None}


def _delta(choice: dict[str, Any], offset: int, alternatives: int) -> Delta:
    """A Delta from a streamed choice that begins `offset` characters into the answer.

    Token ids are there only if the server sends them. vLLM lists the chosen token beside the
    `alternatives` most likely ones.
    """
    text, token_ids = choice.get("text") or "", tuple(choice.get("token_ids") or ())
    found = choice.get("logprobs")
    if not found:
        return Delta(text, token_ids)
    tops = found.get("top_logprobs") or [None] * len(found["tokens"])
    positions = []
    for name, logprob, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True):
        likely = sorted((top or {}).items(), key=lambda item: -item[1])[:alternatives]
        best = tuple(_token(other, value) for other, value in likely)
        positions.append(PositionLogprobs(_token(name, logprob), best, offset))
    return Delta(text, token_ids, tuple(positions))


def _token(name: str, logprob: float | None) -> TokenLogprob:
    """A token by the name the server gives it: `token_id:N` from vLLM, else its text alone."""
    number = name.removeprefix("token_id:")
    if number != name and number.isdigit():
        return TokenLogprob(int(number), "", b"", logprob)
    return TokenLogprob(-1, name, name.encode(), logprob)


async def _sse(content: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    held = b""
    async for piece in content:
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if data and data != b"[DONE]" and line.startswith(b"data:"):
                yield json.loads(data)


def _refusal(name: str, status: int, body: bytes) -> Exception:
    try:
        error = json.loads(body)["error"]
        message, param, code = str(error["message"]), error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError):
        message, param, code = body[:200].decode(errors="replace"), None, None
    if status in (502, 503, 504):
        return BackendUnavailable(f"{name}: {message}")
    if status >= 500:
        return BackendError(f"{name}: {message}")
    return RequestError(message, status=status, param=param, code=str(code) if code else None)


def _hung_up(error: BaseException) -> bool:
    return isinstance(error, aiohttp.ServerDisconnectedError) or (
        isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.EPIPE)
    )


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _reason(error: BaseException) -> str:
    """A few words for people; aiohttp's own repeat the address and its internals."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it closed the connection"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
