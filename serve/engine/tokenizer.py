"""Text to token ids and back: whole, token by token, and as the prompt of a conversation.

A detokenizer holds back incomplete characters; `StopChecker` holds back text that may become a stop
string.
"""

import asyncio
import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import tokenizers

from octet.errors import ArtifactError
from octet.storage.files import MAX_TOKENIZER_BYTES, read_file
from serve.engine.chat_template import ChatTemplate

__all__ = ["Detokenizer", "StopChecker", "Tokenizer", "beside"]

T = TypeVar("T")
LONG = 20_000  # characters or tokens; more take some 10 ms, so on a thread


class BytesDetokenizer:
    """Turns tokens into pieces of text, for byte-level tokenizers.

    The joined pieces are the text of all tokens: the concatenation of their bytes.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Returns the text that `token` completes; holds back bytes of half a character."""
        if token >= len(self._table):  # the model's vocabulary may be padded beyond the tokenizer's
            return ""
        return self._decoder.decode(self._table[token])

    def flush(self) -> str:
        """Returns the rest at the end; half a character becomes U+FFFD."""
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


Detokenizer: TypeAlias = BytesDetokenizer | PrefixDetokenizer


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


class Tokenizer:
    """A Hugging Face `tokenizer.json`, with the chat template that came with it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate) -> None:
        self.inner = tokenizer
        self.template = template

    @classmethod
    def load(cls, directory: Path, *, template: bool = True) -> "Tokenizer":
        """Loads the tokenizer of `directory`, without its chat template if `template` is False.

        Raises ArtifactError if one of them cannot be used.
        """
        path = directory / "tokenizer.json"
        try:
            inner = tokenizers.Tokenizer.from_buffer(read_file(path, MAX_TOKENIZER_BYTES))
        except OSError as error:
            raise ArtifactError(f"{path}: {error.strerror}") from None
        except Exception as error:  # the binding raises plain Exception
            raise ArtifactError(f"{path}: not a usable tokenizer ({error})") from None
        inner.no_truncation()
        inner.no_padding()
        return cls(inner, ChatTemplate.load(directory) if template else ChatTemplate(None))

    @property
    def vocab_size(self) -> int:
        return int(self.inner.get_vocab_size())

    def plain_texts(self) -> list[str]:
        """Returns the texts of all tokens that are text by themselves, but not special ones.

        A server may not let a text spell special tokens (mistral_common).
        """
        added = self.inner.get_added_tokens_decoder().items()
        special = {token for token, about in added if about.special}
        ids = (token for token in range(self.vocab_size) if token not in special)
        found = (self.token_bytes(token).decode(errors="replace") for token in ids)
        return [text for text in found if text and "\ufffd" not in text]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids; `add_special_tokens` adds the tokenizer's own, such as BOS.

        Special tokens spelled out in the text become those tokens, as in transformers.
        """
        # `encode` holds the interpreter lock all the time; `encode_batch` releases it.
        batch = self.inner.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def offsets(self, text: str) -> list[int]:
        """Returns the start of each token of `encode(text)` in `text`, in characters."""
        batch = self.inner.encode_batch([text])
        return [start for start, _ in batch[0].offsets]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, without special tokens; non-UTF-8 bytes become U+FFFD."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Returns token ids up to where the assistant's answer begins. Raises RequestError."""
        text = self.template.render(messages)
        # A template writes its own special tokens; the plain default needs the tokenizer's.
        return tuple(self.encode(text, add_special_tokens=self.template.is_default))

    def token_bytes(self, token: int) -> bytes:
        """Returns a token's bytes in the text; a special token is spelled out. Empty if unknown."""
        if not 0 <= token < len(self._spelled):
            return b""
        return self._spelled[token]

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """Makes a detokenizer for the tokens that follow `context`."""
        if self._plain_bytes is not None:
            return BytesDetokenizer(self._plain_bytes)
        return PrefixDetokenizer(self.decode, context)

    @cached_property
    def longest_token(self) -> int:
        """Length of the longest token in bytes; no token has more characters."""
        return max(map(len, self._spelled), default=1)

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(self.inner.get_added_tokens_decoder())

    @cached_property
    def _spelled(self) -> list[bytes]:
        """Bytes of every token id."""
        byte_level = self._is_byte_level
        table = []
        for token in range(self.vocab_size):
            piece = self.inner.id_to_token(token)
            if piece is None:
                table.append(b"")
            elif token in self._added:
                table.append(self._added[token].content.encode())
            elif byte_level:
                table.append(_bytes_of_byte_level(piece))
            else:
                table.append(_bytes_of_piece(piece))
        return table

    @cached_property
    def _plain_bytes(self) -> list[bytes] | None:
        """Bytes of every token, empty for special ones; None if decoding is not concatenation."""
        if not self._is_byte_level:
            return None
        special = {token for token, added in self._added.items() if added.special}
        return [b"" if token in special else s for token, s in enumerate(self._spelled)]

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self.inner.to_str()).get("decoder") or {}
        return bool(decoder.get("type") == "ByteLevel")


async def beside(function: Callable[..., T], *arguments: Any, size: int | None) -> T:
    """Returns `function(*arguments)`; computes it on a thread if the input is large.

    `size` is that of the input in characters or tokens. None, if the time does not depend on it,
    always takes a thread.
    """
    if size is not None and size < LONG:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def _byte_level_alphabet() -> dict[str, int]:
    """Returns GPT-2's printable characters for the 256 bytes: printable bytes stay themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()


def _bytes_of_byte_level(piece: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in piece)
    except KeyError:  # outside the alphabet: the decoder takes such a piece literally
        return piece.encode()


def _bytes_of_piece(piece: str) -> bytes:
    """Decodes a SentencePiece piece: `<0xNN>` is a byte, `▁` a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
