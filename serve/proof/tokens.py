"""Maps a server's tokens to the artifact's: servers name tokens by id, or by their text alone.

A text identifies less than an id does. Tokens that are parts of a character all appear as U+FFFD,
and others share their text ("▁the" and "the", in a tokenizer that drops a first space). Such a name
is unknown. If it may be a token that the reference knows, that position cannot be compared;
otherwise it counts as one of the remaining tokens.
"""

from collections.abc import Collection, Sequence
from functools import cached_property

from serve.engine.request import PositionLogprobs, TokenLogprob
from serve.engine.tokenizer import Tokenizer

__all__ = ["UNKNOWN", "TokenNames"]

UNKNOWN = -1  # id of a token that its text does not identify
_BROKEN = "\ufffd"  # stands for bytes that are not complete UTF-8


class TokenNames:
    """Resolves names by the tokenizer beside the golden records.

    None is enough for servers that send ids.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def id_of(self, token: TokenLogprob) -> int:
        """Returns the only token that it can be, or UNKNOWN."""
        ids = self._candidates(token)
        return next(iter(ids)) if len(ids) == 1 else UNKNOWN

    def is_foreign(self, token: TokenLogprob) -> bool:
        """Returns whether no token of the artifact has its text: another tokenizer made it."""
        return self._tokenizer is not None and not self._candidates(token)

    def top(self, position: PositionLogprobs, reference: Collection[int]) -> dict[int, float]:
        """Maps token ids to log-probabilities; {} if an unknown name may be one of `reference`."""
        found: dict[int, float] = {}
        for token in (*position.top, position.chosen):
            ids = self._candidates(token)
            if len(ids) == 1 and token.logprob is not None:
                found[next(iter(ids))] = token.logprob
            elif not ids.isdisjoint(reference):
                return {}
        return found

    def read(self, text: str, golden: Sequence[int], most: int) -> tuple[int, ...]:
        """Returns the tokens of an answer's `text` that can be identified, `most` at most.

        These are the tokens of `golden` as far as the text agrees, then the first one that differs.
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
        """Maps every text that a server may send to the tokens that it may stand for.

        All tokens that are not complete UTF-8 are under U+FFFD, too.
        """
        assert self._tokenizer is not None
        found: dict[str, set[int]] = {}
        for token in range(self._tokenizer.vocab_size):
            text = self._tokenizer.token_bytes(token).decode(errors="replace")
            piece = self._tokenizer.inner.id_to_token(token)
            # Some servers send the piece itself; SentencePiece drops a first space.
            shown = {text, piece or text} | ({text[1:]} if (piece or "").startswith("▁") else set())
            for name in shown | ({_BROKEN} if _BROKEN in text else set()):
                found.setdefault(name, set()).add(token)
        return {text: frozenset(tokens) for text, tokens in found.items()}
