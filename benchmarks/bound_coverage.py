"""Measures how often the truth exceeds the one-sided 95 % bounds of gates and budgets.

5 % of draws is what a bound claims. Population and draws are those of `evaluate_coverage.py`: the
divergence, and the change of the perplexity, of two exports on 640 documents, whose own figures are
the truth; n documents are drawn with replacement. Beside the bound that is used stand Student's and
Hall's alone, and how far the bound lies above the truth.

    python benchmarks/bound_coverage.py [--recipes nvfp4 fp8] [--directory DIR]
"""

from typing import Any

import numpy as np
from card import conditions, report
from evaluate_coverage import SEED, Numbers, arguments, evaluated, figures, population_of

from octet.statistics import CONFIDENCE, hall_ends, moments, student_ends, upper_bound

SIZES = (8, 16, 32, 64, 128)  # documents
DRAWS = 20_000


def main() -> None:
    options = arguments(__doc__, recipes=["nvfp4", "fp8"])
    evaluation = evaluated(options)
    tokens = np.array([len(nll) for nll in evaluation.targets[0].nll], np.float64)
    generator = np.random.default_rng(SEED)
    rows = [
        beyond(figure, sums, tokens, n, generator)
        for figure, sums in figures(evaluation, options.recipes).items()
        if figure.startswith(("KL of", "log-perplexity change of"))
        for n in SIZES
    ]
    card = conditions(
        **population_of(options, tokens),
        resamples=f"{DRAWS} of n documents with replacement, seed {SEED}",
        beyond="% of draws whose bound lies below the truth; student_beyond, hall_beyond likewise",
        median="of the bound, as a multiple of the truth",
    )
    report("bound_coverage", card, rows, options.output)


def beyond(
    figure: str, sums: Numbers, tokens: Numbers, n: int, generator: np.random.Generator
) -> dict[str, Any]:
    truth = sums.sum() / tokens.sum()
    drawn = generator.integers(0, len(tokens), (DRAWS, n))
    x, m = sums[drawn], tokens[drawn]
    found = moments(x, m)
    student, hall = student_ends(found, CONFIDENCE)[1], hall_ends(found, CONFIDENCE)[1]
    bounds = np.maximum(student, hall)
    for row in range(3):  # what is measured is what gates compute
        assert np.isclose(upper_bound(x[row], m[row]), bounds[row], rtol=1e-12)
    share = {
        name: round(100 * float((ends < truth).mean()), 2)
        for name, ends in (("beyond", bounds), ("student_beyond", student), ("hall_beyond", hall))
    }
    median = round(float(np.median(bounds) / truth), 3)
    return {"figure": figure, "n": n, "truth": float(truth), **share, "median": median}


if __name__ == "__main__":
    main()
