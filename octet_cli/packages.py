"""Locates Octet's packages, and finds those of another distribution or folder in their place.

`serve` and `export` are common names. A distribution with a package of that name overwrites
Octet's, and a folder of that name hides it from a Python that searches there first.
"""

from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

__all__ = ["DISTRIBUTION", "PACKAGES", "find_foreign", "locate"]

DISTRIBUTION = "octet-llm"
PACKAGES = ("octet", "octet_cli", "calibrate", "export", "serve", "verify")
_HOME = Path(__file__).resolve().parent.parent  # Octet's packages are beside each other


def locate(package: str) -> Path | None:
    """Returns the folder or file that `import` would find, without importing it."""
    spec = find_spec(package)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else str(spec.origin)).resolve()


def find_foreign() -> Iterator[str]:
    """Yields a sentence for each package that is not Octet's, or may have been overwritten."""
    installed = packages_distributions()
    for package in PACKAGES:
        found = locate(package)
        if found is None:
            yield f"{package}: is missing in {_HOME}; install {DISTRIBUTION} again"
            continue
        names = set(installed.get(package, ())) - {DISTRIBUTION}
        others = ", ".join(sorted(name for name in names if _installed(name, package) == found))
        if found != _HOME / package:
            remedy = f"uninstall {others}" if others else "rename it, or start octet elsewhere"
            yield f"{package}: {found} is not Octet's, which is in {_HOME}; {remedy}"
        elif others:
            yield (
                f"{package}: {others} may have overwritten Octet's in {found}; uninstall {others}"
                f" and install {DISTRIBUTION} again"
            )


def _installed(name: str, package: str) -> Path:
    """Returns where the distribution `name` would install `package`."""
    return Path(str(distribution(name).locate_file(package))).resolve()
