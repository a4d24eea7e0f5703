"""The bytes of a body: decoded as JSON means them, or refused; and never for long at a stretch."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octet.errors import RequestError
from serve.api.schemas import LARGE, MAX_DEPTH, CompletionRequest, decode, parse_body, require_json
from serve.api.strict_json import MAX_VALUES, loads, loads_large
from serve.config import Limits

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)
SPACES = st.sampled_from([None, 0, 1, "\t"])


@settings(max_examples=300, deadline=None)
@given(VALUES | st.lists(st.integers() | FLOATS, max_size=80), SPACES)
def test_a_large_text_is_decoded_as_a_small_one(value: Any, indent: Any) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=indent is None)
    assert loads_large(text) == loads(text) == value
    assert loads_large(f" \n{text}\t ") == value


@settings(max_examples=500, deadline=None)
@given(VALUES, st.integers(0, 400), st.text('[]{},:"\\0-e.x \n', max_size=3))
def test_a_large_text_is_refused_as_a_small_one(value: Any, at: int, wrong: str) -> None:
    text = json.dumps(value)
    at %= len(text) + 1
    text = text[:at] + wrong + text[at + 1 :]
    assert _outcome(loads, text) == _outcome(loads_large, text)


def _outcome(decoder: Any, text: str) -> Any:
    try:
        return decoder(text)
    except ValueError:
        return ValueError


def test_numbers_across_the_pieces_of_a_large_text_are_all_there() -> None:
    numbers = [*range(-50_000, 50_000), 0.5, 1e300, *range(10**12, 10**12 + 9)]
    assert loads_large(json.dumps(numbers)) == numbers
    assert loads_large(json.dumps({"a": [numbers, numbers[:3]], "b": 1})) == {
        "a": [numbers, numbers[:3]],
        "b": 1,
    }


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"prompt": "a\xff"}', 400, "not UTF-8: byte 0xff at offset 13"),
        (b'{"prompt": "\xed\xa0\x80"}', 400, "not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), 400, "not UTF-8"),
        (b"\xef\xbb\xbf{}", 400, "Expecting value"),
        (b"", 400, "Expecting value"),
        (b"[]", 400, "should be a JSON object"),
        (b"null", 400, "should be a JSON object"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "not valid JSON"),
        (b'{"user": "\\ud800"}', 400, "'user': holds a lone surrogate"),
        (b'{"\\udfff": 1}', 400, "lone surrogate"),
        (b'{"a": NaN}', 400, "NaN is no JSON number"),
        (b'{"a": 1, "a": 1}', 400, "'a' is repeated"),
        (b'{"a": [{"b": {"c": 1, "c": 2}}]}', 400, "'c' is repeated"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", 400, "too deeply"),
        (b'{"a": ' * 100_000, 400, "too deeply"),
        (b"[" * 100_000, 400, "too deeply"),
        (b'{"a": [' + b"[]," * MAX_VALUES + b"0]}", 413, "more than 262144 values"),
        (b'{"a": 1, "a":' + b" " * LARGE + b"2}", 400, "'a' is repeated"),
    ],
)
def test_what_is_refused(body: bytes, status: int, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        decode(body)
    assert refused.value.status == status
    assert message in str(refused.value)
    str(refused.value).encode()


def test_pairs_of_surrogates_and_deep_but_not_too_deep_bodies_pass() -> None:
    assert decode(b'{"user": "\\ud83d\\ude00"}') == {"user": "\U0001f600"}
    depth = MAX_DEPTH - 1
    assert decode(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")


@pytest.mark.parametrize("given", [None, b"application/json", b"Application/JSON; charset=utf-8"])
def test_json_by_its_name_or_without_one(given: bytes | None) -> None:
    require_json(given)


@pytest.mark.parametrize("given", [b"", b"text/plain", b"application/x-www-form-urlencoded"])
def test_what_says_to_be_no_json(given: bytes) -> None:
    with pytest.raises(RequestError, match="Content-Type") as refused:
        require_json(given)
    assert (refused.value.status, refused.value.code) == (400, "unsupported_media_type")


MEGA = 2**20
LARGEST = {
    "token ids": b'{"model":"m","prompt":[' + b"12345," * (16 * MEGA // 6 - 9) + b"1]}",
    "text": b'{"model":"m","prompt":"' + b"x" * (16 * MEGA - 50) + b'"}',
    "escapes": b'{"model":"m","prompt":"' + b"\\u00e9" * (16 * MEGA // 6 - 9) + b'"}',
    "arrays": b'{"model":"m","prompt":[' + b"[]," * (16 * MEGA // 3 - 20) + b"[]]}",
    "keys": b'{"model":"m",' + b",".join(b'"%d":1' % i for i in range(MEGA)) + b"}",
}


@pytest.mark.parametrize("kind", LARGEST)
async def test_16_mb_are_decoded_or_refused_while_the_event_loop_turns(kind: str) -> None:
    """By turns, not by time: decoded in one go, on a thread or not, they let it turn twice."""
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    watcher = asyncio.create_task(watch())
    try:
        body, _ = await parse_body(CompletionRequest, LARGEST[kind], Limits())
        assert kind in ("token ids", "text", "escapes") and len(body.prompt) == 1
    except RequestError as error:
        assert error.status == 413 and kind in ("arrays", "keys")
    watcher.cancel()
    if kind not in ("text", "escapes"):  # one string is one call, and takes 20 ms
        assert turns > 10
