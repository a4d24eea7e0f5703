"""POST /v1/chat/completions: reads its messages and writes its choices."""

from collections.abc import Mapping, Sequence
from typing import Any

from octet.errors import RequestError, UnsupportedField
from serve.api.generate import LOWEST_LOGPROB
from serve.engine.request import Delta, Finished, PositionLogprobs, TokenLogprob

__all__ = ["ChatDialect", "plain_messages"]

_PLAIN = ("role", "content", "name")


class ChatDialect:
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, deltas: Sequence[Delta], end: Finished) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        positions = [p for delta in deltas for p in delta.logprobs or ()]
        asked = any(delta.logprobs is not None for delta in deltas)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _logprobs(positions) if asked else None,
            "finish_reason": end.reason,
            "stop_reason": end.stop_reason,  # vLLM's addition
        }

    def opening(self, index: int) -> dict[str, Any]:
        return _chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        return _chunk(index, {"content": delta.text}, delta.logprobs)

    def end(self, index: int, end: Finished) -> dict[str, Any]:
        choice = _chunk(index, {})
        return choice | {"finish_reason": end.reason, "stop_reason": end.stop_reason}


def plain_messages(messages: Sequence[Mapping[str, Any]], backend: str) -> list[dict[str, str]]:
    """Returns messages as chat templates take them: a role, a text and optionally a name.

    A list of text parts becomes one text. Raises RequestError for content that is not text, and
    for fields that no template would see. A null value or an empty list is dropped, not refused.
    """
    return [_plain(message, f"messages.{i}", backend) for i, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], where: str, backend: str) -> dict[str, str]:
    for name, value in message.items():
        if name not in _PLAIN and value not in (None, []):
            raise UnsupportedField(
                f"'{where}.{name}' is not supported by {backend}",
                param=f"{where}.{name}",
                code="unsupported_field",
            )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part, where, backend) for part in content)
    if not isinstance(content, str):
        raise RequestError(
            f"'{where}.content' should be a string or a list of text parts",
            param=f"{where}.content",
        )
    plain = {"role": message["role"], "content": content}
    who = message.get("name")
    if who is None:
        return plain
    if not isinstance(who, str):
        raise RequestError(f"'{where}.name' should be a string", param=f"{where}.name")
    return plain | {"name": who}


def _text_of(part: Any, where: str, backend: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise UnsupportedField(
            f"'{where}.content' has a part that is no text, which {backend} does not support",
            param=f"{where}.content",
            code="unsupported_field",
        )
    return text


def _chunk(
    index: int, delta: dict[str, str], positions: Sequence[PositionLogprobs] | None = None
) -> dict[str, Any]:
    logprobs = None if positions is None else _logprobs(positions)
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    content = [
        _token(p.chosen) | {"top_logprobs": [_token(token) for token in p.top]} for p in positions
    ]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": max(
            token.logprob if token.logprob is not None else LOWEST_LOGPROB, LOWEST_LOGPROB
        ),
        "bytes": list(token.bytes),
    }
