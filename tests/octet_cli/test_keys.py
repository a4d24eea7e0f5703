"""`octet keys`: what it prints is what the gateway takes."""

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from octet.errors import ConfigError
from octet_cli.keys import hash_key, new
from serve.access.keys import Keys
from serve.config import KeyConfig


def test_a_new_key_is_let_in_by_the_entry_that_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    new("team-a")
    first, entry = capsys.readouterr().out.split("\n", 1)
    key = first.rpartition(" ")[2]
    assert key.startswith("octet-") and len(key) == len("octet-") + 43  # 32 bytes, URL-safe
    configured = [KeyConfig.model_validate(item) for item in yaml.safe_load(entry)]
    assert Keys(configured).authenticate(f"Bearer {key}".encode()).name == "team-a"
    assert key not in entry


def test_json_has_the_same_and_no_two_keys_are_alike(capsys: pytest.CaptureFixture[str]) -> None:
    made = []
    for _ in range(2):
        new("ci/runner@build", as_json=True)
        made.append(json.loads(capsys.readouterr().out))
    assert made[0]["key"] != made[1]["key"]
    for entry in made:
        assert set(entry) == {"name", "key", "sha256"}
        assert hashlib.sha256(entry["key"].encode()).hexdigest() == entry["sha256"]


@pytest.mark.parametrize("name", ["", "two words", "-dash", "ü", "x" * 201, "a\n"])
def test_a_name_that_the_configuration_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid name of a key"):
        new(name)
    with pytest.raises(ValueError):
        KeyConfig(name=name, sha256="0" * 64)


def test_a_key_of_ones_own_is_hashed_without_its_line_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"sk-own\r\nmore\n")))
    hash_key()
    assert capsys.readouterr().out == hashlib.sha256(b"sk-own").hexdigest() + "\n"


@pytest.mark.parametrize("sent", [b"", b"\n", b"two words\n", b"\xc3\xbc\n", b"x" * 5000])
def test_what_cannot_be_a_key_is_refused(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(sent)))
    with pytest.raises(ConfigError):
        hash_key()


def test_the_command_line_has_both(tmp_path: Path) -> None:
    octet = [sys.executable, "-m", "octet", "keys"]
    made = subprocess.run([*octet, "new", "ci", "--json"], check=True, capture_output=True)
    entry = json.loads(made.stdout)
    hashed = subprocess.run(
        [*octet, "hash"], input=entry["key"].encode(), check=True, capture_output=True
    )
    assert hashed.stdout.decode().strip() == entry["sha256"]
