"""Tests that a backend is sent the client's request with as few changes as possible."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.api.relay import outgoing

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "stream_options", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def sent(raw: bytes, model: str, counted: bool = False) -> Any:
    return json.loads(outgoing(raw, json.loads(raw), model, counted=counted))


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_only_the_model_and_the_usage_change(
    fields: dict[str, Any], counted: bool, ascii_only: bool, indent: int | None
) -> None:
    fields.pop("stream_options", None)
    data = fields | {"model": "alias", "stream": True}
    raw = json.dumps(data, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    expected = data | {"model": "served"}
    if counted:
        expected["stream_options"] = {"include_usage": True}
    changed = outgoing(raw, data, "served", counted=counted)
    assert json.loads(changed.decode(errors="surrogatepass")) == expected


def test_the_bytes_around_stay_as_they_were() -> None:
    raw = b' {"stream": true,\t"model" : "alias",  "temperature":1.50e0}\n'
    assert outgoing(raw, json.loads(raw), "alias", counted=False) is raw
    assert outgoing(raw, json.loads(raw), "s", counted=True) == (
        b' {"stream_options":{"include_usage":true},"stream": true,\t"model":"s",'
        b'  "temperature":1.50e0}\n'
    )


@pytest.mark.parametrize("letter", "model")
@pytest.mark.parametrize("form", ["\\u{:04x}", "\\u{:04X}"])
def test_another_model_is_never_named_by_an_escaped_key(letter: str, form: str) -> None:
    key = "model".replace(letter, form.format(ord(letter)))
    raw = b'{"tools": {"model": "alias"}, "%b": "alias"}' % key.encode()
    assert sent(raw, "served") == {"tools": {"model": "alias"}, "model": "served"}


def test_escapes_of_other_letters_are_no_reason_to_write_a_body_anew() -> None:
    raw = rb'{"prompt": "\u00e9\u0000", "model": "alias"}'
    assert outgoing(raw, json.loads(raw), "s", counted=False) == raw.replace(
        b'"model": "alias"', b'"model":"s"'
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": False}, {"include_usage": True}),
        ({"continuous_usage_stats": True}, {"include_usage": True}),
        ({"include_usage": None, "other": 1}, {"include_usage": True, "other": 1}),
    ],
)
def test_the_clients_own_options_stay(options: Any, expected: dict[str, Any]) -> None:
    raw = json.dumps({"model": "m", "stream": True, "stream_options": options}).encode()
    assert sent(raw, "m", counted=True)["stream_options"] == expected
