"""Weight scales: no representable scale does better, and `max` is what ModelOpt computes."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibrate.scales import weights as module
from calibrate.scales.group_search import best_scales, tile_errors
from calibrate.scales.weights import MeanSquares, WeightScale, weight_scales
from octet.errors import NumericsError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import Linear
from octet.numerics import formats, scaling
from octet.numerics.formats import E2M1, E4M3, Format
from octet.numerics.microscaling import combined
from octet.recipe import PRESETS, Override, Recipe, TensorScheme
from octet.storage.tensors import Tensor, TensorFile, write_tensors
from tests.generators import format_id, rounding_points
from tests.references import (
    E2M1_VALUES,
    E4M3_VALUES,
    E8M0_VALUES,
    least_group_errors,
)

POWERS = np.ldexp(np.float32(1), np.arange(-127, 128)).astype(np.float32)


def by(preset: str, method: str) -> Recipe:
    recipe = PRESETS[preset]
    return Recipe(
        name=recipe.name,
        weights=recipe.weights.model_copy(update={"method": method}),
        activations=recipe.activations,
    )


def scales_by(checkpoint: Checkpoint, preset: str, method: str) -> dict[str, WeightScale]:
    return dict(weight_scales(checkpoint, by(preset, method)))


def stored(checkpoint: Checkpoint, linear: str) -> NDArray[np.float32]:
    return checkpoint.read(f"{linear}.weight").float32()


def noise(weight: NDArray[np.float32], found: WeightScale, preset: str) -> NDArray[np.float64]:
    """The error of every element, by the product's own arithmetic."""
    scheme = PRESETS[preset].weights
    granularity = scaling.Granularity.of(scheme.granularity, scheme.group_size)
    scale = combined(found.scale, found.global_scale)
    fmt = formats.format_named(found.format)
    return scaling.fake_quantize(weight, scale, fmt, granularity).astype(np.float64) - weight


@pytest.fixture(scope="module")
def example(example_model: Path) -> Checkpoint:
    return Checkpoint.open(example_model)


# The best of all


@pytest.mark.parametrize(
    ("preset", "values", "scales"),
    [
        ("nvfp4", E2M1_VALUES, E4M3_VALUES[1:]),
        ("mxfp4", E2M1_VALUES, E8M0_VALUES),
        ("mxfp8", E4M3_VALUES, E8M0_VALUES),
    ],
    ids=["nvfp4", "mxfp4", "mxfp8"],
)
def test_no_representable_scale_does_better_on_the_example(
    example: Checkpoint, preset: str, values: tuple[float, ...], scales: tuple[float, ...]
) -> None:
    """12 rows of every weight, whose groups are independent given the global scale."""
    size = PRESETS[preset].weights.group_size
    assert size is not None
    ours = least = signal = 0.0
    for linear, found in weight_scales(example, PRESETS[preset]):
        weight = stored(example, linear)
        rows = np.linspace(0, len(weight) - 1, 12).astype(int)
        error = noise(weight, found, preset)[rows] ** 2
        groups = error.reshape(len(rows), -1, size).sum(axis=2)
        shared = 1.0 if found.global_scale is None else float(found.global_scale)
        brute = least_group_errors(weight[rows], size, values, scales, shared)
        # The reference rounds nothing; float32 products differ from it in the last place.
        assert (groups <= brute * (1 + 1e-4) + 1e-20).all(), linear
        ours, least = ours + groups.sum(), least + brute.sum()
        signal += float((weight[rows].astype(np.float64) ** 2).sum())
    gap_db = 10 * np.log10(ours / least)
    print(f"{preset}: SQNR {10 * np.log10(signal / ours):.3f} dB, {gap_db:.6f} dB from brute force")
    assert -1e-3 < gap_db < 0.05


def exhaustive(
    x: NDArray[np.float32], columns: int, candidates: NDArray[np.float32], e2m1: bool
) -> NDArray[np.float64]:
    """[n, T] the least error of each group over every candidate, by the kernel's arithmetic."""
    tiles = -(-x.shape[1] // columns)
    errors = np.empty((len(candidates), len(x), tiles))
    shape = (len(candidates), len(x), tiles)
    every = np.broadcast_to(candidates[:, None, None], shape).copy()
    tile_errors(x, every, 1, columns, e2m1, errors)
    return np.asarray(errors.min(axis=0))


def groups_of_every_kind() -> NDArray[np.float32]:
    """[n, 20]: ordinary, heavy-tailed, far too large or small, equal, sparse, on the grid."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((40, 20))
    rows = [
        normal,
        rng.standard_t(1, (40, 20)),
        normal * 10.0 ** rng.uniform(-30, 30, (40, 1)),
        np.ones((2, 20)) * [[1.0], [3e38]],
        normal * (rng.random((40, 20)) < 0.1),
        rng.choice([0.0, 0.25, 0.75, 1.25, 2.5, 5.0, 6.0, 7.0], (40, 20)),
        np.full((1, 20), 1e-45),
        np.zeros((1, 20)),
    ]
    return np.concatenate(rows).astype(np.float32)


@pytest.mark.parametrize("powers", [True, False], ids=["e8m0", "e4m3"])
@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=format_id)
@pytest.mark.parametrize("columns", [16, 32, 7])
def test_what_is_not_tried_could_not_have_won(powers: bool, fmt: Format, columns: int) -> None:
    x = groups_of_every_kind()
    candidates = POWERS if powers else formats.grid(E4M3)[1:] * np.float32(0.003)
    _check_against_every_candidate(x, columns, candidates, powers, fmt)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    shared=st.floats(2.0**-30, 2.0**10, width=32),
    powers=st.booleans(),
    fmt=st.sampled_from([E2M1, E4M3]),
)
def test_nor_on_anything_that_hypothesis_finds(
    values: list[float], shared: float, powers: bool, fmt: Format
) -> None:
    candidates = POWERS if powers else formats.grid(E4M3)[1:] * np.float32(shared)
    _check_against_every_candidate(np.float32([values]), 16, candidates, powers, fmt)


def _check_against_every_candidate(
    x: NDArray[np.float32],
    columns: int,
    candidates: NDArray[np.float32],
    powers: bool,
    fmt: Format,
) -> None:
    tiles = -(-x.shape[1] // columns)
    best, errors = np.empty((len(x), tiles), np.int16), np.empty(len(x))
    best_scales(x, np.ones(x.shape[1]), columns, candidates, powers, fmt is E2M1, best, errors)
    least = exhaustive(x, columns, candidates, fmt is E2M1)
    chosen = np.empty((1, len(x), tiles))
    scale = np.where(best < 0, np.float32(1), candidates[best])
    tile_errors(x, scale[None], 1, columns, fmt is E2M1, chosen)
    np.testing.assert_array_equal(chosen[0], least)  # exactly: not one rounding apart
    np.testing.assert_allclose(errors, least.sum(axis=1), rtol=1e-12)
    zero = np.maximum.reduceat(np.abs(x), np.arange(0, x.shape[1], columns), axis=1) == 0
    assert ((best < 0) == zero).all()


# Weighted by the inputs


@pytest.mark.parametrize("powers", [True, False], ids=["e8m0", "e4m3"])
@pytest.mark.parametrize("columns", [16, 32, 7])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0], ids=lambda spread: f"10^{spread:g}")
def test_no_candidate_has_a_smaller_weighted_error(
    powers: bool, columns: int, spread: float
) -> None:
    """Brute force: every candidate's error of every element, weighted by its column."""
    x, rng = groups_of_every_kind(), np.random.default_rng(1)
    importance = 10.0 ** rng.uniform(-spread, spread, x.shape[1])
    importance[3] = 1e-30
    candidates = POWERS if powers else formats.grid(E4M3)[1:] * np.float32(0.003)
    starts = np.arange(0, x.shape[1], columns)
    best, errors = np.empty((len(x), len(starts)), np.int16), np.empty(len(x))
    best_scales(x, importance, columns, candidates, powers, True, best, errors)

    elements = np.empty((len(candidates), *x.shape))
    every = np.broadcast_to(candidates[:, None, None], elements.shape).copy()
    tile_errors(x, every, 1, 1, True, elements)
    weighted = np.add.reduceat(elements * importance, starts, axis=2)  # [C, n, T]
    chosen = np.take_along_axis(weighted, np.maximum(best, 0)[None], axis=0)[0]
    chosen[best < 0] = 0.0
    least = np.where(best < 0, 0.0, weighted.min(axis=0))
    np.testing.assert_allclose(chosen, least, rtol=1e-12)
    np.testing.assert_allclose(errors, least.sum(axis=1), rtol=1e-12)


NAME = "model.layers.1.mlp.up_proj"


def with_outliers(checkpoint: Checkpoint) -> NDArray[np.float32]:
    """Mean squares [K] of an input with a large channel in every second group of 16."""
    columns = stored(checkpoint, NAME).shape[1]
    means = np.random.default_rng(0).uniform(0.5, 2.0, columns).astype(np.float32)
    means[::32] *= 4096
    return means


def reading(means: NDArray[np.float32]) -> MeanSquares:
    """These are of what NAME reads, as the linear fused with it does; others are not known."""
    fused = (NAME, NAME.replace("up_proj", "gate_proj"))
    return lambda linear: means if linear.name in fused else None


@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4"])
def test_scales_for_the_inputs_lower_the_error_of_the_output(
    checkpoint: Checkpoint, preset: str
) -> None:
    """Expected and real, of inputs drawn with those mean squares."""
    means = with_outliers(checkpoint)
    plain = scales_by(checkpoint, preset, "mse")[NAME]
    found = dict(weight_scales(checkpoint, PRESETS[preset], mean_squares=reading(means)))
    weight, ours = stored(checkpoint, NAME), found[NAME]
    inputs = np.random.default_rng(1).standard_normal((4000, len(means))) * np.sqrt(means)
    errors = [noise(weight, scale, preset) for scale in (ours, plain)]
    expected = [float((error**2 @ means.astype(np.float64)).sum()) for error in errors]
    real = [float(((inputs @ error.T) ** 2).sum() / len(inputs)) for error in errors]
    print(f"{preset}: the error is {expected[0] / expected[1]:.3f} of that of plain scales")
    assert expected[0] < 0.9 * expected[1] and real[0] < 0.9 * real[1]
    assert real[0] == pytest.approx(expected[0], rel=0.1)
    # The SQNR stays that of the weight itself, of which the plain scales are the best.
    signal = float((weight.astype(np.float64) ** 2).sum())
    assert ours.sqnr_db == pytest.approx(10 * np.log10(signal / (errors[0] ** 2).sum()), abs=1e-6)
    assert ours.sqnr_db < plain.sqnr_db
    if preset == "nvfp4":  # gate and up are fused
        gate = found[NAME.replace("up_proj", "gate_proj")]
        assert ours.global_scale == gate.global_scale == plain.global_scale


@pytest.mark.parametrize(
    "means",
    [np.full(256, 0.3), np.zeros(256), np.full(256, np.inf)],
    ids=["equal", "dead", "overflown"],
)
def test_inputs_that_say_nothing_leave_the_plain_scales(
    checkpoint: Checkpoint, means: NDArray[np.float64]
) -> None:
    assert stored(checkpoint, NAME).shape[1] == len(means)
    plain = scales_by(checkpoint, "nvfp4", "mse")[NAME]
    given = reading(means.astype(np.float32))
    found = dict(weight_scales(checkpoint, PRESETS["nvfp4"], mean_squares=given))[NAME]
    np.testing.assert_array_equal(found.scale, plain.scale)


def test_a_channel_that_was_never_used_keeps_its_weights(checkpoint: Checkpoint) -> None:
    """Groups of dead channels have the scales of least error, as without inputs."""
    means = np.ones(256, np.float32)
    means[:64] = 0
    plain = scales_by(checkpoint, "nvfp4", "mse")[NAME]
    found = dict(weight_scales(checkpoint, PRESETS["nvfp4"], mean_squares=reading(means)))[NAME]
    np.testing.assert_array_equal(found.scale, plain.scale)


@pytest.mark.parametrize(
    ("preset", "method"),
    [(name, "mse") for name in PRESETS if not name.endswith("fp4")]
    + [("nvfp4", "max"), ("nvfp4", "four_six"), ("mxfp4", "max")],
)
def test_other_formats_and_methods_ignore_the_inputs(
    checkpoint: Checkpoint, preset: str, method: str
) -> None:
    def refuse(linear: Linear) -> NDArray[np.float32]:
        raise AssertionError(linear.name)

    plain = scales_by(checkpoint, preset, method)
    for name, found in weight_scales(checkpoint, by(preset, method), mean_squares=refuse):
        np.testing.assert_array_equal(found.scale, plain[name].scale)
        assert found.sqnr_db == plain[name].sqnr_db


@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=format_id)
def test_the_error_is_that_of_the_formats_rounding_everywhere(fmt: Format) -> None:
    x = rounding_points(fmt, np.float32)[None]
    for scale in (1.0, 0.3, 1e-10):
        errors = np.empty((1, 1, x.size))
        scales = np.full((1, 1, x.size), scale, np.float32)
        tile_errors(x, scales, 1, 1, fmt is E2M1, errors)
        real = scaling.fake_quantize(x, np.float32(scale), fmt, scaling.TENSOR)
        np.testing.assert_array_equal(errors[0], (real.astype(np.float64) - x) ** 2)


# Methods


@pytest.mark.parametrize("preset", PRESETS)
def test_mse_never_loses_and_says_how_good_it_is(checkpoint: Checkpoint, preset: str) -> None:
    largest, best = (scales_by(checkpoint, preset, method) for method in ("max", "mse"))
    for linear in checkpoint.spec.linears():
        weight = stored(checkpoint, linear.name)
        signal = float((weight.astype(np.float64) ** 2).sum())
        for found in (largest[linear.name], best[linear.name]):
            error = float((noise(weight, found, preset) ** 2).sum())
            assert found.sqnr_db == pytest.approx(10 * np.log10(signal / error), abs=1e-6)
        # Shared scales serve several weights at once, and E4M3's global one differs by method.
        if preset not in ("fp8-static", "nvfp4"):
            assert best[linear.name].sqnr_db >= largest[linear.name].sqnr_db


def test_nvfp4_methods_rank_as_they_should(example: Checkpoint) -> None:
    quality = {
        method: np.mean([x.sqnr_db for x in scales_by(example, "nvfp4", method).values()])
        for method in ("max", "four_six", "mse")
    }
    assert quality["max"] + 0.5 < quality["four_six"]
    assert quality["four_six"] + 0.3 < quality["mse"]


def modelopt_nvfp4(weight: torch.Tensor, amax: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 scales, global scale): NVFP4QTensor.get_weights_scaling_factor of ModelOpt 0.47."""
    shared = torch.tensor(amax).float() / (6.0 * 448.0)
    scale = weight.reshape(len(weight), -1, 16).abs().amax(-1) / (6.0 * shared)
    scale[scale == 0] = 1.0
    return scale.clamp(min=2**-9, max=448.0).to(torch.float8_e4m3fn).float(), shared


def modelopt_mxfp8(weight: torch.Tensor) -> torch.Tensor:
    """MXFP8QTensor._compute_e8m0_exponent of ModelOpt 0.47."""
    amax = weight.reshape(len(weight), -1, 32).abs().amax(-1)
    return torch.exp2(torch.ceil(torch.log2(amax / 448.0)).clamp(-127, 127))


def test_max_is_modelopts(checkpoint: Checkpoint) -> None:
    nvfp4, mxfp8 = scales_by(checkpoint, "nvfp4", "max"), scales_by(checkpoint, "mxfp8", "max")
    for fused in (["q_proj", "k_proj", "v_proj"], ["o_proj"]):
        names = [f"model.layers.1.self_attn.{name}" for name in fused]
        found = {name: torch.from_numpy(stored(checkpoint, name)) for name in names}
        amax = max(float(weight.abs().max()) for weight in found.values())
        for name, weight in found.items():
            scale, shared = modelopt_nvfp4(weight, amax)
            np.testing.assert_array_equal(nvfp4[name].scale, scale.numpy())
            np.testing.assert_array_equal(nvfp4[name].global_scale, shared.numpy())
            np.testing.assert_array_equal(mxfp8[name].scale, modelopt_mxfp8(weight).numpy())


def test_four_six_takes_the_better_of_its_two(checkpoint: Checkpoint) -> None:
    name = "model.layers.0.mlp.down_proj"
    found = scales_by(checkpoint, "nvfp4", "four_six")[name]
    weight = torch.from_numpy(stored(checkpoint, name)).double()
    shared = float(weight.abs().max()) / (6 * 256)
    assert found.global_scale == np.float32(shared)
    groups = weight.reshape(len(weight), -1, 16)
    amax = groups.abs().amax(-1)
    errors, scales = [], []
    for target in (6.0, 4.0):
        scale = (amax / target / shared).float().to(torch.float8_e4m3fn).double()
        values = torch.tensor(E2M1_VALUES).double() * (scale * shared)[..., None, None]
        error = (groups.abs()[..., None] - values).abs().amin(-1).square().sum(-1)
        errors.append(error)
        scales.append(scale)
    clear = ((errors[0] - errors[1]).abs() > 1e-6 * errors[0]).numpy()
    expected = torch.where(errors[0] <= errors[1], scales[0], scales[1]).numpy()
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(found.scale[clear], expected[clear])


@pytest.mark.parametrize("method", ["max", "mse", "four_six"])
def test_fused_linears_share_a_global_scale(checkpoint: Checkpoint, method: str) -> None:
    found = scales_by(checkpoint, "nvfp4", method)
    layer = "model.layers.0"
    for fused in (
        [f"{layer}.self_attn.{x}_proj" for x in "qkv"],
        [f"{layer}.mlp.{x}_proj" for x in ("gate", "up")],
    ):
        assert len({float(found[name].global_scale) for name in fused}) == 1
        amax = max(float(np.abs(stored(checkpoint, name)).max()) for name in fused)
        largest = 448 if method == "max" else 256
        assert found[fused[0]].global_scale == np.float32(amax) / np.float32(6 * largest)


@pytest.mark.parametrize("preset", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("method", ["max", "mse"])
def test_scales_are_values_of_their_format(
    checkpoint: Checkpoint, preset: str, method: str
) -> None:
    allowed = formats.grid(E4M3)[1:] if preset == "nvfp4" else POWERS
    for found in scales_by(checkpoint, preset, method).values():
        assert found.scale.dtype == np.float32
        assert np.isin(found.scale, allowed).all()
        assert (found.global_scale is not None) == (preset == "nvfp4")


# Recipes


def test_overrides_give_other_scales_to_some(checkpoint: Checkpoint) -> None:
    fp8, nvfp4 = PRESETS["fp8"], PRESETS["nvfp4"]
    override = Override(match="*.down_proj", weights=fp8.weights, activations=fp8.activations)
    recipe = nvfp4.model_copy(update={"overrides": (override,), "exclude": ("*.0.*.up_proj",)})
    found, plain = dict(weight_scales(checkpoint, recipe)), scales_by(checkpoint, "fp8", "max")
    for linear in checkpoint.spec.linears():
        name = linear.name
        if name.endswith("down_proj"):
            np.testing.assert_array_equal(found[name].scale, plain[name].scale)
            assert found[name].global_scale is None
        elif name == "model.layers.0.mlp.up_proj":
            assert name not in found
        else:
            assert found[name].scale.shape == (linear.out_features, linear.in_features // 16)


def test_groups_with_float32_scales(checkpoint: Checkpoint) -> None:
    """1 by 128, as activations of block weights have: no preset's, but a recipe may say so."""
    group = TensorScheme(granularity="group", group_size=128)
    recipe = Recipe(
        name="test", weights=group, activations=group.model_copy(update={"dynamic": True})
    )
    for linear, found in weight_scales(checkpoint, recipe):
        weight = stored(checkpoint, linear)
        amax = np.abs(weight).reshape(len(weight), -1, 128).max(axis=2)
        np.testing.assert_array_equal(found.scale, amax / np.float32(448))


# How it is computed


def rewritten(model: Path, to: Path, name: str, tensor: Tensor) -> Checkpoint:
    """A copy of the checkpoint with `tensor` in place of the one called `name`."""
    shutil.copytree(model, to)
    file = TensorFile.open(model / "model.safetensors")
    tensors = {key: file.read(key) for key in file.names} | {name: tensor}
    write_tensors(to / "model.safetensors", tensors)
    return Checkpoint.open(to)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", ["max", "mse"])
def test_slabs_make_no_difference(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, preset: str, method: str
) -> None:
    whole = scales_by(checkpoint, preset, method)
    monkeypatch.setattr(module, "_SLAB", 5000)
    for name, found in scales_by(checkpoint, preset, method).items():
        np.testing.assert_array_equal(found.scale, whole[name].scale)
        assert found.global_scale == whole[name].global_scale
        assert found.sqnr_db == pytest.approx(whole[name].sqnr_db, abs=1e-9)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_float32_checkpoint_gives_the_same_scales(
    tiny_model: Path, checkpoint: Checkpoint, tmp_path: Path, preset: str
) -> None:
    name = "model.layers.0.self_attn.o_proj"
    wide = Tensor.of(stored(checkpoint, name))
    other = rewritten(tiny_model, tmp_path / "wide", f"{name}.weight", wide)
    ours, theirs = (dict(weight_scales(x, PRESETS[preset]))[name] for x in (checkpoint, other))
    np.testing.assert_array_equal(ours.scale, theirs.scale)
    assert ours.sqnr_db == theirs.sqnr_db


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", ["max", "mse"])
def test_zeros_have_scale_one(
    tiny_model: Path, checkpoint: Checkpoint, tmp_path: Path, preset: str, method: str
) -> None:
    name = "model.layers.0.mlp.down_proj"
    codes = checkpoint.read(f"{name}.weight").codes.copy()
    codes[:128] = 0
    other = rewritten(tiny_model, tmp_path / "z", f"{name}.weight", Tensor("BF16", codes))
    found = scales_by(other, preset, method)[name]
    if preset != "fp8-static":
        height = 1 if preset == "fp8-block" else 128
        assert (found.scale[:height] == 1).all()
        assert not (found.scale[height:] == 1).all()
    codes[:] = 0
    other = rewritten(tiny_model, tmp_path / "all", f"{name}.weight", Tensor("BF16", codes))
    found = scales_by(other, preset, method)[name]
    assert (found.scale == 1).all() and found.sqnr_db == np.inf
    assert found.global_scale in (None, 1.0)


def test_nan_is_counted_in_the_whole_weight(
    tiny_model: Path,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    codes = checkpoint.read(name).codes.copy()
    codes[[3, 500], 7] = 0x7FC0
    other = rewritten(tiny_model, tmp_path / "nan", name, Tensor("BF16", codes))
    monkeypatch.setattr(module, "_SLAB", 5000)
    for preset in PRESETS:
        with pytest.raises(NumericsError, match=f"'{name}' holds 2 NaN and 0 Inf among 131072"):
            list(weight_scales(other, PRESETS[preset]))


@pytest.mark.parametrize("powers", [True, False])
def test_a_group_of_nan_gets_an_index_of_the_candidates(powers: bool) -> None:
    best = np.full((1, 2), -20800, np.int16)  # what memory may hold before
    x = np.ones((1, 32), np.float32)
    x[0, 3] = np.nan
    candidates = np.ldexp(np.float32(1), np.arange(-20, 21)).astype(np.float32)
    best_scales(x, np.ones(32), 16, candidates, powers, True, best, np.empty(1))
    assert 0 <= best[0, 0] < candidates.size
    assert candidates[best[0, 1]] <= 1
