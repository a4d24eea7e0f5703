"""Returns the stylesheet of all HTML pages, and writes a page atomically.

A page is one file without requests to anywhere: its content security policy forbids them.
"""

import os
import tempfile
from importlib import resources
from pathlib import Path

__all__ = ["POLICY", "stylesheet", "write_page"]

# The content security policy of a page with scripts and styles of its own.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " img-src data: blob:; form-action 'none'; base-uri 'none'"
)
_DARK = ':root[data-theme="dark"]'


def stylesheet() -> str:
    """Returns the CSS: dark where the page asks for it, or else where the browser does."""
    text = (resources.files("octet") / "page.css").read_text("utf-8")
    start = text.index(_DARK)
    dark = text[start + len(_DARK) : text.index("}", start) + 1]
    return f"{text}@media (prefers-color-scheme: dark) {{ :root:not([data-theme]){dark} }}\n"


def write_page(path: Path, text: str) -> None:
    """Writes a page atomically."""
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
