"""/docs: the OpenAPI document as one HTML page, without scripts or external resources.

The page shares its origin with the API, for which users hold keys. Its Content-Security-Policy
therefore lets a browser load nothing, run nothing and send nothing.
"""

import base64
import functools
import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from octet.errors import RequestError
from serve.api.errors import error_bytes

__all__ = ["headers", "render"]

Json = dict[str, Any]
_TEMPLATE = Path(__file__).with_name("docs_page.html.jinja")
_STYLE = Path(__file__).with_name("docs_page.css")
_LIMITS = {  # OpenAPI's limits, as people write them
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} entries",
    "maxItems": "at most {} entries",
    "pattern": "matches {}",
}
_MESSAGES = [{"role": "user", "content": "Hello!"}]
_BODIES: dict[str, Json] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 32},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 32},
    "/v1/embeddings": {"input": "Hello!"},
    "/tokenize": {"prompt": "Hello!"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
_ERROR = RequestError(
    "the prompt has 600 tokens, and the model takes 512",
    param="prompt",
    code="context_length_exceeded",
)


def headers() -> dict[str, str]:
    """Returns the headers of the page. They allow its one style sheet, by its hash."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


def render(document: Json, base_url: str, model: str) -> str:
    """Renders the page of `document`, with examples that request `model` from `base_url`."""
    operations = [
        _operation(path, method, operation, document, base_url.rstrip("/"), model)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document["components"]["schemas"]
    return _template().render(
        info=document["info"],
        operations=operations,
        schemas={name: (_type(schemas[name]), _fields(schemas[name])) for name in sorted(schemas)},
        error=json.dumps(json.loads(error_bytes(_ERROR)), indent=2),
        style=Markup(_style()),
    )


def _operation(
    path: str, method: str, operation: Json, document: Json, base_url: str, model: str
) -> Json:
    parameters = [_resolved(p, document) for p in operation.get("parameters", ())]
    content = operation.get("requestBody", {}).get("content", {})
    schema = next((kind.get("schema", {}) for kind in content.values()), None)
    name = schema.get("$ref", "").rpartition("/")[2] if schema else ""
    return {
        "id": operation["operationId"],
        "method": method.upper(),
        "path": path,
        "summary": operation["summary"],
        "secured": bool(operation.get("security")),
        "parameters": [
            {
                "name": p["name"],
                "where": p["in"],
                "type": _type(p["schema"]),
                "limits": _limits(p["schema"]),
                "required": p.get("required", False),
                "about": p.get("description", ""),
            }
            for p in parameters
        ],
        "body": _fields(document["components"]["schemas"][name]) if name else [],
        "schema": name,
        "answers": [
            {
                "status": status,
                "about": answer["description"],
                "content": [
                    {"type": kind, "schema": _type(about.get("schema", {}))}
                    for kind, about in answer.get("content", {}).items()
                ],
                "headers": ", ".join(answer.get("headers", ())),
            }
            for status, answer in operation["responses"].items()
        ],
        "example": _example(path, method, base_url, model, secured=bool(operation.get("security"))),
    }


def _example(path: str, method: str, base_url: str, model: str, *, secured: bool) -> str:
    lines = [f"curl {shlex.quote(base_url + path.replace('{model}', model))}"]
    if method != "get" and path not in _BODIES:
        lines[0] += f" -X {method.upper()}"
    if secured:
        lines.append('-H "Authorization: Bearer $API_KEY"')
    if body := _BODIES.get(path):
        lines.append("-H 'Content-Type: application/json'")
        lines.append(f"-d {shlex.quote(json.dumps({'model': model} | body))}")
    return " \\\n  ".join(lines)


def _fields(schema: Json) -> list[Json]:
    required = schema.get("required", ())
    return [
        {
            "name": name,
            "type": _type(field),
            "limits": _limits(field),
            "required": name in required,
            "default": json.dumps(field["default"]) if field.get("default") is not None else "",
            "about": field.get("description", ""),
        }
        for name, field in schema.get("properties", {}).items()
    ]


def _type(schema: Any) -> Markup:
    """Describes the type in words; a schema of the document becomes a link to it."""
    if not isinstance(schema, dict) or not schema:
        return Markup("any")
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return Markup('<a href="#schema-{}">{}</a>').format(name, name)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return Markup(" or ").join(dict.fromkeys(map(_type, schema[several])))
    if "enum" in schema:
        return Markup(" or ").join(json.dumps(value) for value in schema["enum"])
    if "const" in schema:
        return Markup("{}").format(json.dumps(schema["const"]))
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("items")
        return Markup("list of {}").format(_type(items)) if items else Markup("list")
    return Markup("{}").format(" or ".join(kind) if isinstance(kind, list) else kind)


def _limits(schema: Json) -> str:
    """Lists the limits of the schema, and of its alternatives."""
    found = [text.format(schema[key]) for key, text in _LIMITS.items() if key in schema]
    for option in schema.get("anyOf", ()):
        found += [limits for limits in [_limits(option)] if limits]
    return ", ".join(dict.fromkeys(found))


def _resolved(schema: Json, document: Json) -> Json:
    if "$ref" not in schema:
        return schema
    found: Any = document
    for part in schema["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return dict(found)


@functools.cache
def _style() -> str:
    return _STYLE.read_text(encoding="utf-8")


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
