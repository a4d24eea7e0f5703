"""The formats against exact fractions; `test_formats_references.py` has ml_dtypes and torch."""

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.errors import NumericsError, UnsupportedError
from octet.numerics.formats import (
    E4M3,
    E5M2,
    E8M0,
    Format,
    decode,
    encode,
    format_named,
    grid,
    round_to,
)
from tests.generators import (
    ALL_FORMATS,
    FLOAT8,
    ML_DTYPES_NAME,
    MX_ELEMENTS,
    SIGNED,
    all_bf16,
    all_float16,
    exact_values,
    format_id,
    mismatches,
    nearest_by_fractions,
    rounding_points,
)

over_all = pytest.mark.parametrize("fmt", ALL_FORMATS, ids=format_id)
over_signed = pytest.mark.parametrize("fmt", SIGNED, ids=format_id)
over_float8 = pytest.mark.parametrize("fmt", FLOAT8, ids=format_id)
over_mx = pytest.mark.parametrize("fmt", MX_ELEMENTS, ids=format_id)
over_dtypes = pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])


# Limits and names


@over_all
def test_limits_are_those_of_the_format(fmt: Format) -> None:
    reference = ml_dtypes.finfo(getattr(ml_dtypes, ML_DTYPES_NAME[fmt.name]))
    assert fmt.max == float(reference.max)
    assert fmt.smallest_normal == float(reference.smallest_normal)
    assert fmt.smallest_subnormal == float(reference.smallest_subnormal)
    assert (fmt.bits, fmt.exponent_bits) == (reference.bits, reference.nexp)
    assert fmt.mantissa_bits == reference.nmant
    assert 2.0**fmt.emax <= fmt.max < 2.0 ** (fmt.emax + 1)
    every = decode(np.arange(2**fmt.bits, dtype=np.uint8), fmt)
    assert fmt.has_inf == bool(np.isinf(every).any())
    assert fmt.has_nan == bool(np.isnan(every).any())


def test_an_unknown_format_names_the_nearest() -> None:
    assert format_named("e5m2") is E5M2
    with pytest.raises(UnsupportedError, match=r"'e4m3fn'.*did you mean 'e4m3'"):
        format_named("e4m3fn")


# Decode


@over_all
def test_grid_is_the_exact_values_with_their_codes(fmt: Format) -> None:
    values = grid(fmt)
    assert [Fraction(float(v)) for v in values] == exact_values(fmt)
    np.testing.assert_array_equal(encode(values, fmt), np.arange(len(values)))
    np.testing.assert_array_equal(values, np.unique(values))


@over_mx
def test_a_code_of_too_many_bits_is_refused(fmt: Format) -> None:
    with pytest.raises(NumericsError, match=f"code 200 is not {fmt.name}.*unpack"):
        decode(np.array([1, 200], np.uint8), fmt)


# Encode, to nearest


@over_all
def test_decode_then_encode_returns_every_code(fmt: Format) -> None:
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    values = decode(codes, fmt)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(encode(values[finite], fmt), codes[finite])


@over_signed
@over_dtypes
def test_rounding_points_are_exact(fmt: Format, dtype: Any) -> None:
    x = rounding_points(fmt, dtype)
    expected = np.array([nearest_by_fractions(float(v), fmt) for v in x], np.uint8)
    assert mismatches(x, encode(x, fmt), expected) == []


@over_signed
@over_dtypes
def test_beyond_the_largest_saturates_and_inf_too(fmt: Format, dtype: Any) -> None:
    x = np.array([fmt.max * 1.01, fmt.max * 1.1, np.finfo(dtype).max, np.inf], np.float64)
    x = x.astype(dtype)
    assert decode(encode(x, fmt), fmt).tolist() == [fmt.max] * 4
    assert decode(encode(-x, fmt), fmt).tolist() == [-fmt.max] * 4


@over_signed
@over_dtypes
def test_signed_zero_and_underflow_keep_their_sign(fmt: Format, dtype: Any) -> None:
    tiny = float(np.finfo(dtype).smallest_subnormal)
    values = decode(encode(np.array([0.0, -0.0, tiny, -tiny], dtype), fmt), fmt)
    assert values.tolist() == [0, 0, 0, 0]
    assert np.signbit(values).tolist() == [False, True, False, True]


@over_float8
@over_dtypes
def test_nan_stays_nan_with_its_sign(fmt: Format, dtype: Any) -> None:
    x = np.array([np.nan, 1.0], dtype)
    assert encode(x, fmt)[0] == 0x7F
    assert encode(-x, fmt)[0] == 0xFF
    assert np.isnan(round_to(x, fmt)).tolist() == [True, False]


def test_a_nan_whose_payload_is_in_the_lower_bits_stays_nan() -> None:
    single = np.array([0x7F800001, 0xFF80FFFF], np.uint32).view(np.float32)
    double = np.array([0x7FF0000000000001, 0xFFF0000000000001], np.uint64).view(np.float64)
    for x in (single, double):
        for fmt in (E4M3, E5M2, E8M0):
            assert np.isnan(decode(encode(x, fmt), fmt)).all(), (x.dtype, fmt.name)


@over_mx
def test_nan_is_refused_where_there_is_no_code_for_it(fmt: Format) -> None:
    for function in (encode, round_to):
        with pytest.raises(NumericsError, match=f"NaN has no code in {fmt.name}"):
            function(np.array([1, np.nan], np.float32), fmt)


def test_float64_is_rounded_once() -> None:
    # Just above the middle of 1 and 1.125: as a float32 it would be the middle, and go to even.
    x = np.array([1.0625 + 2.0**-40, 1.1875 - 2.0**-40, 2.0**-10 + 2.0**-60])
    assert decode(encode(x, E4M3), E4M3).tolist() == [1.125, 1.125, 2.0**-9]
    # E5M2 by way of float16 would round twice too.
    y = np.array([1.125 + 2.0**-20], np.float32)
    assert decode(encode(y, E5M2), E5M2).tolist() == [1.25]
    assert encode(y.astype(np.float16), E5M2)[0] == encode(np.ones(1, np.float32), E5M2)[0]


@over_all
def test_round_to_is_encode_then_decode(fmt: Format) -> None:
    for x in (all_float16(), all_bf16(), rounding_points(fmt, np.float64)):
        x = x if fmt.has_nan else x[~np.isnan(x)]
        np.testing.assert_array_equal(round_to(x, fmt), decode(encode(x, fmt), fmt))


# Shapes, layouts and types


@over_dtypes
def test_shape_and_layout_do_not_matter(dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal((37, 3000)).astype(dtype)  # several chunks
    whole = encode(x, E4M3)
    assert whole.shape == x.shape
    np.testing.assert_array_equal(encode(x.T, E4M3), whole.T)
    np.testing.assert_array_equal(encode(x[::2, 5::7], E4M3), whole[::2, 5::7])
    np.testing.assert_array_equal(np.stack([encode(row, E4M3) for row in x]), whole)
    assert encode(x[:0], E4M3).shape == (0, 3000)
    assert encode(x[0, 0, ...], E4M3).shape == ()


@over_dtypes
def test_inputs_are_left_alone(dtype: Any) -> None:
    x = rounding_points(E4M3, dtype)
    before = x.copy()
    encode(x, E4M3)
    round_to(x, E4M3)
    np.testing.assert_array_equal(x, before)
    x.flags.writeable = False
    encode(x, E4M3)


def test_what_is_not_a_float_is_refused() -> None:
    for x in (np.arange(3), np.array([True]), np.zeros(2, np.complex64)):
        with pytest.raises(TypeError, match=f"{x.dtype} as e4m3"):
            encode(x, E4M3)  # type: ignore[arg-type]


numbers = {"allow_nan": False, "allow_infinity": False}


@given(x=st.floats(**numbers), single=st.floats(width=32, **numbers), fmt=st.sampled_from(SIGNED))
def test_any_float_goes_to_the_nearest_value(x: float, single: float, fmt: Format) -> None:
    assert encode(np.array([x]), fmt)[0] == nearest_by_fractions(x, fmt)
    assert encode(np.array([single], np.float32), fmt)[0] == nearest_by_fractions(single, fmt)
