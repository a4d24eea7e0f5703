"""A checkpoint's answers, against a loop over single samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octet.errors import NumericsError, SampleError
from tests.mxfp4 import pack_experts, unpacked, write_gpt_oss
from verify.evaluation.targets.checkpoint import CheckpointTarget
from verify.evaluation.targets.open import open_target


def test_each_sample_is_scored_by_itself(tiny_model: Path, tiny_samples: Path, model: Any) -> None:
    target = CheckpointTarget(tiny_model, batch_size=4)
    sequences = target.sequences(tiny_samples, count=11, max_length=40)
    answers = dict(target.answers(sequences.ids, 20))
    assert sorted(answers) == list(range(11))
    for index, sample in enumerate(sequences.ids):
        ids = torch.tensor(sample)
        assert 2 <= len(ids) <= 40
        with torch.inference_mode():
            logits = model(ids[None], use_cache=False).logits[0, :-1]
        logprobs = logits.double().log_softmax(-1)
        likely = logprobs.topk(20)
        found = answers[index]
        assert found.logprobs == pytest.approx(logprobs.gather(1, ids[1:, None])[:, 0], abs=2e-5)
        assert found.top_logprobs == pytest.approx(likely.values.numpy(), abs=2e-5)
        assert np.mean(found.top_ids == likely.indices.numpy()) > 0.999  # near-ties may swap


def test_gpt_oss_in_mxfp4_answers_as_what_it_decodes_to(tiny_samples: Path, tmp_path: Path) -> None:
    packed = pack_experts(write_gpt_oss(tmp_path / "model"), tmp_path / "packed")
    paths = packed, unpacked(packed, tmp_path / "decoded")
    targets = [open_target(str(path), None, 1) for path in paths]
    ids = [[5, 99, 7, 1200, 31, 8, 4095, 640, 12] * 4]
    (ours,), (theirs,) = (dict(target.answers(ids, 20)).values() for target in targets)
    np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
    np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)


def test_samples_are_those_that_calibration_reads(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("import os\n\nimport sys and more\n")
    target = CheckpointTarget(tiny_model)
    sequences = target.sequences(path)
    assert [target.encode(text or "") for text in sequences.texts] == list(map(list, sequences.ids))
    path.write_text("x\n")
    with pytest.raises(SampleError, match="no sample has two tokens"):
        target.sequences(path)


def test_a_weight_that_is_nan_is_one_clear_error(
    tiny_model: Path, tiny_samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = CheckpointTarget(tiny_model)
    from verify.evaluation.targets import checkpoint as reference

    loaded = reference.load_model(target.checkpoint, "float32")
    loaded.model.norm.weight.data[3] = float("nan")
    monkeypatch.setattr(reference, "load_model", lambda *_: loaded)
    sequences = target.sequences(tiny_samples, count=2)
    with pytest.raises(NumericsError, match="NaN or Inf in its logits"):
        list(target.answers(sequences.ids, 5))
