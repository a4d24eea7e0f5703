"""Live traffic is compared with a calibration: alarms for another one, and for no other reason."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.drift import compare_live
from octet.artifacts.calibration import Calibration
from octet.errors import ConfigError
from octet.recipe import PRESETS

TOKENS = 2000


@dataclass(frozen=True)
class Window:
    """A window drawn from one span of the calibration, its magnitudes times 2^`octaves`."""

    calibration: Calibration
    seed: int
    octaves: int = 0
    tokens: int = TOKENS
    began: float = 0.0
    ended: float = 1.0

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.calibration.observations)

    def counts(self, name: str) -> Any:
        rng = np.random.default_rng([self.seed, list(self.calibration.observations).index(name)])
        spans = self.calibration.chunks[name]
        counts = spans[self.seed % len(spans)]
        drawn = rng.multinomial(TOKENS * 16, counts / counts.sum())
        return np.roll(drawn, 128 * self.octaves) if self.octaves else drawn


@pytest.fixture(scope="module")
def calibration(example_calibration: Path) -> Calibration:
    return Calibration.load(example_calibration)


def windows(calibration: Calibration, count: int = 9, **given: Any) -> list[Any]:
    return [Window(calibration, seed, **given) for seed in range(count)]


def test_traffic_like_the_samples_is_quiet(calibration: Calibration) -> None:
    found = compare_live(calibration, windows(calibration))
    assert not found.drifted and found.distance < found.limit
    assert not found.uncounted and found.tokens == 9 * TOKENS


def test_other_traffic_is_an_alarm_that_names_tensors(calibration: Calibration) -> None:
    found = compare_live(calibration, windows(calibration, octaves=1))
    assert found.changed
    for tensor in found.tensors.values():
        assert tensor.distance > 0.01
    assert found.as_json()["drifted"] is True


def test_a_scale_that_saturates_is_an_alarm(calibration: Calibration) -> None:
    name = next(n for n, o in calibration.observations.items() if o.kind == "input")
    consumer = calibration.observations[name].consumers[0]
    largest = np.flatnonzero(calibration.histograms[name])[-1]
    scale = np.array([largest << 16], np.uint32).view(np.float32)[0] / 448
    manifest = calibration.manifest.model_copy(update={"recipe": PRESETS["fp8-static"]})
    for factor, misfits in ((1, []), (1 / 16, [name])):
        scales = {f"{consumer}.input_scale": np.array(scale * factor, np.float32)}
        static = replace(calibration, manifest=manifest, scales=scales)
        found = compare_live(static, windows(calibration))
        assert found.misfits == misfits and not found.changed
        tensor = found.tensors[name]
        assert (tensor.saturated_now or 0) > 0 if misfits else tensor.saturated_now == 0


def test_too_few_windows_are_refused(calibration: Calibration) -> None:
    with pytest.raises(ConfigError, match=r"7 windows of live activations .* too few"):
        compare_live(calibration, windows(calibration, 7))


def test_a_calibration_of_one_span_is_refused(calibration: Calibration) -> None:
    single = replace(calibration)
    single.__dict__["chunks"] = {n: c.reshape(1, -1) for n, c in calibration.histograms.items()}
    with pytest.raises(ConfigError, match="calibrate again"):
        compare_live(single, windows(calibration))
