"""Returns the stylesheet of all HTML pages, and writes a page atomically.

A page is one file without requests to anywhere: its content security policy forbids them.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from octet.errors import ConfigError

__all__ = ["POLICY", "static_page", "stylesheet", "table", "write_page"]

# The content security policy of a page with scripts and styles of its own.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " img-src data: blob:; form-action 'none'; base-uri 'none'"
)
# That of a page without scripts.
_STATIC = "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"
_DARK = ':root[data-theme="dark"]'


def stylesheet() -> str:
    """Returns the CSS: dark if the page requests it, or else if the browser does."""
    text = (resources.files("octet") / "page.css").read_text("utf-8")
    start = text.index(_DARK)
    dark = text[start + len(_DARK) : text.index("}", start) + 1]
    return f"{text}@media (prefers-color-scheme: dark) {{ :root:not([data-theme]){dark} }}\n"


def static_page(
    kind: str, title: str, lead: str, sections: Mapping[str, str], style: str = ""
) -> str:
    """Returns a page without scripts: a card with `title` and `lead`, then HTML by heading.

    `kind` stands beside the product's name; `style` is CSS of the page's own.
    """
    body = "\n".join(
        f"<section><h2>{escape(heading)}</h2>{content}</section>"
        for heading, content in sections.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(_STATIC)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{stylesheet()}{style}</style>
</head>
<body>
<header><p class="brand">Octet <span>{escape(kind)}</span></p></header>
<main>
<section class="card"><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></section>
{body}
</main>
</body>
</html>
"""


def table(label: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns an HTML table of plain text, which scrolls within itself; `label` names it."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def write_page(path: Path, text: str) -> None:
    """Writes a page atomically; raises ConfigError, naming `path`, where that is not possible."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                file.write(text)
                file.close()
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise ConfigError(f"{path}: not written: {error.strerror}; choose another place") from None
