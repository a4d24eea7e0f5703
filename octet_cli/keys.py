"""`octet keys`: an API key of the gateway, of which the configuration holds only the hash."""

import hashlib
import json
import re
import secrets
import sys
from typing import Annotated

import typer

from octet.errors import ConfigError
from octet_cli.help import Command, Group, examples_of
from octet_cli.options import Json

__all__ = ["keys"]

KEY_BYTES = 32  # the length of a SHA-256
MOST_KEY_BYTES = 4096  # fits into a header that the gateway accepts
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")

keys = typer.Typer(
    help="API keys of the gateway: made once, kept as a hash.",
    cls=Group,
    epilog=examples_of("keys"),
    no_args_is_help=True,
)


@keys.command(cls=Command, epilog=examples_of("keys new"))
def new(
    name: Annotated[str, typer.Argument(help="The key's name in metrics and logs.")],
    as_json: Json = False,
) -> None:
    """Make a key: it is printed once, with the entry for the configuration."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' is not a valid name of a key: use letters, digits and . _ : / @ + -, at most"
            " 200, with a letter or a digit first"
        )
    key = f"octet-{secrets.token_urlsafe(KEY_BYTES)}"
    digest = _sha256(key.encode())
    if as_json:
        print(json.dumps({"name": name, "key": key, "sha256": digest}))
        return
    print(f"key, shown only now: {key}\n")
    print("# in the configuration, below access: keys:, or in its keys_file:")
    print(f"- name: {json.dumps(name)}\n  sha256: {digest}")


@keys.command(name="hash", cls=Command, epilog=examples_of("keys hash"))
def hash_key() -> None:
    """Print the SHA-256 of a key that is read from standard input, for the configuration."""
    if sys.stdin.isatty():
        print("the key, then Enter: ", end="", file=sys.stderr, flush=True)
    key = sys.stdin.buffer.readline(MOST_KEY_BYTES + 2).strip()
    if not key:
        raise ConfigError("no key on standard input")
    if len(key) > MOST_KEY_BYTES or not all(0x21 <= byte < 0x7F for byte in key):
        raise ConfigError(
            f"a key has at most {MOST_KEY_BYTES} printable ASCII characters and no spaces: "
            "it travels in a header"
        )
    print(_sha256(key))


def _sha256(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
