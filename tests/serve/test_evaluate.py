"""Perplexity of exports: the reference's definition, through the served cache."""

import math
from pathlib import Path

import pytest

from octet.errors import ArtifactError, SampleError
from serve.evaluate import perplexity


@pytest.fixture
def samples(tmp_path: Path, example_samples: Path) -> Path:
    """Eight held-out samples."""
    path = tmp_path / "samples.jsonl"
    lines = (example_samples / "heldout.jsonl").read_text().splitlines()[:8]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_unquantized_export_has_the_checkpoints_perplexity(
    exports: dict[str, Path], tiny_model: Path, samples: Path
) -> None:
    from calibrate.reference import perplexity as reference_perplexity

    reference = reference_perplexity(tiny_model, samples, dtype="float32", max_length=300)
    served = perplexity(exports["plain"], samples, max_length=300, threads=2)
    assert served.tokens == reference.tokens
    # A float16 cache moves the mean log-likelihood of a random model by less than this.
    assert served.nll_sum / served.tokens == pytest.approx(
        reference.nll_sum / reference.tokens, abs=1e-4
    )
    assert served.perplexity == math.exp(served.nll_sum / served.tokens)


def test_the_number_of_samples_and_their_length_can_be_limited(
    exports: dict[str, Path], samples: Path
) -> None:
    result = perplexity(exports["fp8"], samples, count=2, max_length=40, threads=2)
    assert result.tokens == 2 * 39 and math.isfinite(result.perplexity)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "no sample has two tokens"),
        ('{"text": ""}\n', "no sample has two tokens"),
        ('{"text": "fine"}\n{"other": "x"}\n', "line 2: not a JSON object with the field 'text'"),
        ("not json\n", "line 1: not a JSON object"),
        ('{"text": 5}\n', "line 1: 'text' is not a string"),
    ],
)
def test_samples_that_cannot_be_scored_are_one_clear_error(
    exports: dict[str, Path], tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "samples.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SampleError, match=message) as caught:
        perplexity(exports["fp8"], path, threads=1)
    assert "\n" not in str(caught.value)


def test_what_is_not_an_export_is_refused(tiny_model: Path, samples: Path) -> None:
    with pytest.raises(ArtifactError, match="not an Octet artifact"):
        perplexity(tiny_model, samples)
