"""The prompt of a conversation: the model's own template, or a plain default."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octet.errors import ArtifactError, RequestError
from octet.model.chat_template import DEFAULT_TEMPLATE, template_of, tokenizer_config

__all__ = ["ChatTemplate"]

MOST_SHOWN = 500  # characters of an error
MOST_REPEATED = 1_000_000  # characters, or elements
MOST_POWER = 1000


class ChatTemplate:
    """A Jinja template as transformers defines them, rendered in a sandbox."""

    def __init__(self, source: str | None, variables: Mapping[str, Any] | None = None) -> None:
        """`variables` are special tokens that the template may name. Raises ArtifactError."""
        self.is_default = source is None
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source or DEFAULT_TEMPLATE)
        except jinja2.TemplateSyntaxError as error:
            raise ArtifactError(f"chat template, line {error.lineno}: {error.message}") from None
        except Exception as error:  # nested too deeply, for example
            what = str(error)[:MOST_SHOWN] or type(error).__name__
            raise ArtifactError(f"chat template: cannot be compiled: {what}") from None
        self._variables = dict(variables or {})

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """Loads the directory's own template (see octet/model/chat_template.py), or the default."""
        config = tokenizer_config(directory)
        tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        return cls(template_of(directory), tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the prompt of messages with text contents, ending where the assistant begins.

        Raises RequestError if the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._variables
            )
        # A template is a program: messages that it does not expect can raise anything.
        except Exception as error:
            what = str(error)[:MOST_SHOWN] or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {what}", param="messages"
            ) from None


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no multiplication or power makes a huge text or number."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(x, int | float) and abs(x) <= MOST_POWER for x in (left, right)):
                raise ValueError("the power is too large")
        elif _repeats(left, right) or _repeats(right, left):
            raise ValueError("the repeated text or list is too long")
        return super().call_binop(context, operator, left, right)


def _repeats(what: Any, count: Any) -> bool:
    """Decides whether `what * count` is a text or a list of more than `MOST_REPEATED`."""
    if not (isinstance(what, str | bytes | list | tuple) and isinstance(count, int)):
        return False
    return len(what) * count > MOST_REPEATED


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Like Jinja's filter, without its HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
