"""Affinity of requests: a shared prefix or session lets a request go to the same backend again."""

from collections.abc import Iterable, Mapping
from typing import Any

from serve.config import Routing
from serve.routing.policies import Ask

__all__ = ["ask_for"]


def ask_for(
    routing: Routing, tokens: int, data: dict[str, Any], headers: Mapping[bytes, bytes]
) -> Ask:
    """Returns what a pool with this `routing` needs to know of a request with the body `data`."""
    if routing.policy == "prefix":
        return Ask(tokens, prefix=_prefix(data, routing.prefix_chars))
    if routing.policy == "session":
        return Ask(tokens, session=_session(data, headers, routing.session_header))
    return Ask(tokens)


def _session(data: dict[str, Any], headers: Mapping[bytes, bytes], header: str) -> str:
    value = headers.get(header.lower().encode())
    if value is not None:
        return value.decode("latin-1")
    for field in ("prompt_cache_key", "user"):
        if isinstance(said := data.get(field), str):
            return said
    return ""


def _prefix(data: dict[str, Any], chars: int) -> bytes:
    """Returns the beginning of the (first) prompt; token ids are written as decimals."""
    prompt = data.get("prompt", data.get("input"))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:chars].encode(errors="replace")
    if isinstance(prompt, list):
        return str(prompt[:chars]).encode()[:chars]
    messages = data.get("messages")
    return _joined(_texts(messages), chars) if isinstance(messages, list) else b""


def _texts(messages: list[Any]) -> Iterable[str]:
    """Yields the texts of messages piece by piece, uncopied: an image may have megabytes."""
    for message in messages:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        if isinstance(content, str | list):
            yield f"{message.get('role')}\n"
            yield from _leaves(content)
            yield "\n"


def _leaves(value: Any, depth: int = 8) -> Iterable[str]:
    """Yields the strings in `value`, and its other values as text, but no names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        if depth:
            for item in value.values() if isinstance(value, dict) else value:
                yield from _leaves(item, depth - 1)
    else:
        yield str(value)


def _joined(texts: Iterable[str], chars: int) -> bytes:
    found = ""
    for text in texts:
        found += text[: chars - len(found)]
        if len(found) >= chars:
            break
    return found.encode(errors="replace")
