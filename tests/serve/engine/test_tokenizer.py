"""Tokens to text and back, one at a time, and conversations to prompts."""

import itertools
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers

from octet.errors import ArtifactError, RequestError
from serve.engine.chat_template import ChatTemplate
from serve.engine.tokenizer import StopChecker, Tokenizer
from tests.fakes import END, byte_tokenizer

BYTES = byte_tokenizer()
TEXTS = [
    "",
    "plain",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 family 😀😀",
    "a\u0301 combined",
    "\x00\r\n\t ",
]


def sentencepiece_like() -> Tokenizer:
    """A space is ▁, a text begins with one that decoding drops, unknown letters are bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghij", "ab", "▁c"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[("a", "b"), ("▁", "c")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("▁"), " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["</s>"])
    return Tokenizer(inner, ChatTemplate(None))


PIECES = sentencepiece_like()


def piecewise(tokenizer: Tokenizer, ids: list[int], context: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(context)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.sampled_from(TEXTS))
def test_text_comes_back_whole_and_never_in_half_characters(
    tokenizer: Tokenizer, text: str
) -> None:
    text = text.replace("▁", "_").replace("\ufffd", "?")
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) != text:  # the tokenizer itself does not keep this text
        return
    pieces = piecewise(tokenizer, ids, [])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_token_after_a_context_keeps_its_space() -> None:
    context, answer = PIECES.encode("ab"), PIECES.encode(" c ab")[1:]
    assert "".join(piecewise(PIECES, answer, context)) == PIECES.decode(context + answer)[2:]
    assert "".join(piecewise(PIECES, answer, context)).startswith(" c")


@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_become_what_a_lossy_decoder_makes_of_them(ids: list[int]) -> None:
    assert "".join(piecewise(BYTES, ids, [])) == bytes(ids).decode(errors="replace")


def test_half_a_character_waits_and_is_replaced_at_the_end() -> None:
    e_acute = list("é".encode())
    assert piecewise(BYTES, e_acute, []) == ["", "é", ""]
    assert piecewise(BYTES, e_acute[:1], []) == ["", "\ufffd"]
    assert piecewise(PIECES, [2 + 0xC3], []) == ["", "\ufffd"]


def test_bytes_that_are_no_text_do_not_wait_for_ever() -> None:
    pieces = piecewise(PIECES, [2 + 0xFF] * 20, PIECES.encode("ab"))
    assert "".join(pieces[:12]), "nothing was shown of 12 bytes that can never be text"


def test_special_tokens_are_not_text_but_have_a_spelling() -> None:
    assert piecewise(BYTES, [*b"ab", END, *b"c"], []) == ["a", "b", "", "c", ""]
    assert BYTES.token_bytes(END) == b"<|end|>"
    assert BYTES.token_bytes(0xC3) == b"\xc3"
    assert PIECES.token_bytes(2 + 0xC3) == b"\xc3"
    assert PIECES.token_bytes(PIECES.encode("a c")[-1]) == b" c"


def test_ids_beyond_the_vocabulary_are_nothing() -> None:
    assert BYTES.token_bytes(9999) == b"" and piecewise(BYTES, [9999, 65], []) == ["", "A", ""]


def test_the_examples_tokenizer_spells_every_text(example_model: Path) -> None:
    tokenizer = Tokenizer.load(example_model)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
        assert "".join(piecewise(tokenizer, ids, [])) == text


def check_stops(text: str, cuts: list[int], stops: list[str]) -> None:
    checker, shown = StopChecker(stops), ""
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in itertools.pairwise(borders):
        safe, found = checker.push(text[start:end])
        shown += safe
        if found is not None:
            at = text[:end].find(found)
            assert shown == text[:at]
            assert all(stop not in text[: end - 1][: at + len(stop) - 1] for stop in stops)
            return
        assert not any(stop in text[:end] for stop in stops)
        assert text.startswith(shown)
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert shown + checker.flush() == text


@given(
    text=st.text("abc", max_size=30),
    cuts=st.lists(st.integers(0, 30)),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_end_the_text_and_nothing_of_them_is_shown(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    check_stops(text, cuts, stops)


def test_a_stop_string_across_three_pieces() -> None:
    checker = StopChecker(["\n\n", "END"])
    assert checker.push("x = 1E") == ("x = 1", None)
    assert checker.push("N") == ("", None)
    assert checker.push("X\n") == ("ENX", None)
    assert checker.push("\nmore") == ("", "\n\n")


def test_the_default_template_is_plain_headings() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi!"},
    ]
    expected = "### System:\nBe brief.\n\n### User:\nHi!\n\n### Assistant:\n"
    assert bytes(BYTES.chat_prompt(messages)).decode() == expected


def test_a_models_own_template_is_used(tmp_path: Path) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = {"chat_template": source, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "x"}]
    assert ChatTemplate.load(tmp_path).render(messages) == "<s><user>x<assistant>"
    (tmp_path / "chat_template.jinja").write_text("other")
    assert ChatTemplate.load(tmp_path).render(messages) == "other"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source: str) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("content", [None, "{}", "{not json"])
def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_broken_template_says_where() -> None:
    with pytest.raises(ArtifactError, match="line 2"):
        ChatTemplate("\n{% if %}")
