"""POST /v1/completions: writes its choices and log-probabilities."""

from collections.abc import Sequence
from typing import Any

from serve.api.generate import LOWEST_LOGPROB
from serve.engine.request import Delta, Finished, PositionLogprobs, TokenLogprob

__all__ = ["CompletionDialect"]


class CompletionDialect:
    id_prefix = "cmpl"
    object = chunk_object = "text_completion"

    def choice(self, index: int, deltas: Sequence[Delta], end: Finished) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        positions = [p for delta in deltas for p in delta.logprobs or ()]
        asked = any(delta.logprobs is not None for delta in deltas)
        return _choice(index, text, positions if asked else None, end)

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        return _choice(index, delta.text, delta.logprobs, None)

    def end(self, index: int, end: Finished) -> dict[str, Any]:
        return _choice(index, "", None, end)


def _choice(
    index: int, text: str, positions: Sequence[PositionLogprobs] | None, end: Finished | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None if positions is None else _logprobs(positions),
        "finish_reason": end.reason if end else None,
        "stop_reason": end.stop_reason if end else None,  # vLLM's addition
    }


def _logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """Returns parallel lists over the tokens. The first token of an echoed prompt has nulls."""
    return {
        "tokens": [_name(p.chosen) for p in positions],
        "token_logprobs": [_finite(p.chosen.logprob) for p in positions],
        "top_logprobs": [_top(p) for p in positions],
        "text_offset": [p.text_offset for p in positions],
    }


def _top(position: PositionLogprobs) -> dict[str, float | None] | None:
    """Returns the most likely tokens, and the chosen one if it is not among them."""
    if position.chosen.logprob is None:
        return None
    return {_name(token): _finite(token.logprob) for token in (*position.top, position.chosen)}


def _name(token: TokenLogprob) -> str:
    """Returns the token's text, or its bytes in OpenAI's notation if they are not whole UTF-8.

    Tokens are the keys of `top_logprobs`. Written as U+FFFD, all such tokens would share one key.
    """
    if token.bytes and token.text != token.bytes.decode(errors="surrogateescape"):
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.text


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
