"""Reads a model's chat template, and provides one for models without."""

from pathlib import Path
from typing import Any

from octet.errors import ArtifactError
from octet.storage.files import read_file, read_object

__all__ = [
    "DEFAULT_TEMPLATE",
    "GENERATION_CONFIG",
    "TEMPLATE_FILE",
    "template_of",
    "tokenizer_config",
]

TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"  # of what requests leave out, as the template is
MAX_TEMPLATE_BYTES = 1 << 20  # the largest known has 40 KB

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
    """Returns tokenizer_config.json, {} if there is none; ArtifactError if it is no object."""
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return {}
    return read_object(path, ArtifactError)


def template_of(directory: Path) -> str | None:
    """Returns the Jinja source in chat_template.jinja, else tokenizer_config.json, else None."""
    alone = directory / TEMPLATE_FILE
    if alone.exists():
        try:
            return read_file(alone, MAX_TEMPLATE_BYTES).decode()
        except OSError as error:
            raise ArtifactError(f"{alone}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ArtifactError(f"{alone}: not UTF-8 text; copy it again") from None
    source: Any = tokenizer_config(directory).get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if source is not None and (not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES):
        raise ArtifactError(
            f"{directory / 'tokenizer_config.json'}: chat_template is no text of at most"
            f" {MAX_TEMPLATE_BYTES >> 20} MiB; copy it again"
        )
    return source
