"""The divergence of a stream, from sums alone; `tests/calibrate/test_replay.py` measures one."""

import numpy as np
import pytest

from calibrate.quality.fused_units import format_label
from calibrate.quality.rule_costs import MeanKl
from octet.recipe import PRESETS
from octet.statistics import moments


def test_the_error_is_that_of_all_samples_at_once() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 500, 40).astype(np.float64)
    kl = tokens * rng.gamma(2.0, 0.001, 40)
    found = MeanKl()
    for start in range(0, 40, 8):
        found.add(kl[start : start + 8], tokens[start : start + 8])
    whole = moments(kl, tokens)
    assert found.mean == pytest.approx(float(whole.mean))
    assert found.error == pytest.approx(float(whole.error))


def test_one_sample_has_no_error() -> None:
    found = MeanKl()
    found.add(np.array([0.5]), np.array([100.0]))
    assert (found.mean, found.error) == (0.005, None)


def test_a_margin_does_not_change_a_formats_name() -> None:
    preset = PRESETS["fp8-static"]
    activations = preset.activations.model_copy(update={"margin": 2})
    assert format_label([(preset.weights, activations)]) == "fp8-static"
