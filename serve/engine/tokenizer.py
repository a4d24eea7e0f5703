"""Text to token ids and back: whole, token by token, and as the prompt of a conversation."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from octet.errors import ArtifactError
from serve.engine.chat_template import ChatTemplate
from serve.engine.detokenizer import BytesDetokenizer, Detokenizer, PrefixDetokenizer

__all__ = ["Tokenizer"]


class Tokenizer:
    """A Hugging Face `tokenizer.json`, with the chat template that came with it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate) -> None:
        self.inner = tokenizer
        self.template = template

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Raises ArtifactError for a directory without a usable tokenizer.json."""
        path = directory / "tokenizer.json"
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises plain Exception
            raise ArtifactError(f"{path}: not a usable tokenizer ({error})") from None
        inner.no_truncation()
        inner.no_padding()
        return cls(inner, ChatTemplate.load(directory))

    @property
    def vocab_size(self) -> int:
        return int(self.inner.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with what the tokenizer puts around a text (such as BOS) unless told not to.

        Special tokens spelled out in the text become those tokens, as in transformers.
        """
        # `encode` holds the interpreter lock for as long as it takes; `encode_batch` lets go of it.
        batch = self.inner.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def offsets(self, text: str) -> list[int]:
        """Where in `text` each token of `encode(text)` begins, in characters."""
        batch = self.inner.encode_batch([text])
        return [start for start, _ in batch[0].offsets]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids up to where the assistant's answer begins. Raises RequestError."""
        text = self.template.render(messages)
        # A template writes its own special tokens; the plain default still wants the tokenizer's.
        return tuple(self.encode(text, add_special_tokens=self.template.is_default))

    def token_bytes(self, token: int) -> bytes:
        """What the token is in the text; a special token is spelled out. Empty if unknown."""
        if not 0 <= token < len(self._spelled):
            return b""
        return self._spelled[token]

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A decoder for the tokens that follow `context`."""
        if self._plain_bytes is not None:
            return BytesDetokenizer(self._plain_bytes)
        return PrefixDetokenizer(self.decode, context)

    @cached_property
    def longest_token(self) -> int:
        """In bytes, so no token stands for more characters."""
        return max(map(len, self._spelled), default=1)

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(self.inner.get_added_tokens_decoder())

    @cached_property
    def _spelled(self) -> list[bytes]:
        """The bytes of every token id."""
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
        """Bytes of every token, special ones as nothing; None if decoding is not concatenation."""
        if not self._is_byte_level:
            return None
        special = {token for token, added in self._added.items() if added.special}
        return [b"" if token in special else s for token, s in enumerate(self._spelled)]

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self.inner.to_str()).get("decoder") or {}
        return bool(decoder.get("type") == "ByteLevel")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: those that print are themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()


def _bytes_of_byte_level(piece: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in piece)
    except KeyError:  # not in the alphabet: the decoder takes such a piece literally
        return piece.encode()


def _bytes_of_piece(piece: str) -> bytes:
    """A SentencePiece piece: `<0xNN>` is a byte, `▁` a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
