"""Scales of a few bits: against definitions, the engines' formulas in torch, and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octet.errors import NumericsError
from octet.numerics.bits import bf16_to_float32
from octet.numerics.formats import E2M1, E4M3, Format, grid
from octet.numerics.microscaling import combined, global_scale, power_of_two_scales
from tests.generators import format_id

ELEMENTS = [E2M1, E4M3]
over_elements = pytest.mark.parametrize("fmt", ELEMENTS, ids=format_id)
positive = st.floats(2.0**-100, 2.0**100, width=32)


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


@over_elements
def test_scales_are_values_of_e8m0(fmt: Format) -> None:
    amax = np.float32([0.3, 1, 447, 5e6, 3e-7, 0, 1e-45, 2.0**-126, 3.4e38])
    scale = power_of_two_scales(amax, fmt)
    assert scale.dtype == np.float32
    np.testing.assert_array_equal(scale, scale.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert scale[5] == 2.0**-127  # of zeros


# Two levels


def test_the_global_scale_is_modelopts() -> None:
    """amax / (6 * 448), as NVFP4QTensor.get_weights_scaling_factor_2 of ModelOpt 0.47."""
    for amax in (1.0, 0.1, 3.0, 1e-20, 123.456):
        theirs = torch.tensor(amax).float() / (6.0 * 448.0)
        assert global_scale(amax, E2M1) == theirs.numpy()
    assert global_scale(0.0, E2M1) == 1.0
    assert global_scale(6 * 256.0, E2M1, largest=256.0) == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_a_scale_of_no_amax_is_refused(bad: float) -> None:
    with pytest.raises(NumericsError, match="finite and not negative"):
        global_scale(bad, E2M1)
    with pytest.raises(NumericsError, match="finite and not negative"):
        power_of_two_scales(np.float32([1, bad]), E4M3)


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 2.0**-126])
def test_the_product_of_two_scales_is_a_normal_float32(amax: float) -> None:
    scale = global_scale(amax, E2M1)
    assert combined(grid(E4M3)[1:], scale).min() >= np.finfo(np.float32).tiny


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
