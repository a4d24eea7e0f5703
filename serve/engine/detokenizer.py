"""Tokens to text, one at a time; holds back half characters and what may become a stop string."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["BytesDetokenizer", "Detokenizer", "PrefixDetokenizer", "StopChecker"]


class Detokenizer(Protocol):
    """Turns tokens into pieces of text, which joined are the text of all tokens."""

    def push(self, token: int) -> str:
        """Returns the text that `token` completes; holds back bytes of half a character."""

    def flush(self) -> str:
        """Returns the rest at the end; half a character becomes U+FFFD."""


class BytesDetokenizer:
    """For byte-level tokenizers, whose text is the concatenation of their tokens' bytes."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        if token >= len(self._table):  # the model's vocabulary may be padded beyond the tokenizer's
            return ""
        return self._decoder.decode(self._table[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PrefixDetokenizer:
    """For any other tokenizer: decodes a short tail of tokens with and without the newest.

    A decoder may drop a leading space or join tokens, so the text of a token is the difference that
    it makes after the tokens before it.
    """

    CONTEXT = 6  # tokens before the answer that are decoded with it
    LONGEST = 8  # a character takes 4 tokens at most, so more tokens never become text

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._tail = list(context[-self.CONTEXT :])
        self._known = decode(self._tail)  # the part of the tail's text that has been returned
        self._fresh = len(self._tail)  # tokens of the tail that make up `_known`

    def push(self, token: int) -> str:
        self._tail.append(token)
        text = self._decode(self._tail)
        unfinished = text.endswith("\ufffd") and len(self._tail) - self._fresh < self.LONGEST
        if unfinished or len(text) <= len(self._known):
            return ""
        new = text[len(self._known) :]
        # The newest tokens are enough context from here on.
        self._tail = self._tail[self._fresh :]
        self._fresh = len(self._tail)
        self._known = self._decode(self._tail)
        return new

    def flush(self) -> str:
        return self._decode(self._tail)[len(self._known) :]


class StopChecker:
    """Holds back the end of the text while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns text that is safe to show, and the stop string that ends it, or None.

        The earliest stop string in the text counts; the text ends before it.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda item: item[0])
            self._held = ""
            return text[:at], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Returns the text held back, for the end of an answer without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest proper prefix of `stop` that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
