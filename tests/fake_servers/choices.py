"""The engine's events as choices of OpenAI's answers."""

import json
from collections.abc import Sequence
from typing import Any

from serve.engine.request import Delta, Finished, PositionLogprobs, TokenLogprob
from tests.fake_servers.flavours import Flavour

__all__ = ["chunk_of", "streamed_choice", "usage_of", "whole_choice"]


def streamed_choice(
    event: Any, body: dict[str, Any], flavour: Flavour, *, first: bool
) -> list[dict[str, Any]]:
    """The choices that tell of one event, each of a chunk of its own."""
    chat = "messages" in body
    opening = [_choice(flavour) | {"delta": {"role": "assistant", "content": ""}}]
    choices = opening if chat and first else []
    if isinstance(event, Finished):
        calls, rest = _calls(body), _ending(event, body, flavour)
        if calls:  # a tool is called at the end, instead of any text
            indexed = [{"index": i} | call for i, call in enumerate(calls)]
            choices.append(_choice(flavour) | {"delta": {"tool_calls": indexed}})
        return [*choices, rest | ({"delta": {}} if chat else {"text": ""})]
    if _calls(body) or _content(body):
        if first and _content(body):
            choices.append(_choice(flavour) | {"delta": {"content": _content(body)}})
        return choices
    choice = _choice(flavour)
    if event.logprobs is not None:
        choice["logprobs"] = _logprobs(event.logprobs, body, flavour)
    if flavour.token_ids and body.get("return_token_ids"):
        choice["token_ids"] = list(event.token_ids)
    text = {"delta": {"content": event.text}} if chat else {"text": event.text}
    return [*choices, choice | text]


def whole_choice(
    deltas: Sequence[Delta], end: Finished, body: dict[str, Any], flavour: Flavour
) -> dict[str, Any]:
    choice = _ending(end, body, flavour)
    positions = [p for delta in deltas for p in delta.logprobs or ()]
    if positions:
        choice["logprobs"] = _logprobs(positions, body, flavour)
    text = _content(body) or "".join(delta.text for delta in deltas)
    if "messages" not in body:
        return choice | {"text": text}
    if calls := _calls(body):
        return choice | {"message": {"role": "assistant", "content": None, "tool_calls": calls}}
    return choice | {"message": {"role": "assistant", "content": text}}


def chunk_of(
    body: dict[str, Any], choices: list[dict[str, Any]], flavour: Flavour
) -> dict[str, Any]:
    kind = "chat.completion.chunk" if "messages" in body else "text_completion"
    envelope = {"id": "cmpl-0", "object": kind, "created": 1, "model": body["model"]}
    return envelope | {"choices": choices} | flavour.chunk_extra


def usage_of(end: Finished) -> dict[str, int]:
    prompt, completion = end.usage.prompt_tokens, end.usage.completion_tokens
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def _choice(flavour: Flavour) -> dict[str, Any]:
    return {"index": 0, "logprobs": None, "finish_reason": None} | flavour.choice_extra


def _ending(end: Finished, body: dict[str, Any], flavour: Flavour) -> dict[str, Any]:
    reason = "tool_calls" if _calls(body) else end.reason
    said = {flavour.stop_reason: end.stop_reason} if flavour.stop_reason else {}
    return _choice(flavour) | {"finish_reason": reason} | said


def _calls(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The first tool is called, with its own parameters as its arguments."""
    return [
        {
            "id": "call-0",
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "arguments": json.dumps(tool["function"].get("parameters")),
            },
        }
        for tool in (body.get("tools") or [])[:1]
    ]


def _content(body: dict[str, Any]) -> str:
    """Of a request for structured output: the format itself, as JSON."""
    wanted = body.get("response_format")
    return json.dumps(wanted) if wanted and wanted.get("type") != "text" else ""


def _logprobs(
    positions: Sequence[PositionLogprobs], body: dict[str, Any], flavour: Flavour
) -> dict[str, Any]:
    by_id = flavour.token_ids and body.get("return_tokens_as_token_ids")

    def name(token: TokenLogprob) -> str:
        return f"token_id:{token.token_id}" if by_id else token.text

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": name(token), "logprob": token.logprob, "bytes": list(token.bytes)}

    if "messages" in body:
        return {
            "content": [
                entry(p.chosen) | {"top_logprobs": [entry(token) for token in p.top]}
                for p in positions
            ]
        }
    return {
        "tokens": [name(p.chosen) for p in positions],
        "token_logprobs": [p.chosen.logprob for p in positions],
        "top_logprobs": [{name(t): t.logprob for t in (p.chosen, *p.top)} for p in positions],
        "text_offset": [p.text_offset for p in positions],
    }
