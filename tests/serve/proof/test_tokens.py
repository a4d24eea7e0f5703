"""Tests how a server's token is matched with a token id, by its text."""

import pytest
import tokenizers
from tokenizers import decoders, models

from serve.engine.chat_template import ChatTemplate
from serve.engine.request import PositionLogprobs, TokenLogprob
from serve.engine.tokenizer import Tokenizer
from serve.proof.tokens import UNKNOWN, TokenNames
from tests.fakes import END, byte_tokenizer


def token(text: str, logprob: float | None = -1.0, token_id: int = -1) -> TokenLogprob:
    return TokenLogprob(token_id, text, text.encode(), logprob)


@pytest.fixture
def pieces() -> TokenNames:
    """A vocabulary as SentencePiece has them: ▁ for a space, bytes as <0xNN>."""
    vocabulary = ["<unk>", "▁the", "the", "▁a", "<0xC3>", "<0xA9>", "!"]
    inner = tokenizers.Tokenizer(models.BPE({p: n for n, p in enumerate(vocabulary)}, []))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return TokenNames(Tokenizer(inner, ChatTemplate(None)))


def test_a_text_of_one_token_is_that_token(pieces: TokenNames) -> None:
    names = TokenNames(byte_tokenizer())
    assert [names.id_of(token(text)) for text in ("a", " ", "\n", "<|end|>")] == [97, 32, 10, END]
    assert pieces.id_of(token(" the")) == pieces.id_of(token("▁the")) == 1
    assert names.id_of(token("whatever", token_id=5)) == 5


def test_a_text_of_several_tokens_or_none_is_unknown(pieces: TokenNames) -> None:
    names = TokenNames(byte_tokenizer())
    assert names.id_of(token("\ufffd")) == UNKNOWN  # any of 128 bytes
    assert pieces.id_of(token("the")) == UNKNOWN  # or ▁the, of a server that leaves the space out
    assert names.id_of(token("ab")) == UNKNOWN
    assert not names.is_foreign(token("\ufffd")) and names.is_foreign(token("ab"))
    assert not TokenNames(None).is_foreign(token("ab"))


def test_an_unknown_token_is_one_of_the_rest_unless_the_reference_may_mean_it(
    pieces: TokenNames,
) -> None:
    best, other = token("!", -0.1), token("the", -3.0)
    position = PositionLogprobs(best, (best, other), 0)
    assert pieces.top(position, {6, 3}) == {6: -0.1}
    assert pieces.top(position, {6, 1}) == {}  # it may be ▁the, or not
    foreign = PositionLogprobs(best, (best, token("xyz", -3.0)), 0)
    assert pieces.top(foreign, {6, 1}) == {6: -0.1}


def test_part_of_a_character_may_be_any_byte_that_is_one(pieces: TokenNames) -> None:
    best = token("!", -0.1)
    for text in ("", "\ufffd"):  # servers hold it back, or show that it is not whole
        position = PositionLogprobs(best, (best, token(text, -2.0)), 0)
        assert pieces.top(position, {4}) == {} and pieces.top(position, {2}) == {6: -0.1}


def test_a_token_without_a_number_is_left_out() -> None:
    names = TokenNames(None)
    best = token("", -0.1, 7)
    position = PositionLogprobs(best, (best, token("", None, 8)), 0)
    assert names.top(position, {7, 8}) == {}
    assert names.top(position, {7}) == {7: -0.1}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("return", b"return"),  # all of it
        ("ret", b"ret"),  # it ends early
        ("rest", b"res"),  # then it is another
        ("x", b"x"),
        ("", b""),
        ("returned", b"return"),  # more than was asked
    ],
)
def test_the_tokens_of_a_text_are_read_along_the_golden_ones(text: str, tokens: bytes) -> None:
    names = TokenNames(byte_tokenizer())
    assert names.read(text, list(b"return"), 6) == tuple(tokens)
    assert TokenNames(None).read(text, list(b"return"), 6) == ()


def test_an_end_token_has_no_text_and_agrees_where_the_text_ends() -> None:
    names = TokenNames(byte_tokenizer())
    golden = [*b"ok", END, *b"!"]
    assert names.read("ok", golden, 4) == (*b"ok", END)
    assert names.read("ok then", golden, 4) == (*b"ok", 32)


def test_a_character_of_several_tokens_is_read_whole() -> None:
    names = TokenNames(byte_tokenizer())
    assert names.read("é!", [*"é!".encode()], 8) == tuple("é!".encode())
