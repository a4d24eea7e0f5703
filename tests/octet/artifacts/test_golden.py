"""The divergence between two next-token distributions, from their top entries."""

import pytest

from octet.artifacts.golden import GoldenRecord, GoldenSet, Top
from octet.errors import ArtifactError


def test_a_golden_set_survives_the_disk(tmp_path) -> None:
    record = GoldenRecord(
        prompt="a b",
        prompt_token_ids=(1, 2),
        continuation_token_ids=(3,),
        tops=(Top(token_ids=(3, 4), logprobs=(-0.1, -2.5)),),
    )
    golden = GoldenSet(weights_sha256="0", compute_dtype="float32", software={}, records=(record,))
    golden.save(tmp_path)
    assert GoldenSet.load(tmp_path) == golden
    (tmp_path / "golden.json").write_text('{"records": []}')
    with pytest.raises(ArtifactError, match=r"golden.json"):
        GoldenSet.load(tmp_path)
    (tmp_path / "golden.json").write_text('{"schema_version": 3, "records": {}}')
    newer = r"golden.json: schema version 3, written by a newer Octet; this one reads up to 2"
    with pytest.raises(ArtifactError, match=newer):
        GoldenSet.load(tmp_path)
