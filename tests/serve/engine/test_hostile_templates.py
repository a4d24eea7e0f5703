"""Chat templates that fail in every way: a refusal of the request, never a defect of the gateway.

A template comes with a checkpoint. Jinja's sandbox gives it no access to anything; what is left is
to fail, and to take time and memory.
"""

import time

import pytest

from octet.errors import ArtifactError, RequestError
from serve.engine.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "x"}]
FAILING = {
    "division": "{{ 1 / messages[0].content | length / 0 }}",
    "division by a count": "{{ 1 % (messages | length - 1) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a long text": "{{ 'a' * 100000000000 }}",
    "a long text, the other way": "{{ 100000000000 * 'a' }}",
    "a long list": "{{ [0] * 10000000000 }}",
    "a long list of messages": "{{ messages * 10000000000 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a power of a variable": "{{ (messages | length + 9) ** 999999999 }}",
    "a long range": "{% for x in range(1000000000) %}{% endfor %}",
    "another's attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a format that looks inside": "{{ '{0.__class__}'.format(messages).nothing.nothing }}",
    "an import": "{% import 'os' as os %}",
    "a file": "{% include '/etc/passwd' %}",
    "a change": "{{ messages.append(1) }}",
    "a filter's argument": "{{ 1 | round('a') }}",
    "a date": "{{ strftime_now(1) }}",
    "an exception": "{{ raise_exception('no system messages') }}",
    "its own exception": "{{ raise_exception(messages) }}",
    "a number without end": "{{ '1e999' | float | int }}",
    "an attribute of nothing": "{{ messages.a.b.c }}",
    "JSON that goes round": "{{ cycler | tojson }}",
    "a text that is none": "{{ '\\ud800' | urlencode }}",
}


@pytest.mark.parametrize("source", FAILING.values(), ids=FAILING)
def test_a_template_that_fails_refuses_the_messages(source: str) -> None:
    began = time.thread_time()
    with pytest.raises((RequestError, ArtifactError)) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert len(str(caught.value)) < 1000
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("source", ["{{ " + "(" * 100_000, "{% if 1 %}" * 20_000], ids=["(", "if"])
def test_a_template_that_cannot_be_compiled_is_said_to_be(source: str) -> None:
    with pytest.raises(ArtifactError, match="chat template"):
        ChatTemplate(source)


def test_templates_may_still_multiply() -> None:
    source = "{{ '-' * 3 }}{{ 2 ** 10 }}{{ 3 * 4.5 }}{{ [1] * 2 }}"
    assert ChatTemplate(source).render(MESSAGES) == "---102413.5[1, 1]"
