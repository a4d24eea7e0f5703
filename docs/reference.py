"""Writes the pages of the reference that are made from the code; `make docs` runs it.

python docs/reference.py DIRECTORY
"""

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from octet_cli.main import app
from serve.config.gateway import GatewayConfig


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "commands.md").write_text(commands())
    (directory / "configuration.md").write_text(configuration())


def commands() -> str:
    """Returns a section for each command, with its arguments and options."""
    lines = ["# Commands", "", "Made from the code. Each command has `--help` too.", ""]
    for name, command in walk(typer.main.get_command(app), "octet"):
        lines += [f"## `{name}`", "", clean(command.help), "", "| | | |", "|---|---|---|"]
        for parameter in command.params:
            if parameter.name == "help" or getattr(parameter, "hidden", False):
                continue
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
            kind = parameter.metavar or value_of(parameter.type_descriptor.annotation)
            words = clean(getattr(parameter, "help", ""))
            if parameter.required:
                words += " Required."
            elif parameter.default not in (None, False, (), []) and not callable(parameter.default):
                words += f" Default: `{parameter.default}`."
            cells = (f"`{names}`", f"`{kind}`" if kind else "", words)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def value_of(annotation: Any) -> str:
    """Returns what an option takes, in words; nothing for a switch."""
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    parts = [one for one in get_args(annotation) if one is not type(None)]
    if parts:
        return value_of(parts[0])
    return "" if annotation is bool else annotation.__name__.upper()


def walk(command: Any, name: str) -> list[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if not children:
        return [(name, command)]
    return [found for key, one in children.items() for found in walk(one, f"{name} {key}")]


def clean(text: str | None) -> str:
    return " ".join((text or "").replace("\\[", "[").split())


def configuration() -> str:
    """Returns a table for each section of the gateway's file, with types and defaults."""
    lines = ["# Configuration of the gateway", ""]
    lines += ["Made from the code. [The gateway](../gateway.md) has an example.", ""]
    schema = GatewayConfig.model_json_schema()
    for name, section in [("the file", schema), *sorted(schema.get("$defs", {}).items())]:
        if "properties" not in section:
            continue
        lines += [f"## {name}", "", clean(section.get("description")), ""]
        lines += ["| key | type | default |", "|---|---|---|"]
        for key, found in section["properties"].items():
            required = key in section.get("required", ())
            value = found.get("default")
            default = "required" if required else f"`{value!r}`"
            if isinstance(value, dict):
                default = "below"
            lines.append(f"| `{key}` | {kind_of(found)} | {default} |".replace("\n", " "))
        lines.append("")
    return "\n".join(lines)


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
