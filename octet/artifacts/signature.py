"""Signs the manifest of an artifact with Ed25519, and checks the signature.

A manifest has the SHA-256 of every other file, so its signature covers the whole artifact.
`manifest.json.sig` holds the 64 bytes of RFC 8032 over the bytes of `manifest.json`, as openssl
writes and reads them. Keys are PEM files (`openssl genpkey -algorithm ed25519`) or OpenSSH's
(`ssh-keygen -t ed25519`).
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from octet.artifacts.manifest import MANIFEST_FILE
from octet.errors import ArtifactError, ConfigError
from octet.storage.files import read_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

__all__ = ["SIGNATURE_FILE", "private_key", "public_key", "require_signature", "sign"]

SIGNATURE_FILE = f"{MANIFEST_FILE}.sig"
_MOST_BYTES = 1 << 16  # of a key or a signature


def private_key(path: Path) -> "Ed25519PrivateKey":
    """Reads the key that signs; raises ConfigError for one that is no Ed25519 private key."""
    content = _read(path)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        load_pem_private_key,
        load_ssh_private_key,
    )

    load: Callable[..., object] = load_pem_private_key
    if b"BEGIN OPENSSH" in content:
        load = load_ssh_private_key
    try:
        key = load(content, password=None)
    except TypeError:  # it needs a password
        raise ConfigError(
            f"{path}: has a passphrase, which nothing can ask for here: sign the manifest yourself"
            f" (openssl pkeyutl -sign -rawin), or give a key without one"
        ) from None
    except Exception:  # ValueError, UnsupportedAlgorithm and errors of OpenSSL
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"{path}: no Ed25519 private key; make one: openssl genpkey -algorithm ed25519"
        )
    return key


def public_key(path: Path) -> "Ed25519PublicKey":
    """Reads the key that signatures are checked with; raises ConfigError for any other file."""
    content = _read(path)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import (
        load_pem_public_key,
        load_ssh_public_key,
    )

    if b"PRIVATE KEY" in content:
        raise ConfigError(
            f"{path}: a private key, which belongs where packs are signed; give the public one"
            f" (openssl pkey -in KEY -pubout)"
        )
    try:
        load = load_pem_public_key if b"BEGIN PUBLIC KEY" in content else load_ssh_public_key
        key = load(content)
    except Exception:  # ValueError, UnsupportedAlgorithm and errors of OpenSSL
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path}: no Ed25519 public key in PEM or OpenSSH's format")
    return key


def sign(directory: Path, key: "Ed25519PrivateKey") -> None:
    """Writes the signature of the manifest in `directory` beside it."""
    content = (directory / MANIFEST_FILE).read_bytes()
    (directory / SIGNATURE_FILE).write_bytes(key.sign(content))


def require_signature(directory: Path, path: Path) -> None:
    """Raises ArtifactError unless the key at `path` signed the manifest in `directory`.

    It does not compare the other files with the manifest. Raises ConfigError for a file that is no
    Ed25519 public key.
    """
    key = public_key(path)
    from cryptography.exceptions import InvalidSignature

    try:
        content = read_file(directory / MANIFEST_FILE)
    except OSError as error:
        raise ArtifactError(f"{directory / MANIFEST_FILE}: {error.strerror}") from None
    try:
        signature = read_file(directory / SIGNATURE_FILE, _MOST_BYTES)
    except FileNotFoundError:
        raise ArtifactError(
            f"{directory}: not signed (no {SIGNATURE_FILE}), and a signature by {path} is required;"
            " get the signed one, or sign it where it was made: octet golden --sign KEY"
        ) from None
    except OSError as error:
        raise ArtifactError(f"{directory / SIGNATURE_FILE}: {error.strerror}") from None
    try:
        key.verify(signature, content)
    except InvalidSignature:
        raise ArtifactError(
            f"{directory / SIGNATURE_FILE}: not a signature of this manifest.json by {path}: one of"
            " the three was replaced; get the artifact again from where it was made"
        ) from None


def _read(path: Path) -> bytes:
    try:
        content = read_file(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the file of a key") from None
    if find_spec("cryptography") is None:
        raise ConfigError("signatures need cryptography: pip install 'octet-llm[sign]'")
    return content
