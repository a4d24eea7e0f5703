"""Which token of ours a server's token is: servers name tokens by id, or by their text alone.

A text tells less than an id: tokens that are parts of a character all show as U+FFFD, and others
share their text ("▁the" and "the", of a tokenizer that leaves a first space out). Such a name is
unknown. Where it may be a token that the reference knows, nothing can be said of that position;
elsewhere it is one of the rest.
"""

from collections.abc import Collection, Sequence
from functools import cached_property

from serve.engine.request import PositionLogprobs, TokenLogprob
from serve.engine.tokenizer import Tokenizer

__all__ = ["UNKNOWN", "TokenNames"]

UNKNOWN = -1  # a token id that a text does not tell
_BROKEN = "\ufffd"  # what bytes that are not whole UTF-8 show as


class TokenNames:
    """Of the tokenizer beside the golden records; None is enough for servers that send ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def id_of(self, token: TokenLogprob) -> int:
        """The only token that it can be, or UNKNOWN."""
        ids = self._candidates(token)
        return next(iter(ids)) if len(ids) == 1 else UNKNOWN

    def is_foreign(self, token: TokenLogprob) -> bool:
        """Whether its text is none of our tokens', so that it comes from another tokenizer."""
        return self._tokenizer is not None and not self._candidates(token)

    def top(self, position: PositionLogprobs, reference: Collection[int]) -> dict[int, float]:
        """Token id -> log-probability; {} where one of `reference` may hide behind a text."""
        found: dict[int, float] = {}
        for token in (*position.top, position.chosen):
            ids = self._candidates(token)
            if len(ids) == 1 and token.logprob is not None:
                found[next(iter(ids))] = token.logprob
            elif not ids.isdisjoint(reference):
                return {}
        return found

    def read(self, text: str, golden: Sequence[int], most: int) -> tuple[int, ...]:
        """The tokens of an answer's `text` as far as they can be told, `most` at most.

        Those of `golden` for as long as the text goes on like them, then the first that is another.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            return ()
        agreed, length = 0, 0
        for count in range(1, min(len(golden), most) + 1):
            whole = tokenizer.decode(golden[:count]).rstrip(_BROKEN)
            ends = len(whole) == length and not tokenizer.decode(golden[count - 1 : count])
            if not text.startswith(whole) or (ends and text != whole):
                break
            agreed, length = count, len(whole)
        rest = tokenizer.encode(text[length:], add_special_tokens=False)[:1]
        other = agreed < most and rest and rest != list(golden[agreed : agreed + 1])
        return (*golden[:agreed], *(rest if other else ()))

    def _candidates(self, token: TokenLogprob) -> frozenset[int]:
        if token.token_id >= 0:
            return frozenset((token.token_id,))
        if self._tokenizer is None:
            return frozenset()
        known = self._by_text.get(token.text, frozenset())
        if not known and (_BROKEN in token.text or not token.text):
            return self._by_text.get(_BROKEN, frozenset())  # part of a character
        return known

    @cached_property
    def _by_text(self) -> dict[str, frozenset[int]]:
        """Every text that a server may show, with the tokens that it may be.

        All tokens that are not whole UTF-8 are under U+FFFD, too.
        """
        assert self._tokenizer is not None
        found: dict[str, set[int]] = {}
        for token in range(self._tokenizer.vocab_size):
            text = self._tokenizer.token_bytes(token).decode(errors="replace")
            piece = self._tokenizer.inner.id_to_token(token)
            # Some servers show the piece itself; SentencePiece leaves a first space out.
            shown = {text, piece or text} | ({text[1:]} if (piece or "").startswith("▁") else set())
            for name in shown | ({_BROKEN} if _BROKEN in text else set()):
                found.setdefault(name, set()).add(token)
        return {text: frozenset(tokens) for text, tokens in found.items()}
