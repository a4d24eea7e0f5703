"""Answers on the disk, after this process was killed, or the disk lied."""

import random
from pathlib import Path

import numpy as np
import pytest

from octet.errors import ArtifactError, ConfigError
from verify.evaluation.store import AnswerStore
from verify.evaluation.target import Answer

K, SAMPLES = 3, 5


def answer(number: int) -> Answer:
    generator = np.random.default_rng(number)
    positions = 2 + number
    return Answer(
        -generator.random(positions, np.float32),
        generator.integers(0, 50, (positions, K), np.int32),
        -generator.random((positions, K), np.float32),
    )


def opened(directory: Path) -> AnswerStore:
    return AnswerStore(directory, "far", {"table": "1"}, K)


def known(store: AnswerStore) -> list[int]:
    """Those of the samples that it has, each as it was given."""
    found = []
    for number in range(SAMPLES):
        kept, given = store.get(str(number)), answer(number)
        if kept is not None:
            assert kept.logprobs.tolist() == given.logprobs.tolist()
            assert kept.top_ids.tolist() == given.top_ids.tolist()
            assert kept.top_logprobs.tolist() == given.top_logprobs.tolist()
            found.append(number)
    return found


def fill(store: AnswerStore) -> None:
    store.samples("held-out.jsonl", "0" * 64)
    for number in range(SAMPLES):
        if store.get(str(number)) is None:
            store.add(str(number), answer(number))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a whole store."""
    store = opened(tmp_path)
    fill(store)
    store.close()
    assert store.path is not None
    return store.path


def test_wherever_it_was_killed_it_goes_on_and_loses_at_most_one_answer(path: Path) -> None:
    whole = path.read_bytes()
    ends = [n for n, byte in enumerate(whole) if byte == ord("\n")]
    near = {end + step for end in ends for step in (0, 1, 2)} - {len(whole) + 1}
    for length in sorted({0, 5, *near, *range(0, len(whole), 31)}):
        path.write_bytes(whole[:length])
        store = opened(path.parent)
        assert len(known(store)) == max(whole[:length].count(b"\n") - 2, 0)
        if length in near or length < 10:  # each append waits for the disk
            fill(store)
        store.close()
        if length in near or length < 10:
            assert path.read_bytes() == whole


def test_no_flipped_bit_becomes_another_answer(path: Path) -> None:
    whole, generator = path.read_bytes(), random.Random(0)
    lost = 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            store = opened(path.parent)
        except ArtifactError as error:
            assert "damaged since it was written; delete the " in str(error)
            lost += 1
        else:
            assert len(known(store)) >= SAMPLES - 1
            store.close()
    assert lost > 170


def test_what_was_damaged_is_asked_again_once_its_line_is_deleted(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"A", b"B")
    path.write_bytes(b"".join(lines))
    with pytest.raises(ArtifactError, match=r"line 4: damaged .* delete the line, and the sample"):
        opened(path.parent)
    del lines[3]
    path.write_bytes(b"".join(lines))
    store = opened(path.parent)
    assert known(store) == [0, 2, 3, 4]
    store.close()


def test_answers_of_an_earlier_release_are_named_and_not_used(path: Path) -> None:
    head, *rest = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    older = path.with_name("far-0.jsonl")
    older.write_bytes(
        b"".join([head.replace(b'"schema_version": 2', b'"schema_version": 1'), *rest])
    )
    store = opened(path.parent)
    assert known(store) == [] and store.changed == "format of its answers was 1, is 2"
    store.close()
    assert len(older.read_bytes().splitlines()) == 1 + len(rest)


def test_a_second_evaluation_that_comes_when_the_first_has_just_begun_adds_nothing(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path)
    with pytest.raises(ConfigError, match="another evaluation is writing it"):
        opened(tmp_path)
    fill(first)
    first.close()
    again = opened(tmp_path)
    assert known(again) == list(range(SAMPLES))
    again.close()
