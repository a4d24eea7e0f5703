"""Lists what source files use of TensorRT, from their syntax trees.

The module is what is called `trt`. From there on types are inferred with the API itself: what a
class makes, a method returns and an attribute holds. Where inference ends, at parameters and at
fields of our own that are `Any`, a variable has the type that `NAMED` gives to its name, so that is
the name to use for it.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.export.bindings.api import Api, Signature

__all__ = ["NAMED", "Usage", "Use", "own_names"]

MODULE = "<module>"
OURS = "<ours>"  # what an annotation says not to be TensorRT's, and all that comes from it
NAMED = {
    "trt": MODULE,
    "builder": "Builder",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "inspector": "EngineInspector",
    "layer": "ILayer",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "product": "ILayer",
    "profile": "IOptimizationProfile",
    "runtime": "Runtime",
}


@dataclass(frozen=True)
class Use:
    """One use of a member: `name` is "Class.member", or of the module."""

    name: str
    where: str
    problem: str | None = None


@dataclass
class Usage:
    """Walks files; `uses` are of TensorRT, `unknown` attributes of what has no known type."""

    api: Api
    uses: list[Use] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)

    def read(self, path: Path) -> None:
        self._file = path.name
        tree = ast.parse(path.read_text())
        self._scopes: list[dict[str, str]] = [{}]
        self._attributes: dict[str, str] = {}
        self._block(tree.body)

    # Statements, in order, so that a name is known before it is used.

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.ClassDef():
                self._class(node)
            case ast.FunctionDef():
                arguments = [*node.args.args, *node.args.kwonlyargs]
                self._scopes.append({a.arg: OURS for a in arguments if _is_ours(a.annotation)})
                self._block(node.body)
                self._scopes.pop()
            case ast.Assign():
                kind = self._type(node.value)
                for target in node.targets:
                    self._bind(target, kind, node.value)
            case ast.AnnAssign():
                kind = self._type(node.value) if node.value else None
                kind = OURS if _is_ours(node.annotation) else kind
                self._bind(node.target, kind, node.value)
            case ast.For():
                self._bind(node.target, _element(self._type(node.iter)), None)
                self._block(node.body + node.orelse)
            case ast.With():
                for item in node.items:
                    kind = self._type(item.context_expr)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, kind, None)
                self._block(node.body)
            case ast.If() | ast.While():
                self._type(node.test)
                self._block(node.body + node.orelse)
            case ast.Try():
                self._block(node.body)
                for handler in node.handlers:
                    self._block(handler.body)
                self._block(node.orelse + node.finalbody)
            case ast.Match():
                self._type(node.subject)
                for case in node.cases:
                    self._block(case.body)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._type(child)

    def _class(self, node: ast.ClassDef) -> None:
        own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        for base in node.bases:
            kind = self._type(base)
            if kind is None or not kind.startswith("class:"):
                continue
            for name, function in own.items():  # what it overrides is called by TensorRT
                found = self.api.find(kind.removeprefix("class:"), name)
                if found is not None and name != "__init__":
                    count = len(function.args.args) - 1
                    fits = any(len(s.parameters) == count for s in self.api.calls[found])
                    self._use(found, node, None if fits else f"takes other than {count} parameters")
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                ours = _is_ours(item.annotation)
                self._attributes[item.target.id] = OURS if ours else ""
        self._block(node.body)

    def _bind(self, target: ast.expr, kind: str | None, value: ast.expr | None) -> None:
        match target:
            case ast.Name():
                self._scopes[-1][target.id] = kind or ""
            case ast.Tuple():
                values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
                for part, item in zip(target.elts, values, strict=False):
                    self._bind(part, self._type(item) if item is not None else None, item)
            case ast.Attribute(value=ast.Name(id="self")):
                if kind:
                    self._attributes[target.attr] = kind
            case ast.Attribute():
                owner = self._type(target.value)
                if owner == OURS:
                    return
                if owner is not None and (found := self.api.find(owner, target.attr)):
                    fits = found in self.api.writable
                    self._use(found, target, None if fits else "cannot be assigned to")
                elif owner is not None:
                    self._missing(owner, target)

    # Expressions: the type, after everything inside has been looked at.

    def _type(self, node: ast.expr) -> str | None:
        match node:
            case ast.Name():
                for scope in reversed(self._scopes):
                    if node.id in scope:
                        return scope[node.id] or NAMED.get(node.id)
                return NAMED.get(node.id)
            case ast.Attribute(value=ast.Name(id="self")):
                return self._attributes.get(node.attr) or NAMED.get(node.attr.lstrip("_"))
            case ast.Attribute():
                return self._member(node, self._type(node.value), node.attr)
            case ast.Call(func=ast.Name(id="getattr")) if len(node.args) > 1:
                owner = self._type(node.args[0])
                name = node.args[1]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    return self._member(node, owner, name.value)
                return None
            case ast.Call():
                return self._call(node)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                return self._comprehension(node)
            case ast.Subscript():
                self._type(node.slice)
                return _element(self._type(node.value))
            case ast.NamedExpr():
                kind = self._type(node.value)
                self._bind(node.target, kind, node.value)
                return kind
            case ast.IfExp():
                self._type(node.test)
                kinds = {self._type(node.body), self._type(node.orelse)} - {None}
                return kinds.pop() if len(kinds) == 1 else None
            case ast.Lambda():
                self._type(node.body)
                return None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._type(child)
        return None

    def _comprehension(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp
    ) -> str | None:
        self._scopes.append({})
        for generator in node.generators:
            self._bind(generator.target, _element(self._type(generator.iter)), None)
            for test in generator.ifs:
                self._type(test)
        if isinstance(node, ast.DictComp):
            self._type(node.key)
            kind = self._type(node.value)
        else:
            kind = self._type(node.elt)
        self._scopes.pop()
        return f"list[{kind}]" if kind else None

    def _member(self, node: ast.expr, owner: str | None, name: str) -> str | None:
        if owner == OURS:
            return OURS
        if owner is None or owner.startswith(("list[", "call:")):
            self.unknown.add(name)
            return None
        if owner == MODULE:
            if name in self.api.bases:
                self._use(name, node)
                return f"class:{name}"
            if name in self.api.calls:
                self._use(name, node)
                return f"call:{name}"
            if not name.startswith("__"):
                self._missing("the module", node, name)
            return None
        kind = owner.removeprefix("class:")
        found = self.api.find(kind, name)
        if found is None:
            if kind in self.api.bases:
                self._missing(kind, node, name)
            return None
        self._use(found, node)
        if found in self.api.bases:
            return f"class:{found}"
        return self.api.types.get(found) or f"call:{found}"

    def _call(self, node: ast.Call) -> str | None:
        of = self._type(node.func)
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self._type(argument)
        if of == OURS:
            return OURS
        if of is None or not of.startswith(("call:", "class:")):
            return None
        made = of.removeprefix("class:") if of.startswith("class:") else None
        name = f"{made}.__init__" if made else of.removeprefix("call:")
        overloads: list[Signature] = self.api.calls.get(name, [])
        starred = any(isinstance(item, ast.Starred) for item in node.args)
        keywords = {item.arg for item in node.keywords if item.arg}
        positional = len(node.args)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "__init__":
            positional -= 1  # trt.ILogger.__init__(self)
        fitting = [s for s in overloads if starred or s.accepts(positional, keywords)]
        if overloads and not fitting:
            self._use(name, node, f"takes no {positional} arguments {sorted(keywords) or ''}")
        if made:
            return made
        return fitting[0].returns if fitting else None

    def _use(self, name: str, node: ast.AST, problem: str | None = None) -> None:
        line = getattr(node, "lineno", 0)
        self.uses.append(Use(name, f"{self._file}:{line}", problem))

    def _missing(self, owner: str, node: ast.AST, name: str | None = None) -> None:
        name = name or getattr(node, "attr", "?")
        self._use(f"{owner}.{name}", node, "does not exist")


def _element(kind: str | None) -> str | None:
    """What a list of that type holds."""
    if kind == OURS:
        return OURS
    if kind is not None and kind.startswith("list["):
        return kind[5:-1]
    return None


def _is_ours(annotation: ast.expr | None) -> bool:
    """Whether an annotation names a type, which TensorRT's objects have none of."""
    if annotation is None:
        return False
    return not any(isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(annotation))


def own_names(paths: Iterable[Path]) -> set[str]:
    """Every function, class, field and attribute that these files define."""
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
    return found
