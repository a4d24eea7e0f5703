"""Tokenizer functions that a Triton model needs: text to ids, ids to text, its end tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octet.errors import NeedsTokenizer, UnsupportedField
from octet.storage.files import read_json
from serve.engine.tokenizer import Tokenizer

__all__ = ["end_tokens", "prompt_ids", "prompt_text", "unsupported"]

Prompt = str | tuple[int, ...]


def prompt_text(name: str, tokenizer: Tokenizer | None, prompt: Prompt) -> str:
    """Returns a text that the model's tokenizer turns into exactly `prompt`.

    Tries it without the first token too: the server's tokenizer may add a BOS itself. Raises
    UnsupportedField if there is no such text, or no tokenizer here.
    """
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise _unspelled(f"{name} takes text, not token ids")
    for start in (0, 1):
        text = str(tokenizer.inner.decode(list(prompt[start:]), skip_special_tokens=False))
        if tuple(tokenizer.encode(text)) == prompt:
            return text
    raise _unsupported("prompt", f"{name} takes text, and no text has exactly these token ids")


def prompt_ids(name: str, tokenizer: Tokenizer | None, prompt: Prompt) -> Sequence[int]:
    """Returns token ids. Raises UnsupportedField for a text without a tokenizer here."""
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise _unspelled(f"{name} takes token ids, not text")
    return tokenizer.encode(prompt)


def unsupported(name: str, field: str, reason: str) -> UnsupportedField:
    """Returns the refusal of a field that another backend of the pool may accept."""
    return _unsupported(field, f"'{field}' is not supported by {name}: {reason}")


def end_tokens(directory: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the model's end token ids, from the files beside its tokenizer; may be none."""
    for file in ("generation_config.json", "config.json"):
        found = _read(directory / file).get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found and all(isinstance(token, int) for token in found):
            return tuple(found)
    token = _read(directory / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    spelled = tokenizer.inner.token_to_id(token) if isinstance(token, str) else None
    return () if spelled is None else (spelled,)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _unspelled(message: str) -> NeedsTokenizer:
    message = f"{message}: give the backend a tokenizer"
    return NeedsTokenizer(message, param="prompt", code="unsupported_field")


def _unsupported(field: str, message: str) -> UnsupportedField:
    return UnsupportedField(message, param=field, code="unsupported_field")
