import numpy as np
import pytest

from octet.artifacts.golden import GoldenRecord, GoldenSet, Top
from octet.artifacts.scenarios import SCENARIOS_FILE, Fault, Scenario, ScenarioSet
from octet.artifacts.serving_path import ServingPath
from octet.errors import ArtifactError, CheckpointError

PATH = ServingPath(kv_cache="e5m2")
RECORD = GoldenRecord(
    prompt="a",
    prompt_token_ids=(5,),
    continuation_token_ids=(1,),
    tops=(Top(token_ids=(1, 2), logprobs=(-0.1, -3.0)),),
)


def golden(records: int = 1, weights: str = "w") -> GoldenSet:
    return GoldenSet(
        weights_sha256=weights, compute_dtype="float32", software={}, records=(RECORD,) * records
    )


def made() -> ScenarioSet:
    fault = Fault(kind="weight_scales_scaled", layer=3, factor=0.5)
    return ScenarioSet(
        "w",
        "fp8",
        {
            Scenario(path=PATH): np.full((2, 1, 1, 2), -1.5, np.float32),
            Scenario(path=PATH, fault=fault): np.full((1, 1, 1, 2), np.nan, np.float32),
        },
    )


def test_a_set_survives_the_disk(tmp_path) -> None:
    made().save(tmp_path)
    found = ScenarioSet.load(tmp_path, golden())
    assert found.paths == (PATH,) and found.recipe == "fp8"
    assert [h.label for h in found.logprobs] == [h.label for h in made().logprobs]
    for before, after in zip(made().logprobs.values(), found.logprobs.values(), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("other", [golden(weights="x"), golden(records=2)])
def test_it_belongs_to_one_golden_set(tmp_path, other: GoldenSet) -> None:
    made().save(tmp_path)
    with pytest.raises(ArtifactError, match="belongs to other golden records"):
        ScenarioSet.load(tmp_path, other)


def test_a_file_that_is_not_one_is_refused(tmp_path) -> None:
    made().save(tmp_path)
    file = tmp_path / SCENARIOS_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        ScenarioSet.load(tmp_path, golden())
    file.write_bytes(whole.replace(b"schema_version", b"schema_versiom"))
    with pytest.raises(ArtifactError, match="not a set of scenarios"):
        ScenarioSet.load(tmp_path, golden())
    file.write_bytes(whole.replace(rb"schema_version\": 1", rb"schema_version\": 2"))
    with pytest.raises(ArtifactError, match=r"schema version 2, .*: pip install -U octet-llm$"):
        ScenarioSet.load(tmp_path, golden())
