"""Represents one sample: a text or a conversation, and where it came from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octet.errors import SampleError

__all__ = ["Fields", "Sample", "kind_of", "sample_of"]

# Names of the two roles in data sets of the ShareGPT kind ({"from", "value"}).
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Fields:
    """The names of the fields or columns that hold the text and the conversation."""

    text: str = "text"
    messages: str = "messages"

    def missing(self, present: Mapping[str, Any] | list[str], *, what: str) -> str:
        """Returns the error text for a record or table with neither; `what`: field or column."""
        names = ", ".join(present) or "none"
        return (
            f"no {what} '{self.text}' or '{self.messages}'; it has: {names}"
            " (--text-field and --messages-field choose)"
        )


@dataclass(frozen=True)
class Sample:
    """A text, or, if `messages` is not empty, a conversation for the chat template.

    `origin` is the name of the file. If that holds several samples, the line (from 1) or the row of
    a table (from 0) follows: `samples.jsonl, line 12`.
    """

    text: str
    origin: str
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def empty(self) -> bool:
        """True if the sample has nothing to run."""
        if self.text.strip():
            return False
        return not any(m["content"].strip() or m.get("tool_calls") for m in self.messages)

    @property
    def key(self) -> str:
        """A string that is equal for samples with equal content, wherever they come from."""
        return json.dumps([self.text, *self.messages], sort_keys=True, default=str)


def sample_of(record: Mapping[str, Any], fields: Fields, where: str, origin: str) -> Sample:
    """Returns the text of `record`, or else its conversation; error messages begin with `where`.

    A field that is null counts as absent if the other one is there.
    """
    text, messages = record.get(fields.text), record.get(fields.messages)
    if text is None and messages is not None:
        return Sample("", origin, _messages(messages, f"{where}: '{fields.messages}'"))
    if fields.text in record:
        return Sample(_text(text, f"{where}: '{fields.text}'"), origin)
    if fields.messages in record:
        raise SampleError(f"{where}: '{fields.messages}' is null, not a list of messages")
    raise SampleError(f"{where}: {fields.missing(record, what='field')}")


def kind_of(value: object) -> str:
    """Returns JSON's name for the type of a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise SampleError(f"{where} is a JSON {kind_of(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SampleError(f"{where} holds a lone surrogate, no text") from None
    return value


def _messages(value: object, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        raise SampleError(f"{where} is a JSON {kind_of(value)}, not a list of messages")
    return tuple(_message(item, f"{where}, message {n}") for n, item in enumerate(value, start=1))


def _message(value: object, where: str) -> dict[str, Any]:
    """Returns `value` with a role and its content as one string, other members unchanged."""
    if not isinstance(value, dict):
        raise SampleError(f"{where} is a JSON {kind_of(value)}, not an object")
    message = dict(value)
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        message["role"] = _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        message["content"] = message.pop("value", None)
    role = message.get("role")
    if not isinstance(role, str):
        raise SampleError(f"{where} has no 'role'; a message is a role and its content")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    elif isinstance(content, list):
        content = "".join(_part(part, f"{where} ({role})") for part in content)
    message["content"] = _text(content, f"{where} ({role}): its content")
    return message


def _part(part: object, where: str) -> str:
    """Returns the text of one part of a content; raises SampleError for any other kind of part."""
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        raise SampleError(f"{where} has a part of type {kind}; only text can be read")
    return _text(part.get("text"), f"{where}: its text")
