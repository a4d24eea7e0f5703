"""Tests what two requests must have in common to reach the same backend."""

import tracemalloc
from typing import Any

import pytest

from serve.config import Routing
from serve.routing.policies import ask_for

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
        (chat([{"type": "text", "text": "hi"}]), b"user\ntexthi\n"),
        (chat([{"n": [1, {"m": None}]}]), b"user\n1None\n"),
        ({"messages": ["none", {"role": "user", "content": "hi"}]}, b"user\nhi\n"),
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


def test_a_large_image_costs_no_more_than_its_beginning() -> None:
    image = "x" * 15_000_000
    body = chat([{"type": "image_url", "image_url": {"url": image}}] * 3)
    tracemalloc.start()
    try:
        assert ask_for(PREFIX, 7, body, {}).prefix == b"user\nimage_u"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_what_is_nested_without_end_is_left_out() -> None:
    nested: Any = "deep"
    for _ in range(5000):
        nested = [nested]
    assert ask_for(PREFIX, 7, chat(nested), {}).prefix == b"user\n\n"
