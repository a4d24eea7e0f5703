"""Reads a model's chat template, and provides one for models without."""

import json
from pathlib import Path
from typing import Any

from octet.errors import ArtifactError

__all__ = ["DEFAULT_TEMPLATE", "TEMPLATE_FILE", "template_of", "tokenizer_config"]

TEMPLATE_FILE = "chat_template.jinja"

# For models without a template, mostly base models: headings that are common in training text.
DEFAULT_TEMPLATE = r"""
{%- for message in messages -%}
### {{ message.role | capitalize }}:
{{ message.content | trim }}

{% endfor -%}
{%- if add_generation_prompt -%}
### Assistant:{{ "\n" }}
{%- endif -%}"""


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json, {} if there is none; ArtifactError if it is not JSON."""
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path}: not valid JSON ({error})") from None
    return config


def template_of(directory: Path) -> str | None:
    """Returns the Jinja source in chat_template.jinja, else tokenizer_config.json, else None."""
    alone = directory / TEMPLATE_FILE
    if alone.exists():
        return alone.read_text(encoding="utf-8")
    source: Any = tokenizer_config(directory).get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    return None if source is None else str(source)
