"""Noise that is a level of the scenario times a sensitivity of the prompt."""

import math

import numpy as np
import pytest

from octet.artifacts.scenarios import Fault, Scenario
from octet.artifacts.serving_path import ServingPath
from octet.proof.noise import Candidate, Noise, z_score

PATHS = [
    ServingPath(kv_cache="e5m2"),
    ServingPath(kv_cache="e4m3"),
    ServingPath(kv_cache="e5m2", weights=False, activations=False),
    ServingPath(kv_cache="float16"),
]
LEVELS = [4.0, 2.0, 1.0, 0.5]
RECORDS, AXES = 200, 12


def candidates(sensitivity: np.ndarray, repeats: int = 2) -> list[Candidate]:
    """Noise of variance level times sensitivity in each of AXES directions."""
    rng = np.random.default_rng(0)
    found = []
    for path, level in zip(PATHS, LEVELS, strict=True):
        noise = rng.normal(size=(repeats, RECORDS, 1, AXES))
        points = noise * np.sqrt(level * sensitivity / AXES)[:, None, None]
        found.append(Candidate(Scenario(path=path), points))
    return found


def test_levels_and_sensitivities_are_found() -> None:
    sensitivity = np.random.default_rng(1).lognormal(0, 1, RECORDS)
    sensitivity /= sensitivity.mean()
    noise = Noise(candidates(sensitivity), np.ones(RECORDS, int))
    found = [noise.level(Scenario(path=path)) for path in PATHS]
    np.testing.assert_allclose(found, LEVELS, rtol=0.15)
    off = np.log(noise.prompts / sensitivity)
    assert off.std() < 0.35  # of 48 degrees of freedom each: √(2/48) is 0.2


def test_a_repeat_is_as_far_from_the_others_as_expected() -> None:
    """Also where more of them make the mean."""
    for repeats in (2, 4):
        found = candidates(np.ones(RECORDS), repeats)
        noise = Noise(found, np.ones(RECORDS, int))
        squared = found[0].squared(found[0].points[0], without=0)
        ratio = squared.mean() / noise.expected(found[0], repeats - 1).mean()
        assert ratio == pytest.approx(1, abs=0.1)


def test_one_simulation_has_the_level_of_its_path() -> None:
    fault = Scenario(path=PATHS[0], fault=Fault(kind="k_scale_dropped"))
    twin = Scenario(path=PATHS[1].model_copy(update={"compute": "float32"}))
    unknown = Scenario(path=ServingPath(kv_cache="float16", compute="float32", weights=False))
    found = candidates(np.ones(RECORDS))
    exact = Candidate(twin, np.zeros((2, RECORDS, 1, AXES)))
    noise = Noise([*found, exact], np.ones(RECORDS, int))
    assert noise.level(fault) == noise.level(Scenario(path=PATHS[0]))
    assert noise.level(twin) == noise.level(Scenario(path=PATHS[1]))
    assert noise.level(unknown) == pytest.approx(min(LEVELS), rel=0.15)


def test_the_truth_is_the_likeliest_however_noisy_it_is() -> None:
    """Each is off by as much as the quietest scatters; the nearest mean alone would mislead."""
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(len(PATHS), RECORDS, 1, AXES)) * math.sqrt(min(LEVELS) / AXES)
    found = [
        Candidate(candidate.scenario, candidate.points + centre)
        for candidate, centre in zip(candidates(np.ones(RECORDS)), centres, strict=True)
    ]
    noise = Noise(found, np.ones(RECORDS, int))
    for number, level in enumerate(LEVELS):
        served = centres[number] + rng.normal(size=(RECORDS, 1, AXES)) * math.sqrt(level / AXES)
        scores = [float(noise.likelihood(x, served).mean()) for x in found]
        assert int(np.argmax(scores)) == number


def test_one_prompt_that_is_far_off_outweighs_nothing() -> None:
    found = candidates(np.ones(RECORDS))
    noise = Noise(found, np.ones(RECORDS, int))
    served = found[0].points[0].copy()
    before = noise.likelihood(found[0], served)
    served[0] += 1e3
    lost = before - noise.likelihood(found[0], served)
    assert lost[0] < math.log(1e6) * 2 and not lost[1:].any()


def test_z_counts_standard_errors() -> None:
    values = np.array([1.0, 2.0, 3.0, np.nan])
    assert z_score(values) == (pytest.approx(2 / (1 / math.sqrt(3))), 3)
    assert z_score(values, margin=2.0) == (0.0, 3)
    assert z_score(np.zeros(4)) == (0.0, 4)
    assert z_score(np.ones(4)) == (math.inf, 4)
    assert z_score(np.ones(1)) == (0.0, 1)
