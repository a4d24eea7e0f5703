"""Answers of exports: the reference's definition, through the served cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octet.errors import ArtifactError, NumericsError
from verify.evaluation.comparison import compare
from verify.evaluation.evaluator import evaluate
from verify.evaluation.sequences import read_texts
from verify.evaluation.targets import export as module
from verify.evaluation.targets.export import Export


def test_an_unquantized_export_answers_as_its_checkpoint(
    exports: dict[str, Path], tiny_model: Path, example_samples: Path
) -> None:
    from verify.evaluation.targets.checkpoint import CheckpointTarget

    reference, export = CheckpointTarget(tiny_model), Export(exports["plain"], threads=1)
    sequences = reference.sequences(example_samples / "heldout.jsonl", count=8, max_length=300)
    assert max(map(len, sequences.ids)) == 300  # more than one chunk of the engine
    result = compare(evaluate([export], reference, sequences, k=20))
    (row,) = result.rows
    assert row.tokens == sequences.tokens and row.kl is not None and row.change is not None
    # A float16 cache moves a random model by less than this.
    assert abs(row.change.mean) < 1e-4 and 0 <= row.kl.mean < 1e-4


def test_a_quantized_export_diverges_and_both_tokenizers_are_one(
    exports: dict[str, Path], tiny_model: Path, example_samples: Path
) -> None:
    from verify.evaluation.targets.checkpoint import CheckpointTarget

    reference, export = CheckpointTarget(tiny_model), Export(exports["fp8"], threads=1)
    own = read_texts(
        example_samples / "heldout.jsonl", lambda t: export.encode(t) or [], count=8, max_length=40
    )
    sequences = reference.sequences(example_samples / "heldout.jsonl", count=8, max_length=40)
    assert own.ids == sequences.ids
    (row,) = compare(evaluate([export], reference, sequences, k=20)).rows
    assert row.kl is not None and row.kl.low > 1e-6


def test_nan_in_the_logits_is_one_clear_error(
    exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(*arguments: Any) -> Iterator[np.ndarray]:
        for logits in original(*arguments):
            logits = np.array(logits)
            logits[1, 2] = np.nan
            yield logits

    original = module.teacher_forced
    monkeypatch.setattr(module, "teacher_forced", spoiled)
    with pytest.raises(NumericsError, match="NaN or Inf in its logits"):
        list(Export(exports["fp8"], threads=1).answers([(1, 2, 3, 4)], 5))


def test_what_is_not_an_export_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ArtifactError, match="not an Octet artifact"):
        Export(tiny_model)
