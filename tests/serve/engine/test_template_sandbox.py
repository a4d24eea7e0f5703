"""Chat templates of unknown origin: each ends in one clear error, soon and in little memory."""

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from octet.errors import ArtifactError, OctetError, RequestError
from serve.engine.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]
_TWICE = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = "

# Name -> a template, and what the error says of it.
HOSTILE = {
    "division by zero": ("{{ 1 / 0 }}", "division by zero"),
    "modulo zero": ("{{ 1 % 0 }}", "modulo by zero"),
    "zero to the power of -1": ("{{ 0 ** -1 }}", "negative power"),
    "float overflow": ("{{ 10.0 ** 400 }}", "out of range"),
    "long number": ("{{ 10 ** 5000 }}", "4300 digits"),
    "long power": ("{{ 10 ** 99999999 }}", "it makes more than 16 Mi"),
    "endless macro": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    "endless loop": ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "recursion"),
    "branching macro": (
        "{% macro f(x) %}{% if x > 0 %}{{ f(x-1) ~ f(x-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "it takes more than 2 s",
    ),
    "nested loops": (
        "{% set l = range(99999)|list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
        "it takes more than 2 s",
    ),
    "a large range": ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
    "a large string": ("{{ 'a' * 2000000000 }}", "it makes more than 16 Mi"),
    "a large list": ("{{ ([0] * 10**11)|length }}", "it makes more than 16 Mi"),
    "doubling by ~": (_TWICE + "n.s ~ n.s %}{% endfor %}", "it makes more than 16 Mi"),
    "doubling by +": (_TWICE + "n.s + n.s %}{% endfor %}", "it makes more than 16 Mi"),
    "much text": (
        "{% set s = 'a' * 1000000 %}{% for a in range(99999) %}{{ s }}{% endfor %}",
        "it makes more than 16 Mi",
    ),
    "a padded string": ("{{ 'a'.center(10**10) }}", "center"),
    "a width by filter": ("{{ 'a'|center(2000000000) }}", "width"),
    "a width in a format": ("{{ '{:>2000000000}'.format(1) }}", "width"),
    "a width as an argument": ("{{ '%*d' % (2000000000, 1) }}", "width"),
    "an indent": ("{{ messages|tojson(indent=10**9) }}", "indent"),
    "empty cycle": ("{{ cycler().next() }}", "at least one item"),
    "half a character": (r"{{ '\ud800' }}", "surrogates not allowed"),
    "Python's internals": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "break outside a loop": ("{% break %}", "too complex"),
    "deep parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "too complex"),
    "deep loops": ("{% for a in [1] %}" * 100 + "{% endfor %}" * 100, "too complex"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_one_line(name: str) -> None:
    source, found = HOSTILE[name]
    before = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(OctetError, match=found) as caught:
            ChatTemplate(source).render(HELLO)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - before < 5  # of which tracing takes a part
    assert isinstance(caught.value, RequestError | ArtifactError)
    assert "\n" not in str(caught.value) and "chat template" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ messages[0].content }}", "a1Nonehello"),
        ("{{ 2 ** 10 }} {{ 7 % 4 }} {{ 'x' * 3 }} {{ [1] + [2] }}", "1024 3 xxx [1, 2]"),
        ("{{ '%02d %s' % (7, 'a') }} {{ '{:>4}|{}'.format(1, 2) }}", "07 a    1|2"),
        ("{% for a in [1, 2] %}{{ loop.index }}{% else %}none{% endfor %}", "12"),
        (
            "{% macro f(x) %}<{{ caller() }}{{ x }}>{% endmacro %}{% call f(1) %}y{% endcall %}",
            "<y1>",
        ),
        ("{{ messages[0]|tojson(indent=4) }}", '{\n    "role": "user",\n    "content": "hello"\n}'),
        ("{% for m in messages %}{% continue %}{% endfor %}", ""),
    ],
)
def test_an_honest_template_is_rendered_as_by_jinja(source: str, text: str) -> None:
    assert ChatTemplate(source).render(HELLO) == text


def test_a_long_conversation_is_rendered_within_the_limits() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * 100}] * 50_000
    text = ChatTemplate(None).render(messages)
    assert text.count("### User:") == 50_000


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\xff\xfe", "chat_template.jinja: not UTF-8 text"),
        (b"x" * (2 << 20), "chat_template.jinja: larger than the 1 MiB"),
    ],
)
def test_a_template_file_of_another_kind_is_refused(
    content: bytes, found: str, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(ArtifactError, match=found):
        ChatTemplate.load(tmp_path)
