"""Safetensors files: equal to the reference library's, and strict about damage."""

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octet.errors import CheckpointError
from octet.storage.tensors import Tensor, TensorFile, write_tensors

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_what_the_reference_library_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    values = (torch.randn(5, 7, generator=torch.Generator().manual_seed(1)) * 10).to(dtype)
    save_file({"a": values, "empty": torch.zeros(0, dtype=dtype)}, tmp_path / "x.safetensors")
    file = TensorFile.open(tmp_path / "x.safetensors")
    assert set(file.names) == {"a", "empty"}
    assert file.read("a").shape == (5, 7)
    np.testing.assert_array_equal(file.read("a").float32(), values.float().numpy())


def test_the_reference_library_reads_what_we_write(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    write_tensors(
        tmp_path / "x.safetensors",
        {
            "w": Tensor("F8_E4M3", codes),
            "s": Tensor.of(np.float32([[1.5], [2.0]])),
            "scalar": Tensor.of(np.array(3.0, np.float32)),
            "strided": Tensor.of(np.arange(12, dtype=np.int64).reshape(3, 4).T),
        },
        {"format": "pt"},
    )
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded["w"].dtype == torch.float8_e4m3fn
    np.testing.assert_array_equal(loaded["w"].view(torch.uint8).numpy(), codes)
    assert loaded["s"].tolist() == [[1.5], [2.0]]
    assert loaded["scalar"].shape == () and loaded["scalar"].item() == 3.0
    assert loaded["strided"][1].tolist() == [1, 5, 9]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(64, 64), "b": torch.ones(3)}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, -1])
def test_a_truncated_file_is_refused_by_name(good: Path, keep: int) -> None:
    good.write_bytes(good.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as caught:
        TensorFile.open(good)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shape":[64,64]', b'"shape":[64,63]'),
        (b'"data_offsets":[0,16384]', b'"data_offsets":[3,16387]'),  # overlaps the next tensor
        (b'"dtype":"F32"', b'"dtype":"Q32"'),
        (b'"a":{', b'"a":['),
        (b'"data_offsets"', b'"data_offsetz"'),
    ],
)
def test_an_altered_header_is_refused(good: Path, old: bytes, new: bytes) -> None:
    content = good.read_bytes()
    assert old in content
    good.write_bytes(content.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        TensorFile.open(good)


def test_trailing_bytes_are_refused(good: Path) -> None:
    good.write_bytes(good.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="truncated or altered"):
        TensorFile.open(good)


def test_a_scan_hashes_the_file_and_passes_all_of_each_tensor(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "odd": Tensor("U8", rng.integers(0, 256, 3, np.uint8)),
        "large": Tensor("BF16", rng.integers(0, 1 << 16, (3, 250_001), np.uint16)),
        "scalar": Tensor.of(np.array(3.0, np.float32)),
        "empty": Tensor.of(np.zeros(0, np.float32)),
        "last": Tensor("BF16", rng.integers(0, 1 << 16, 5, np.uint16)),
    }
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors)
    content, file = path.read_bytes(), TensorFile.open(path)
    found: dict[str, list[np.ndarray]] = {name: [] for name in tensors}
    read: list[int] = []
    file.scan(lambda name, part: found[name].append(part.codes.copy()), read.append)
    assert sum(read) == len(content)
    assert len(found["large"]) > 1 and found.pop("empty") == []
    for name, parts in found.items():
        np.testing.assert_array_equal(np.concatenate(parts), tensors[name].codes.reshape(-1))
    path.unlink()  # the digests are known
    assert file.digests[0] == hashlib.sha256(content).hexdigest()


def headed(path: Path, header: bytes, data: bytes = b"1234") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a":[' + b"[]," * 4_000_000 + b"[]]}", "more than 1,118,481 arrays"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0.0,4.0]}}', "must be integers"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,18446744073709551620]}}', "in range"),
        (b'{"a":{"dtype":"U8","shape":[4.7],"data_offsets":[0,4]}}', "must be integers"),
        (b'{"a":{"dtype":"U8","shape":"4","data_offsets":[0,4]}}', "must be integers"),
        (b'{"a":{"dtype":"U8","shape":[true,4],"data_offsets":[0,4]}}', "must be integers"),
        (b'{"a":{"dtype":"U8","shape":[-2,-2],"data_offsets":[0,4]}}', "must be integers"),
        (b'{"a":{"dtype":"U8","shape":[8589934592,2147483648],"data_offsets":[0,0]}}', "too large"),
        (b'{"a":{"dtype":"U8","shape":[8589934592,2147483648,0],"data_offsets":[0,0]}}', "large"),
        (b'{"a":{"dtype":"U8","shape":[4' + b",1" * 64 + b'],"data_offsets":[0,4]}}', "too large"),
        (
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
            b'"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
            "key 'a' has two values",
        ),
        (
            b'{"\\u001b[2J":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
            r"no name of a tensor: '\\x1b\[2J'",
        ),
    ],
    ids=lambda value: value[-60:] if isinstance(value, bytes) else None,
)
def test_a_hostile_header_is_refused(header: bytes, found: str, tmp_path: Path) -> None:
    path = headed(tmp_path / "x.safetensors", header, b"" if b"[0,0]" in header else b"1234")
    before = time.process_time()
    with pytest.raises(CheckpointError, match=found) as caught:
        TensorFile.open(path)
    assert time.process_time() - before < 1
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.safetensors: a FIFO or a device, not a file"):
        TensorFile.open(tmp_path / "x.safetensors")
