"""The prompt of a conversation: the model's own template, or a plain default."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from octet.errors import ArtifactError, RequestError
from octet.model.chat_template import DEFAULT_TEMPLATE, template_of, tokenizer_config
from serve.engine.template_sandbox import Sandbox

__all__ = ["ChatTemplate"]

MOST_SHOWN = 500  # characters of an error


class ChatTemplate:
    """A Jinja template as transformers defines them, rendered in a sandbox."""

    def __init__(self, source: str | None, variables: Mapping[str, Any] | None = None) -> None:
        """`variables` are special tokens that the template may name. Raises ArtifactError."""
        self.is_default = source is None
        environment = Sandbox()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.compile_limited(source or DEFAULT_TEMPLATE)
        except jinja2.TemplateSyntaxError as error:
            raise ArtifactError(f"chat template, line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, MemoryError) as error:  # of the Python made of it
            raise ArtifactError(f"chat template: too complex ({_reason(error)})") from None
        self._environment = environment
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

        Raises RequestError if the template refuses the messages, or takes too much.
        """
        variables = {**self._variables, "messages": messages, "add_generation_prompt": True}
        try:
            text = self._environment.render_limited(self._template, variables)
            text.encode()  # fails on a lone surrogate that only the template wrote
        except Exception as error:  # a template is a program, and may fail in any way
            reason = f"the model's chat template refuses these messages: {_reason(error)}"
            raise RequestError(reason, param="messages") from None
        return text


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _reason(error: BaseException) -> str:
    return str(error)[:MOST_SHOWN] or type(error).__name__


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Like Jinja's filter, without its HTML escapes."""
    if indent is not None and not 0 <= int(indent) <= 16:
        raise ValueError(f"tojson(indent={indent})")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
