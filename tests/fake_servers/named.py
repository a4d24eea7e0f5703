"""Responses and Messages as vLLM 0.32 writes them, over the engine's events."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from serve.engine.request import Delta, Finished

__all__ = ["LAST_EVENTS", "NAMED", "NamedAnswer", "chat_of"]

NAMED = ("/v1/responses", "/v1/messages")
LAST_EVENTS = (b"event: response.completed\n", b"event: message_stop\n")


def chat_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body as that of a chat."""
    responses = path == "/v1/responses"
    first = body.get("instructions" if responses else "system")
    items = body["input"] if responses else body["messages"]
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    system = [{"role": "system", "content": _text(first)}] if first else []
    said = [{"role": m["role"], "content": _text(m["content"])} for m in items]
    limit = body.get("max_output_tokens" if responses else "max_tokens")
    return body | {"messages": system + said, "max_tokens": limit}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class NamedAnswer:
    """One answer of either protocol, whole or as named events."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self._responses = path == "/v1/responses"
        self._body = body
        self._number = 0  # of the next event

    def whole(self, deltas: Sequence[Delta], end: Finished) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        return self._response(text, end) if self._responses else self._message(text, end)

    def fault(self) -> bytes:
        """The event with which vLLM reports that its engine failed."""
        error = {"type": "internal_error", "message": "it broke inside"}
        if self._responses:
            return self._event("error", code="internal_error", message="it broke inside")
        return self._event("error", error=error)

    async def events(self, found: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        text = ""
        begun = False
        async for event in found:
            if not begun:
                begun = True
                for opening in self._opening():
                    yield opening
            if isinstance(event, Finished):
                for closing in self._closing(text, event):
                    yield closing
            elif event.text:
                text += event.text
                yield self._delta(event.text)

    def _opening(self) -> list[bytes]:
        if not self._responses:
            start = self._message(None, None)
            block = {"type": "text", "text": ""}
            return [
                self._event("message_start", message=start),
                self._event("content_block_start", content_block=block, index=0),
            ]
        begun = self._response(None, None)
        item = {"id": "msg_0", "type": "message", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", item=item, output_index=0),
            self._event("response.content_part.added", part=part, item_id="msg_0"),
        ]

    def _delta(self, text: str) -> bytes:
        if self._responses:
            return self._event("response.output_text.delta", delta=text, item_id="msg_0")
        return self._event(
            "content_block_delta", delta={"type": "text_delta", "text": text}, index=0
        )

    def _closing(self, text: str, end: Finished) -> list[bytes]:
        whole = self._response(text, end) if self._responses else self._message(text, end)
        if self._responses:
            return [
                self._event("response.output_text.done", text=text, item_id="msg_0"),
                self._event("response.output_item.done", item=whole["output"][0], output_index=0),
                self._event("response.completed", response=whole),
            ]
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole.get("stop_sequence")}
        return [
            self._event("content_block_stop", index=0),
            self._event("message_delta", delta=delta, usage=whole["usage"]),
            self._event("message_stop"),
        ]

    def _event(self, name: str, **fields: Any) -> bytes:
        if self._responses:
            data = fields | {"sequence_number": self._number, "type": name}
        else:
            data = {"type": name, **fields}
        self._number += 1
        return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()

    def _response(self, text: str | None, end: Finished | None) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
        item = {"id": "msg_0", "type": "message", "role": "assistant", "content": [part]}
        done = end is not None and end.reason == "stop"
        return {
            "id": "resp_0",
            "created_at": 1,
            "incomplete_details": None if done or end is None else {"reason": "max_output_tokens"},
            "instructions": self._body.get("instructions"),
            "model": self._body["model"],
            "object": "response",
            "output": [] if text is None else [item | {"status": "completed"}],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._body.get("tools") or [],
            "status": "in_progress" if end is None else "completed" if done else "incomplete",
            "usage": _usage(end) | {"total_tokens": sum(_usage(end).values())} if end else None,
        }

    def _message(self, text: str | None, end: Finished | None) -> dict[str, Any]:
        message = {
            "id": "chatcmpl-0",
            "type": "message",
            "role": "assistant",
            "content": [] if text is None else [{"type": "text", "text": text}],
            "model": self._body["model"],
            "stop_reason": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        if end is None:
            return message | {"stop_sequence": None}
        stopped = isinstance(end.stop_reason, str)
        reason = "stop_sequence" if stopped else "end_turn"
        named = {"stop_sequence": end.stop_reason} if stopped else {}
        reason = "max_tokens" if end.reason == "length" else reason
        return message | {"stop_reason": reason, "usage": _usage(end)} | named


def _usage(end: Finished) -> dict[str, int]:
    return {
        "input_tokens": end.usage.prompt_tokens,
        "output_tokens": end.usage.completion_tokens,
    }
