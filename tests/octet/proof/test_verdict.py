"""The line that a verdict is told by."""

import pytest

from octet.proof.divergence import Measure
from octet.proof.verdict import Outcome, Range, sentence

EXPECTED = Range(0.02, 0.01, 0.04)


@pytest.mark.parametrize(
    ("outcome", "kl", "words"),
    [
        ("worse", 0.2, "worse than expected: 0.2 "),
        ("worse", 0.03, "other than expected: 0.03 "),  # as far away, in another direction
        ("worse", 0.001, "other than expected: 0.001 "),
        ("better", 0.03, "better than expected: 0.03 "),
        ("better", 0.05, "other than expected: 0.05 "),
        ("as_expected", 0.03, "as expected: 0.03 "),
    ],
)
def test_worse_is_said_of_what_is_farther(outcome: Outcome, kl: float, words: str) -> None:
    measured = Measure(kl, 0.5 * kl, 2 * kl, kl, kl, 1.0, None, 24, 80)
    line = sentence(outcome, measured, "where something is expected", None, EXPECTED)
    assert line.startswith(words)
