"""The formats against ml_dtypes and torch wherever those two agree, then case by case."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octet.numerics.formats import E4M3, E5M2, E8M0, Format, decode, encode
from tests.generators import (
    ALL_FORMATS,
    ML_DTYPES_NAME,
    MX_ELEMENTS,
    all_bf16,
    all_float16,
    format_id,
    mismatches,
    rounding_points,
)

over_all = pytest.mark.parametrize("fmt", ALL_FORMATS, ids=format_id)
over_mx = pytest.mark.parametrize("fmt", MX_ELEMENTS, ids=format_id)


def by_ml_dtypes(x: NDArray[Any], fmt: Format) -> NDArray[np.uint8]:
    with np.errstate(all="ignore"):  # ml_dtypes raises the invalid flag for NaN
        return x.astype(getattr(ml_dtypes, ML_DTYPES_NAME[fmt.name])).view(np.uint8)


def by_torch(x: NDArray[Any], fmt: Format) -> NDArray[np.uint8]:
    assert fmt.torch_name is not None
    cast = torch.from_numpy(x).to(getattr(torch, fmt.torch_name))
    return cast.view(torch.uint8).numpy()


def whole_range(source: str) -> NDArray[Any]:
    return all_float16() if source == "float16" else all_bf16()


@over_all
def test_every_code_decodes_as_in_ml_dtypes(fmt: Format) -> None:
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    expected = codes.view(getattr(ml_dtypes, ML_DTYPES_NAME[fmt.name])).astype(np.float32)
    ours = decode(codes, fmt)
    np.testing.assert_array_equal(ours, expected)
    negative = fmt.signed and codes >= 2 ** (fmt.bits - 1)
    np.testing.assert_array_equal(np.signbit(ours), negative)  # of -0 and of NaN too


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E8M0], ids=format_id)
@pytest.mark.parametrize("source", ["float16", "bfloat16", "boundaries"])
def test_every_input_matches_where_ml_dtypes_and_torch_agree(fmt: Format, source: str) -> None:
    """But for E5M2's overflow; the two agree often enough."""
    x = rounding_points(fmt, np.float32) if source == "boundaries" else whole_range(source)
    with np.errstate(invalid="ignore"):  # signalling NaN
        single = x.astype(np.float32)
    expected = by_torch(single, fmt)
    agree = by_ml_dtypes(single, fmt) == expected
    if fmt is E5M2:
        agree &= np.isnan(single) | (np.abs(single) < 61440)  # both give Inf, ours saturates
    assert agree.mean() > 0.4
    assert mismatches(x[agree], encode(x, fmt)[agree], expected[agree]) == []


@over_mx
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_every_16_bit_input_of_the_small_formats_matches_ml_dtypes(
    fmt: Format, source: str
) -> None:
    x = whole_range(source)
    x = x[~np.isnan(x)]
    assert mismatches(x, encode(x, fmt), by_ml_dtypes(x, fmt)) == []


# Where the references differ


def codes_of(values: list[float], fmt: Format) -> tuple[list[int], list[int], list[int]]:
    """(ours, torch's, ml_dtypes') codes of `values`."""
    x = np.array(values, np.float32)
    return encode(x, fmt).tolist(), by_torch(x, fmt).tolist(), by_ml_dtypes(x, fmt).tolist()


def test_overflow_to_e4m3_saturates_as_in_torch_not_nan_as_in_ml_dtypes() -> None:
    ours, torchs, ml = codes_of([464, 465, 480, 1e30, np.inf, -480], E4M3)
    assert ours == torchs == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE]
    assert ml == [0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0xFF]


def test_overflow_to_e5m2_saturates_where_both_references_give_inf() -> None:
    ours, torchs, ml = codes_of([61439, 61440, 65536, np.inf, -np.inf], E5M2)
    assert ours == [0x7B, 0x7B, 0x7B, 0x7B, 0xFB]
    assert torchs == ml == [0x7B, 0x7C, 0x7C, 0x7C, 0xFC]


def test_nan_in_e5m2_is_torchs() -> None:
    ours, torchs, ml = codes_of([np.nan, -np.nan], E5M2)
    assert ours == torchs == [0x7F, 0xFF]
    assert ml == [0x7E, 0xFE]


def test_zero_in_e8m0_is_the_smallest_scale_as_in_torch() -> None:
    ours, torchs, ml = codes_of([0.0, -0.0], E8M0)
    assert ours == torchs == [0, 0]
    assert ml == [0xFF, 0xFF]


def test_negative_in_e8m0_is_nan_as_in_ml_dtypes() -> None:
    ours, torchs, ml = codes_of([-1.0, -3.0], E8M0)
    assert ours == ml == [0xFF, 0xFF]
    assert torchs == [127, 129]


def test_e8m0_does_not_saturate_and_ties_go_up_in_all_three() -> None:
    tiny = 2.0**-127
    values = [1.49 * 2.0**127, 1.5 * 2.0**127, np.inf, np.nan, 3.0, 6.0, tiny, 1.01 * tiny]
    ours, torchs, ml = codes_of(values, E8M0)
    assert ours == torchs == ml == [254, 255, 255, 255, 129, 130, 0, 1]
