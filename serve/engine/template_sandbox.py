"""A Jinja environment for templates of unknown origin: no access to Python, limited time and size.

Jinja's own sandbox keeps a template from reaching Python's internals, and ranges below 100,000. It
limits neither nested loops nor the size of a string, and a rendering may hold up all requests.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["Sandbox"]

_SECONDS = 2.0  # of the rendering thread's CPU time; a real template takes milliseconds
_STEPS = 64  # loop iterations and macro calls between two looks at the clock
_CHARACTERS = 1 << 24  # of the rendered text, and of one string or list in the template
_DIGITS = re.compile(r"\d{5}|\*|:[^}]*\{")  # a width of 10,000 or more, or a computed one
_PADDING = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox; a template that takes too much raises TemplateRuntimeError."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        for name in ("center", "format", "indent", "wordwrap"):  # take a width
            self.filters[name] = _refuse_width
        self.filters["count_step"] = pass_context(lambda *_: self._count_step())
        del self.globals["lipsum"]
        self._spent = threading.local()

    def compile_limited(self, source: str) -> Template:
        """Compiles a template whose loops, macros and joined strings are counted."""
        tree = self.parse(source)
        repeated: list[nodes.For | nodes.Macro] = []
        repeated += [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in repeated:
            # A filter is called directly; a method would pass the sandbox's checks each time.
            step = nodes.Filter(nodes.Const(None), "count_step", [], [], None, None)
            counted = nodes.ExprStmt(step)
            node.body.insert(0, counted.set_lineno(node.lineno))
        return self.from_string(_Joined().visit(tree))

    def render_limited(self, template: Template, variables: dict[str, Any]) -> str:
        """Renders a template of `compile_limited`; raises whatever it raises."""
        self._spent.steps, self._spent.until = 0, time.thread_time() + _SECONDS
        return "".join(_limited(template.generate(variables)))

    def _count_step(self) -> None:
        """Called by the template in each iteration of a loop and each call of a macro."""
        self._spent.steps += 1
        if self._spent.steps % _STEPS == 0 and time.thread_time() > self._spent.until:
            raise TemplateRuntimeError(f"it takes more than {_SECONDS:.0f} s")

    def joined(self, *parts: Any) -> str:
        """Evaluates `a ~ b`."""
        texts = [str(part) for part in parts]
        _require(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (isinstance(left, int) and isinstance(right, int)):
            bits = abs(right) if operator == "**" and isinstance(right, int) else 1
            _require(max(1, _bits(left)) * bits if operator == "**" else _bits(left) + _bits(right))
        elif operator == "*":
            _require(_size(left) * (right if isinstance(right, int) else 1))
            _require(_size(right) * (left if isinstance(left, int) else 1))
        elif operator == "+":
            _require(_size(left) + _size(right))
        elif isinstance(left, str) and _DIGITS.search(left):
            _refuse_width()
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _PADDING:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        text = getattr(value, "__self__", "")
        return _refuse_width if wrapped is not None and _DIGITS.search(text) else wrapped


class _Joined(NodeTransformer):
    """Replaces `a ~ b`, which the sandbox does not intercept, by a call of `Sandbox.joined`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("joined", node.nodes)


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _limited(pieces: Iterator[str]) -> Iterator[str]:
    total = 0
    for piece in pieces:
        total += len(piece)
        _require(total)
        yield piece


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _require(size: int) -> None:
    if size > _CHARACTERS:
        raise TemplateRuntimeError(f"it makes more than {_CHARACTERS >> 20} Mi characters")


def _refuse_width(*_: Any, **__: Any) -> str:
    raise TemplateRuntimeError("it pads text to a width, which Octet does not render")
