"""What two requests must have in common to be sent to the same backend."""

from typing import Any

import pytest

from serve.api.affinity import ask_for
from serve.config import Routing

PREFIX = Routing(policy="prefix", prefix_chars=12)
SESSION = Routing(policy="session", session_header="X-Chat")


def chat(*contents: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


@pytest.mark.parametrize(
    ("body", "prefix"),
    [
        ({"prompt": "a prompt of some length"}, b"a prompt of "),
        ({"prompt": ["first of several", "second"]}, b"first of sev"),
        ({"prompt": [1, 2, 3]}, b"[1, 2, 3]"),
        ({"prompt": [[1, 2, 3], [4]]}, b"[1, 2, 3]"),
        ({"input": "to be embedded"}, b"to be embedd"),
        (chat("hello", "world"), b"user\nhello\nu"),
        (chat([{"text": "hi"}]), b"{'text': 'hi"),
        (chat(None), b""),
        ({"messages": "none"}, b""),
        ({"prompt": "\ud800"}, b"?"),
        ({}, b""),
    ],
)
def test_the_prefix_is_how_the_prompt_begins(body: dict[str, Any], prefix: bytes) -> None:
    ask = ask_for(PREFIX, 7, body, {})
    assert (ask.tokens, ask.prefix, ask.session) == (7, prefix, "")


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({"user": "u", "prompt_cache_key": "k"}, {b"x-chat": b"h"}, "h"),
        ({"user": "u", "prompt_cache_key": "k"}, {}, "k"),
        ({"user": "u", "prompt_cache_key": 3}, {}, "u"),
        ({}, {b"x-other": b"h"}, ""),
    ],
)
def test_the_session_is_the_headers_or_the_bodys(
    body: dict[str, Any], headers: dict[bytes, bytes], session: str
) -> None:
    assert ask_for(SESSION, 7, body, headers).session == session


def test_other_policies_need_to_know_nothing() -> None:
    ask = ask_for(Routing(), 7, {"prompt": "abc", "user": "u"}, {b"x-session-id": b"s"})
    assert (ask.prefix, ask.session) == (b"", "")
