"""Pairs of Ed25519 keys, as OpenSSL and OpenSSH write them."""

from pathlib import Path
from typing import Literal

__all__ = ["write_keys"]


def write_keys(directory: Path, form: Literal["pem", "openssh"]) -> tuple[Path, Path]:
    """Writes a private and a public key; needs cryptography."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.generate()
    private, public = PrivateFormat.PKCS8, PublicFormat.SubjectPublicKeyInfo
    outside = Encoding.PEM
    if form == "openssh":
        private, public, outside = PrivateFormat.OpenSSH, PublicFormat.OpenSSH, Encoding.OpenSSH
    directory.mkdir(exist_ok=True)
    (directory / "key").write_bytes(key.private_bytes(Encoding.PEM, private, NoEncryption()))
    (directory / "key.pub").write_bytes(key.public_key().public_bytes(outside, public))
    return directory / "key", directory / "key.pub"
