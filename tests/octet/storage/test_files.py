"""Hashes of files, with and without the package that has the fast one."""

import hashlib
import sys
from pathlib import Path

import pytest

from octet.storage.files import XXH3, file_digests, sha256_file, xxh3

# XXH3-128 of nothing, from the xxHash project's own test vectors.
NOTHING = "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 5])
def test_both_are_of_the_whole_file(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "file").write_bytes(content[:size])
    sha256, fast = file_digests(tmp_path / "file")
    assert sha256 == hashlib.sha256(content[:size]).hexdigest() == sha256_file(tmp_path / "file")
    whole = xxh3()
    assert whole is not None and fast is not None and fast.startswith(XXH3)
    whole.update(content[:size])
    assert fast == whole.hexdigest()
    assert (fast == XXH3 + NOTHING) == (size == 0)


def test_without_the_package_there_is_sha256_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    (tmp_path / "file").write_bytes(b"content")
    assert file_digests(tmp_path / "file") == (hashlib.sha256(b"content").hexdigest(), None)
