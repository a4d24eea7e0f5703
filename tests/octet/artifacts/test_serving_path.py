"""Expectations are found by serving path, and survive a file."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from octet.artifacts.serving_path import EXPECTED_FILE, Expectation, ExpectedSet, ServingPath
from octet.errors import ArtifactError

GPU = ServingPath(kv_cache="e5m2")
CPU = ServingPath(kv_cache="e5m2", kv_rounding="truncate")


def expected() -> ExpectedSet:
    return ExpectedSet(
        recipe="fp8",
        expectations=(
            Expectation(path=GPU, mean=0.01, low=0.008, high=0.013, prompts=64),
            Expectation(path=CPU, mean=0.02, low=0.016, high=0.026, prompts=64),
        ),
    )


def test_each_path_has_its_own() -> None:
    assert expected().find(CPU) == expected().expectations[1]
    assert expected().find(GPU.model_copy(update={"activations": False})) is None


def test_a_range_includes_its_ends() -> None:
    found = expected().expectations[0]
    assert [found.holds(kl) for kl in (0.0079, 0.008, 0.013, 0.0131)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("path", "label"),
    [
        (GPU, "weights+activations, e5m2 (nearest), bfloat16"),
        (
            ServingPath(kv_cache="float16", activations=False, compute="float32"),
            "weights, float16, float32",
        ),
        (
            ServingPath(kv_cache="e4m3", queries=True, weights=False, activations=False),
            "nothing, e4m3 (nearest, queries too), bfloat16",
        ),
        (CPU, "weights+activations, e5m2 (truncate), bfloat16"),
    ],
)
def test_labels_say_all_that_differs(path: ServingPath, label: str) -> None:
    assert path.label == label


def test_a_file_gives_back_what_it_was_given(tmp_path: Path) -> None:
    expected().save(tmp_path)
    assert ExpectedSet.load(tmp_path) == expected()


def test_what_is_no_such_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=f"{EXPECTED_FILE}: No such file"):
        ExpectedSet.load(tmp_path)
    (tmp_path / EXPECTED_FILE).write_text('{"schema_version": 2}')
    with pytest.raises(ArtifactError, match=r"schema version 2, .*: pip install -U octet-llm$"):
        ExpectedSet.load(tmp_path)
    (tmp_path / EXPECTED_FILE).write_text('{"schema_version": 0}')
    with pytest.raises(ArtifactError, match="not a set of expectations"):
        ExpectedSet.load(tmp_path)
    with pytest.raises(ValidationError, match="kv_rounding"):
        ServingPath(kv_cache="e5m2", kv_rounding="up")  # type: ignore[arg-type]


def test_earlier_versions_read_all_but_the_scales_of_powers_of_two() -> None:
    assert "power_scales" not in GPU.model_dump_json()
    rounded = GPU.model_copy(update={"power_scales": True})
    assert ServingPath.model_validate_json(rounded.model_dump_json()) == rounded
    assert ServingPath.model_validate_json(GPU.model_dump_json()) == GPU
