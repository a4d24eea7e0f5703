"""Scales of a few bits: against definitions, the engines' formulas in torch, and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octet.errors import NumericsError
from octet.numerics import scaling
from octet.numerics.bits import bf16_to_float32
from octet.numerics.formats import E2M1, E4M3, Format, encode_e8m0_scale, grid
from octet.numerics.microscaling import (
    combined,
    dynamic_scales,
    fake_quantize_dynamic,
    global_scale,
    power_of_two_scales,
    two_level_scales,
)
from octet.recipe import PRESETS
from tests.generators import format_id

ELEMENTS = [E2M1, E4M3]
over_elements = pytest.mark.parametrize("fmt", ELEMENTS, ids=format_id)
positive = st.floats(2.0**-100, 2.0**100, width=32)


def activations(rows: int = 64, columns: int = 512, seed: int = 0) -> NDArray[np.float32]:
    """Heavy-tailed bfloat16 values whose groups differ by orders of magnitude."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, (rows, columns)) * np.exp(rng.standard_normal((rows, columns // 16, 1)))[
        ..., 0
    ].repeat(16, axis=1)
    return np.asarray(torch.from_numpy(x).bfloat16().float().numpy())


# Powers of two


def vllm_mxfp8_scale(amax: torch.Tensor) -> torch.Tensor:
    """`_mxfp8_e4m3_quantize_torch` of vLLM 0.32."""
    amax = amax.clamp(min=torch.finfo(torch.float32).tiny)
    biased = (torch.ceil(torch.log2(amax / 448.0)) + 127.0).clamp(0, 254)
    return torch.exp2(biased - 127.0)


def vllm_mxfp4_scale(amax: torch.Tensor) -> torch.Tensor:
    """`_compute_quant_and_scale` of vLLM 0.32 (mxfp4_utils.py), its Triton in torch."""
    bits = (amax.view(torch.int32) + 0x200000) & 0x7F800000
    power = bits.view(torch.float32)
    power = power + torch.where(power == 0, 2.0**-126, 0.0)
    return torch.exp2((torch.log2(power).floor() - 2).clamp(-127, 127))


def test_every_bfloat16_gets_the_scale_that_vllm_gives_it() -> None:
    amax = bf16_to_float32(np.arange(0x7F00, dtype=np.uint16))  # below 2^127
    theirs = torch.from_numpy(amax)
    np.testing.assert_array_equal(power_of_two_scales(amax, E4M3), vllm_mxfp8_scale(theirs))
    np.testing.assert_array_equal(power_of_two_scales(amax, E2M1), vllm_mxfp4_scale(theirs))


@given(amax=positive)
def test_mxfp8_takes_the_least_power_that_does_not_saturate(amax: float) -> None:
    scale = float(power_of_two_scales(np.array([amax], np.float32), E4M3)[0])
    assert amax <= 448 * scale
    assert amax > 448 * scale / 2


@given(amax=positive)
def test_mxfp4_maps_the_largest_to_between_three_and_a_half_and_seven(amax: float) -> None:
    scale = float(power_of_two_scales(np.array([amax], np.float32), E2M1)[0])
    assert 3.5 <= amax / scale < 7


@given(amax=positive)
def test_it_is_ocps_scale_or_the_next(amax: float) -> None:
    x = np.array([amax], np.float32)
    for fmt in ELEMENTS:
        ocp = np.ldexp(1.0, encode_e8m0_scale(x, fmt).astype(int) - 127)
        assert power_of_two_scales(x, fmt)[0] in (ocp[0], 2 * ocp[0])


@over_elements
def test_scales_are_values_of_e8m0(fmt: Format) -> None:
    amax = np.abs(activations()).max(axis=1)
    amax = np.concatenate([amax, np.float32([0, 1e-45, 2.0**-126, 3.4e38])])
    scale = power_of_two_scales(amax, fmt)
    assert scale.dtype == np.float32
    np.testing.assert_array_equal(scale, scale.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert scale[-4] == 2.0**-127  # of zeros


# Two levels


def test_the_global_scale_is_modelopts() -> None:
    """amax / (6 * 448), as NVFP4QTensor.get_weights_scaling_factor_2 of ModelOpt 0.47."""
    for amax in (1.0, 0.1, 3.0, 1e-20, 123.456):
        theirs = torch.tensor(amax).float() / (6.0 * 448.0)
        assert global_scale(amax, E2M1) == theirs.numpy()
    assert global_scale(0.0, E2M1) == 1.0
    assert global_scale(6 * 256.0, E2M1, largest=256.0) == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_a_global_scale_of_no_amax_is_refused(bad: float) -> None:
    with pytest.raises(NumericsError, match="finite and not negative"):
        global_scale(bad, E2M1)


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 2.0**-126])
def test_the_product_of_two_scales_is_a_normal_float32(amax: float) -> None:
    scale = global_scale(amax, E2M1)
    assert combined(grid(E4M3)[1:], scale).min() >= np.finfo(np.float32).tiny


def vllm_nvfp4(x: torch.Tensor, divisor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values that come back, E4M3 scales): `ref_nvfp4_quant_dequant` of vLLM 0.32."""
    groups = x.reshape(x.shape[0], -1, 16)
    amax = groups.abs().amax(-1, keepdim=True)
    scale = (divisor * (amax * (1 / 6))).clamp(-448, 448)
    scale = scale.to(torch.float8_e4m3fn).float()
    inverse = 1.0 / (scale * (1.0 / divisor) + (scale == 0) * 1e8)
    scaled = (groups * inverse).clamp(-6, 6)
    magnitude = scaled.abs()
    values = torch.zeros_like(magnitude)
    for low, high, value in (
        (0.25, 0.75, 0.5),
        (0.75, 1.25, 1.0),
        (1.25, 1.75, 1.5),
        (1.75, 2.5, 2.0),
        (2.5, 3.5, 3.0),
        (3.5, 5.0, 4.0),
        (5.0, 7.0, 6.0),
    ):
        even = value in (1.0, 2.0, 4.0)  # the codes that ties go to
        above = magnitude >= low if even else magnitude > low
        below = magnitude <= high if even else magnitude < high
        values[above & below] = value
    real = values * scaled.sign() * (scale / divisor)
    return real.reshape(x.shape), scale[..., 0]


@pytest.mark.parametrize("amax", [None, 2.0, 1e6], ids=["its own", "too small", "too large"])
def test_nvfp4_activations_are_vllms(amax: float | None) -> None:
    x = activations()
    shared = global_scale(float(np.abs(x).max()) if amax is None else amax, E2M1)
    theirs, scales = vllm_nvfp4(torch.from_numpy(x), 1 / torch.from_numpy(shared))
    scheme = PRESETS["nvfp4"].activations
    ours = dynamic_scales(x, scheme, shared)
    np.testing.assert_array_equal(ours, scales.numpy())
    if amax == 1e6:
        assert (ours == 0).any()  # groups that vanish are part of the comparison
    # Elements may differ in the last place, or by a step within that of a rounding boundary.
    real = fake_quantize_dynamic(x, scheme, shared)
    step = combined(ours, shared).repeat(16, axis=1)
    differ = np.abs(real - theirs.numpy()) > 1e-6 * np.abs(real)
    assert differ.mean() < 1e-3
    assert (np.abs(real - theirs.numpy())[differ] <= 2.001 * step[differ]).all()


@given(
    values=st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=40),
    amax=st.floats(2.0**-6, 2000, width=32),
)
def test_a_dynamic_group_by_definition(values: list[float], amax: float) -> None:
    x = np.array([values], np.float32)
    shared = global_scale(amax, E2M1)
    real = fake_quantize_dynamic(x, PRESETS["nvfp4"].activations, shared)
    codes = grid(E2M1).astype(float)
    for start in range(0, len(values), 16):
        part = x[0, start : start + 16].astype(float)
        wanted = min(448.0, np.abs(part).max() / 6 / float(shared))
        near = np.sort(np.abs(grid(E4M3).astype(float) - wanted))[:1]
        scale = float(dynamic_scales(x, PRESETS["nvfp4"].activations, shared)[0, start // 16])
        assert abs(scale - wanted) <= near[0] + 1e-6 * wanted
        factor = scale * float(shared)
        nearest = np.abs(np.abs(part)[:, None] - codes * factor).min(axis=1)
        error = np.abs(real[0, start : start + 16] - part)
        assert (error <= nearest + 1e-5 * np.abs(part) + 1e-30).all()


def test_two_levels_need_a_global_scale() -> None:
    with pytest.raises(ValueError, match="needs a global scale"):
        dynamic_scales(activations(), PRESETS["nvfp4"].activations)


# Every dynamic scheme


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name].activations.dynamic])
def test_one_level_schemes_are_scalings_own(preset: str) -> None:
    scheme = PRESETS[preset].activations
    x = activations()
    shared = global_scale(float(np.abs(x).max()), E2M1) if scheme.two_level else None
    scale = combined(dynamic_scales(x, scheme, shared), shared)
    granularity = scaling.Granularity.of(scheme.granularity, scheme.group_size)
    fmt = E2M1 if scheme.format == "e2m1" else E4M3
    codes = scaling.quantize(x, scale, fmt, granularity)
    expected = scaling.dequantize(codes, scale, fmt, granularity)
    np.testing.assert_array_equal(fake_quantize_dynamic(x, scheme, shared), expected)


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name].activations.dynamic])
def test_zeros_stay_zeros(preset: str) -> None:
    scheme = PRESETS[preset].activations
    x = activations()
    x[:, 128:256] = 0
    x[7] = 0
    shared = global_scale(float(np.abs(x).max()), E2M1) if scheme.two_level else None
    real = fake_quantize_dynamic(x, scheme, shared)
    assert np.isfinite(real).all()
    assert (real[x == 0] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_are_named(bad: float) -> None:
    x = activations()
    x[3, 5] = bad
    for preset in ("mxfp8", "mxfp4", "fp8"):
        with pytest.raises(NumericsError, match="'layer'"):
            fake_quantize_dynamic(x, PRESETS[preset].activations, name="layer")
    with pytest.raises(NumericsError, match="NaN or Inf"):
        two_level_scales(np.float32([1, bad]), E2M1, np.float32(1))
    with pytest.raises(NumericsError, match="NaN or Inf"):
        power_of_two_scales(np.float32([1, bad]), E4M3)


@settings(max_examples=30)
@given(scale=st.sampled_from([float(v) for v in grid(E4M3)]), amax=positive)
def test_combined_is_one_product(scale: float, amax: float) -> None:
    shared = global_scale(amax, E2M1)
    one = combined(np.float32([scale]), shared)
    if scale == 0:
        assert one[0] == np.finfo(np.float32).max
    else:
        assert one[0] == np.float32(scale) * shared
    assert combined(np.float32([scale]), None)[0] == np.float32(scale)
