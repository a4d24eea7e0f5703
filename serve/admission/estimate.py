"""Estimates how many tokens a prompt has, before any tokenizer has seen it.

English has about four characters per token, other scripts about four bytes of UTF-8 (a Chinese
character has three). Token ids are counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["prompt_tokens"]

BYTES_PER_TOKEN = 4
PER_MESSAGE = 4  # its role, and what a chat template puts around it
# An image, a sound or a file: OpenAI's count for an image of 1024 by 1024 (765), rounded up to the
# next power of two. The length of its base64 means nothing.
PER_ATTACHMENT = 1024
SAMPLE = 4096  # characters that are sampled to estimate the bytes of a longer text
_ATTACHMENTS = ("image", "audio", "video", "file")


def prompt_tokens(prompts: str | Iterable[Any]) -> int:
    """Estimates the tokens of a text, of token ids, of several of either, or of chat messages.

    Takes microseconds whatever the length: ids are only counted, texts only measured.
    """
    if isinstance(prompts, str):
        return _text(prompts)
    items: Sequence[Any] = prompts if isinstance(prompts, list | tuple) else list(prompts)
    if items and isinstance(items[0], int):
        return len(items)
    total = 0
    for item in items:
        if isinstance(item, str):
            total += _text(item)
        elif isinstance(item, Mapping):
            total += PER_MESSAGE + _message(item)
        else:
            total += len(item)
    return total


def _text(text: str) -> int:
    if text.isascii():
        size = len(text)
    elif len(text) <= SAMPLE:
        size = len(text.encode(errors="replace"))
    else:
        sample = text[:: len(text) // SAMPLE]
        size = len(sample.encode(errors="replace")) * len(text) // len(sample)
    return -(-size // BYTES_PER_TOKEN)


def _message(message: Mapping[str, Any]) -> int:
    """Sums all texts of a message; only the parts of its content may be attachments."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return _values(message)
    others = (value for name, value in message.items() if name != "content")
    return sum(map(_values, others)) + sum(map(_part, content))


def _part(part: Any) -> int:
    """Counts an attachment, such as `image_url`, at a fixed size, and measures a text beside it."""
    if not isinstance(part, Mapping) or not _is_attachment(part.get("type", _ATTACHMENTS[0])):
        return _values(part)
    others = (value for name, value in part.items() if not _is_attachment(name))
    attached = any(map(_is_attachment, part))
    return sum(map(_values, others)) + (PER_ATTACHMENT if attached else 0)


def _is_attachment(name: Any) -> bool:
    return isinstance(name, str) and any(kind in name for kind in _ATTACHMENTS)


def _values(found: Any) -> int:
    """Sums the texts anywhere in a JSON value."""
    if isinstance(found, str):
        return _text(found)
    if isinstance(found, Mapping):
        return sum(map(_values, found.values()))
    if isinstance(found, list | tuple):
        return sum(map(_values, found))
    return 0
