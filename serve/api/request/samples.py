"""Converts a request and its answer to calibration samples: texts, or a conversation.

`octet calibrate --samples` reads `text`, and `messages` whose contents are texts. A request with
anything else, such as an image, raises ValueError. The answer may be anything that a backend sends,
so callers treat TypeError, LookupError and AttributeError alike.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["READERS", "Data", "Reader"]

Data = dict[str, Any]  # decoded JSON
Reader = Callable[[Data, bytes], list[Data]]  # a request's body, and its answer as it was sent

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXTS = ("text", "input_text", "output_text")  # types of parts


def _completions(data: Data, answer: bytes) -> list[Data]:
    """Returns a text for each prompt: the prompt and its first answer."""
    prompts = [data["prompt"]] if isinstance(data["prompt"], str) else data["prompt"]
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("token ids")
    texts: dict[int, list[str]] = {}
    for part in _documents(answer):
        for choice in part["choices"]:
            texts.setdefault(choice["index"], []).append(choice["text"])
    echo, each = data.get("echo"), data.get("n") or 1
    answers = ["".join(texts.get(i * each, ())) for i in range(len(prompts))]
    pairs = zip(prompts, answers, strict=True)
    return [{"text": text if echo else prompt + text} for prompt, text in pairs]


def _chat(data: Data, answer: bytes) -> list[Data]:
    """Returns a conversation from /v1/chat/completions, with the first choice."""
    reply: list[str] = []
    calls: list[Data] = []
    for part in _documents(answer):
        for choice in part["choices"]:
            if choice["index"] == 0:
                message = choice.get("message") or choice.get("delta") or {}
                reply.append(_text(message.get("content")))
                # Tool calls of a stream come in pieces, which are not joined: the prompt is enough.
                calls += choice["message"].get("tool_calls") or () if "message" in choice else ()
    reply_message = {"role": "assistant", "content": "".join(reply), "tool_calls": calls}
    return _conversation([*data["messages"], reply_message])


def _messages(data: Data, answer: bytes) -> list[Data]:
    """Returns a conversation from Anthropic's /v1/messages."""
    reply = []
    for part in _documents(answer):
        if part.get("type") == "content_block_delta":
            reply.append(part["delta"].get("text", ""))
        elif part.get("type") == "message":
            reply += [block["text"] for block in part["content"] if block["type"] == "text"]
    system = {"role": "system", "content": data.get("system")}
    reply_message = {"role": "assistant", "content": "".join(reply)}
    return _conversation([system, *data["messages"], reply_message])


def _responses(data: Data, answer: bytes) -> list[Data]:
    """Returns a conversation from /v1/responses."""
    reply = []
    for part in _documents(answer):
        if part.get("type") == "response.output_text.delta":
            reply.append(part["delta"])
        elif part.get("object") == "response":
            items = [item for item in part["output"] if item["type"] == "message"]
            reply += [_text(item["content"]) for item in items]
    given = data["input"]
    asked = [{"role": "user", "content": given}] if isinstance(given, str) else given
    system = {"role": "system", "content": data.get("instructions")}
    return _conversation([system, *asked, {"role": "assistant", "content": "".join(reply)}])


READERS: dict[str, Reader] = {
    "/v1/completions": _completions,
    "/v1/chat/completions": _chat,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
}


def _documents(answer: bytes) -> Iterator[Data]:
    """Yields the JSON of a whole answer, or of each event of a stream."""
    if answer.lstrip().startswith(b"{"):
        yield json.loads(answer)
        return
    for line in answer.splitlines():
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _conversation(messages: list[Data]) -> list[Data]:
    """Returns one sample, without messages that are empty."""
    found: list[Data] = []
    for message in messages:
        content, calls = _text(message.get("content")), message.get("tool_calls")
        if message["role"] not in _ROLES:
            raise ValueError("role")
        kept: Data = {"role": message["role"], "content": content}
        if calls:
            kept["tool_calls"] = [_call(call) for call in calls]
        if "tool_call_id" in message:
            kept["tool_call_id"] = str(message["tool_call_id"])
        if found and found[-1]["role"] == kept["role"] == "assistant" and not calls:
            found[-1]["content"] += content  # the answer continues the client's last message
        elif content or calls:
            found.append(kept)
    return [{"messages": found}]


def _call(call: Data) -> Data:
    function = {key: _string(call["function"][key]) for key in ("name", "arguments")}
    return {"id": str(call.get("id", "")), "type": "function", "function": function}


def _text(content: Any) -> str:
    """Returns a message's content; raises ValueError if it is not only text."""
    if content is None or isinstance(content, str):
        return content or ""
    if any(part["type"] not in _TEXTS for part in content):
        raise ValueError("not only text")
    return "".join(_string(part["text"]) for part in content)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value
