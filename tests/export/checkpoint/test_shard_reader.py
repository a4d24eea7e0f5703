"""A shard is hashed as it is read, whatever is read and in whatever order."""

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import export.checkpoint.write
from export.checkpoint.write import ShardReader
from octet.storage.files import Digest, file_digests, xxh3
from octet.storage.tensors import Tensor, TensorFile, write_tensors

SHAPES = {"a": (300, 70), "b": (), "c": (0, 4), "d": (5,), "e": (64, 64)}


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TensorFile:
    """Tensors of several parts, of none, and of less than one; a part is 4096 bytes."""
    monkeypatch.setattr(export.checkpoint.write, "_PART", 4096)
    monkeypatch.setattr(export.checkpoint.write, "_AHEAD", 3 * 4096)
    rng = np.random.default_rng(0)
    tensors = {k: Tensor.of(np.asarray(rng.random(v, np.float32))) for k, v in SHAPES.items()}
    write_tensors(tmp_path / "shard.safetensors", tensors, {"format": "pt"})
    return TensorFile.open(tmp_path / "shard.safetensors")


def digest_of(shard: TensorFile) -> str:
    return hashlib.sha256(shard.path.read_bytes()).hexdigest()


@pytest.mark.parametrize("order", ["abcde", "edcba", "ca", ""])
@pytest.mark.parametrize("fast", [False, True])
def test_the_hash_is_the_files(shard: TensorFile, order: str, fast: bool) -> None:
    digest: Digest | None = xxh3() if fast else hashlib.sha256()
    assert digest is not None
    with ThreadPoolExecutor(1) as executor:
        reader = ShardReader(shard, digest, executor)
        for name in order:
            parts = list(reader.parts(name))
            whole = np.concatenate(parts) if SHAPES[name] else parts[0]
            assert np.array_equal(whole, shard.read(name).codes)
            reader.release()
        for name in order:
            reader.expect(name)
            for rows in range(1, SHAPES[name][0] + 1 if SHAPES[name] else 1):
                reader.expect(name, rows)
        assert reader.hexdigest() == file_digests(shard.path)[fast]


def test_pages_are_kept_until_they_are_hashed_and_encoded(
    shard: TensorFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[tuple[int, int]] = []
    advise = shard.advise

    def watch(advice: str | int, start: int, stop: int) -> None:
        if advice == "MADV_DONTNEED":
            released.append((start, stop))
        advise(advice, start, stop)

    monkeypatch.setattr(shard, "advise", watch)
    stop = shard.span("a")[1]
    with ThreadPoolExecutor(1) as executor:
        reader = ShardReader(shard, hashlib.sha256(), executor)
        last = 0
        for part in reader.parts("a"):
            reader.release()
            last = part.nbytes
        assert released and all(end <= stop - last for _, end in released)  # that is in use
        reader.hexdigest()
    assert released[-1][1] == shard.path.stat().st_size
    assert [(x, y) for x, y in pairwise(released) if x[1] != y[0]] == []


class Held(Executor):
    """Does nothing before it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.inner = ThreadPoolExecutor(1)

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.inner.submit(lambda: (self.go.wait(), work(*args, **kwargs))[1])


def test_reading_waits_for_a_hash_that_is_far_behind(shard: TensorFile) -> None:
    held = Held()
    reader = ShardReader(shard, hashlib.sha256(), held)
    for index, _ in enumerate(reader.parts("a")):
        if index == 2:
            break
    reader.release()  # no more than three parts behind: this returns
    reader.expect("e")
    waiting = threading.Thread(target=reader.release)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    held.go.set()
    waiting.join(60)
    assert not waiting.is_alive()
    assert reader.hexdigest() == digest_of(shard)
    held.inner.shutdown()
