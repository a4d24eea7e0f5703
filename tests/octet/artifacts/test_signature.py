"""Signatures of artifacts: what is signed, which keys are read, and what is refused."""

import shutil
import subprocess
from pathlib import Path

import pytest

from octet.artifacts.signature import (
    SIGNATURE_FILE,
    private_key,
    public_key,
    require_signature,
    sign,
)
from octet.errors import ArtifactError, ConfigError
from tests.octet.artifacts.keys import write_keys

pytest.importorskip("cryptography", reason="signatures need cryptography: pip install it")
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "manifest.json").write_text('{"files": {}}\n')
    return tmp_path / "pack"


@pytest.mark.parametrize("form", ["pem", "openssh"])
def test_a_signature_holds_for_this_manifest_and_this_key(
    form: str, artifact: Path, tmp_path: Path
) -> None:
    key, public = write_keys(tmp_path / "keys", form)
    with pytest.raises(ArtifactError, match="not signed"):
        require_signature(artifact, public)
    sign(artifact, private_key(key))
    require_signature(artifact, public)
    _, another = write_keys(tmp_path / "others", form)
    with pytest.raises(ArtifactError, match="not a signature of this manifest"):
        require_signature(artifact, another)
    (artifact / "manifest.json").write_text('{"files": { }}\n')
    with pytest.raises(ArtifactError, match="not a signature of this manifest"):
        require_signature(artifact, public)
    (artifact / SIGNATURE_FILE).write_bytes(b"")
    with pytest.raises(ArtifactError, match="not a signature of this manifest"):
        require_signature(artifact, public)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl: apt install openssl")
def test_openssl_makes_and_checks_the_same_signature(artifact: Path, tmp_path: Path) -> None:
    def openssl(*arguments: object) -> None:
        command = ["openssl", *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True)

    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    openssl("genpkey", "-algorithm", "ed25519", "-out", key)
    openssl("pkey", "-in", key, "-pubout", "-out", public)
    manifest, signature = artifact / "manifest.json", artifact / SIGNATURE_FILE
    sign(artifact, private_key(key))
    signed = ("-rawin", "-in", manifest)
    openssl("pkeyutl", "-verify", "-pubin", "-inkey", public, *signed, "-sigfile", signature)
    signature.unlink()
    openssl("pkeyutl", "-sign", "-inkey", key, *signed, "-out", signature)
    require_signature(artifact, public)


def test_files_that_are_no_key_are_named(artifact: Path, tmp_path: Path) -> None:
    key, public = write_keys(tmp_path / "keys", "pem")
    with pytest.raises(ConfigError, match="a private key, which belongs where packs are signed"):
        require_signature(artifact, key)
    with pytest.raises(ConfigError, match="no Ed25519 private key"):
        private_key(public)
    with pytest.raises(ConfigError, match="no Ed25519 public key"):
        public_key(artifact / "manifest.json")
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        public_key(tmp_path / "nowhere")
    locked = tmp_path / "locked"
    form = (Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    locked.write_bytes(Ed25519PrivateKey.generate().private_bytes(*form))
    with pytest.raises(ConfigError, match="has a passphrase"):
        private_key(locked)
    other = generate_private_key(SECP256R1())
    curve = tmp_path / "curve"
    curve.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, match="no Ed25519 private key"):
        private_key(curve)
