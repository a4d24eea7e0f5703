"""Writes the pages of the reference that are generated from the code; `make docs` runs it.

python docs/reference.py DIRECTORY
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument

from octet_cli.help import EXAMPLES
from octet_cli.main import app
from serve.config.gateway import GatewayConfig


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "commands.md").write_text(commands())
    (directory / "configuration.md").write_text(configuration())


def commands() -> str:
    """Returns a section for each command, with its examples, arguments and options."""
    lines = ["# Commands", "", "Generated from the code. `--help` shows the same.", ""]
    for name, command, context in walk(typer.main.get_command(app), "octet"):
        examples = EXAMPLES[name.removeprefix("octet ")]
        lines += [f"## `{name}`", "", clean(command.help), "", "```bash", *examples, "```", ""]
        lines += ["| option | takes | meaning | default |", "|---|---|---|---|"]
        for parameter in command.get_params(context):
            if parameter.name != "help" and not getattr(parameter, "hidden", False):
                lines.append(row(option(parameter)))
        lines.append("")
    return "\n".join(lines)


def option(parameter: Any) -> tuple[str, str, str, str]:
    """Returns the cells of a parameter: its names, what it takes, its meaning, its default."""
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    kind = "" if names.isupper() else parameter.metavar
    if isinstance(parameter, TyperArgument):
        names, kind = parameter.metavar, ""
    words = clean(getattr(parameter, "help", ""))
    return code(names), code(kind), words, default_of(parameter)


def default_of(parameter: Any) -> str:
    """Returns a default in words; nothing where leaving the option out means nothing."""
    value = parameter.default
    if parameter.required:
        return "required"
    if getattr(parameter, "is_flag", False):
        return "on" if value else "off"
    if value in (None, (), []) or callable(value):
        return ""
    return code(value)


def walk(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Yields each command with its name and its context."""
    word = name.rpartition(" ")[2]
    context = command.make_context(word, [], parent=parent, resilient_parsing=True)
    children = getattr(command, "commands", None)
    if not children:
        yield name, command, context
        return
    for key, one in children.items():
        yield from walk(one, f"{name} {key}", context)


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def code(value: object) -> str:
    return f"`{value}`" if value not in (None, "") else ""


def clean(text: str | None) -> str:
    return " ".join((text or "").replace("\\[", "[").split())


def configuration() -> str:
    """Returns a table for each section of the gateway's file, with types and defaults."""
    lines = ["# Configuration of the gateway", ""]
    lines += ["Generated from the code. [The gateway](../gateway.md) has an example.", ""]
    schema = GatewayConfig.model_json_schema()
    for name, section in [("the file", schema), *sorted(schema.get("$defs", {}).items())]:
        if "properties" not in section:
            continue
        lines += [f"## {name}", "", clean(section.get("description")), ""]
        lines += ["| key | type | default |", "|---|---|---|"]
        for key, found in section["properties"].items():
            required = key in section.get("required", ())
            default = "required" if required else yaml_of(found.get("default", {}))
            lines.append(row((code(key), kind_of(found), default)))
        lines.append("")
    return "\n".join(lines)


def yaml_of(value: Any) -> str:
    """Returns a default as the file would have it. A section's is in its own table."""
    if isinstance(value, dict):
        return "see its section" if value else "empty"
    return code(json.dumps(value))


def kind_of(found: dict[str, Any]) -> str:
    """Returns a schema's type in words; a section by its name."""
    if "$ref" in found:
        return found["$ref"].rsplit("/", 1)[-1]
    if "anyOf" in found or "oneOf" in found:
        return " or ".join(kind_of(one) for one in found.get("anyOf", found.get("oneOf")))
    if "enum" in found:
        return ", ".join(f"`{one}`" for one in found["enum"])
    if "const" in found:
        return f"`{found['const']}`"
    if found.get("type") == "array":
        return f"list of {kind_of(found.get('items', {}))}"
    if found.get("type") == "object" and isinstance(found.get("additionalProperties"), dict):
        return f"map to {kind_of(found['additionalProperties'])}"
    return str(found.get("type", "any"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
