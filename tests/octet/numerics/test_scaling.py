"""Scales, and the numbers they give: against plain loops, ONNX's reference, ONNX Runtime, torch."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from octet.errors import NumericsError
from octet.numerics.formats import E4M3, E5M2, Format, decode, encode, grid
from octet.numerics.scaling import (
    BLOCK,
    CHANNEL,
    TENSOR,
    TOKEN,
    Granularity,
    absmax,
    dequantize,
    fake_quantize,
    group,
    quantize,
    scale_from_absmax,
)
from tests.generators import (
    FLOAT8,
    ML_DTYPES_NAME,
    SIGNED,
    WEIGHT_SHAPES,
    format_id,
    rounding_points,
)

GRANULARITIES = [TENSOR, CHANNEL, TOKEN, BLOCK, group(16), group(128)]


def granularity_id(granularity: Granularity) -> str:
    return f"{granularity.name}{granularity.columns or ''}"


over_granularities = pytest.mark.parametrize("granularity", GRANULARITIES, ids=granularity_id)
over_shapes = pytest.mark.parametrize("shape", WEIGHT_SHAPES, ids=str)
over_float8 = pytest.mark.parametrize("fmt", FLOAT8, ids=format_id)


def weights(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    """Heavy-tailed values, so that tiles differ in their largest."""
    return np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)


def tiles(shape: tuple[int, int], granularity: Granularity) -> dict[tuple[int, ...], Any]:
    """{index of the scale: index of its tile in a tensor [N, K]}, written out as loops."""
    n, k = shape
    if granularity.name == "tensor":
        return {(): np.s_[:, :]}
    rows = 128 if granularity.name == "block" else 1
    columns = {"block": 128, "group": granularity.columns}.get(granularity.name, k)
    assert columns is not None
    return {
        (i, j): np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        for i in range((n + rows - 1) // rows)
        for j in range((k + columns - 1) // columns)
    }


# Tiles


@over_granularities
@over_shapes
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_absmax_is_the_largest_magnitude_of_each_tile(
    granularity: Granularity, shape: tuple[int, int], dtype: Any
) -> None:
    x = weights(shape).astype(dtype)
    amax = absmax(x, granularity)
    assert amax.dtype == np.float32
    assert amax.shape == granularity.scale_shape(shape)
    expected = {
        i: np.float32(np.abs(x[tile]).max()) for i, tile in tiles(shape, granularity).items()
    }
    assert {i: amax[i] for i in expected} == expected
    assert amax.size == len(expected)


@over_granularities
@over_shapes
@over_float8
def test_each_tile_is_divided_by_its_own_scale(
    granularity: Granularity, shape: tuple[int, int], fmt: Format
) -> None:
    x = weights(shape)
    scale = scale_from_absmax(absmax(x, granularity), fmt)
    codes = quantize(x, scale, fmt, granularity)
    real = dequantize(codes, scale, fmt, granularity)
    for i, tile in tiles(shape, granularity).items():
        expected = encode(x[tile] / scale[i], fmt)
        np.testing.assert_array_equal(codes[tile], expected, err_msg=f"codes of tile {i}")
        np.testing.assert_array_equal(real[tile], decode(expected, fmt) * scale[i], err_msg=str(i))
    np.testing.assert_array_equal(fake_quantize(x, scale, fmt, granularity), real)


@pytest.mark.parametrize(
    ("granularity", "shape", "expected"),
    [
        (TENSOR, (3, 4, 5), ()),
        (TENSOR, (), ()),
        (CHANNEL, (4, 5), (4, 1)),
        (CHANNEL, (8, 4, 5), (8, 4, 1)),
        (TOKEN, (5,), (1,)),
        (TOKEN, (2, 3, 5), (2, 3, 1)),
        (BLOCK, (128, 129), (1, 2)),
        (BLOCK, (8, 257, 128), (8, 3, 1)),
        (group(16), (4, 40), (4, 3)),
        (group(16), (2, 3, 32), (2, 3, 2)),
    ],
)
def test_scale_shapes_with_and_without_leading_axes(
    granularity: Granularity, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert granularity.scale_shape(shape) == expected
    x = weights(shape)
    scale = scale_from_absmax(absmax(x, granularity), E4M3)
    assert scale.shape == expected and scale.dtype == np.float32
    codes = quantize(x, scale, E4M3, granularity)
    assert codes.shape == shape and codes.dtype == np.uint8
    if len(shape) == 3 and expected:  # each leading index alone gives the same
        for i in range(shape[0]):
            np.testing.assert_array_equal(quantize(x[i], scale[i], E4M3, granularity), codes[i])


def test_layout_does_not_matter() -> None:
    x = weights((300, 260))
    for granularity in GRANULARITIES:
        scale = scale_from_absmax(absmax(x, granularity), E4M3)
        turned = np.asfortranarray(x)
        np.testing.assert_array_equal(absmax(turned, granularity), absmax(x, granularity))
        np.testing.assert_array_equal(
            quantize(turned, scale, E4M3, granularity), quantize(x, scale, E4M3, granularity)
        )


@over_granularities
def test_an_empty_tensor_is_no_mistake(granularity: Granularity) -> None:
    x = np.zeros((0, 256), np.float32)
    scale = scale_from_absmax(absmax(x, granularity), E4M3)
    assert quantize(x, scale, E4M3, granularity).shape == (0, 256)
    assert dequantize(np.zeros((0, 256), np.uint8), scale, E4M3, granularity).shape == (0, 256)


def test_a_recipes_name_gives_the_granularity() -> None:
    assert Granularity.of("block", 128) == BLOCK
    assert Granularity.of("group", 16) == group(16)
    assert Granularity.of("channel") == CHANNEL
    with pytest.raises(ValueError, match="'group' needs a group_size"):
        Granularity.of("group")
    with pytest.raises(ValueError, match="unknown granularity 'row'"):
        Granularity.of("row", 4)


def test_scales_of_the_wrong_shape_are_refused() -> None:
    x = weights((256, 256))
    with pytest.raises(
        ValueError, match=r"'w'.*block scales of .*\[256, 256\].*\[2, 2\], not \[2\]"
    ):
        quantize(x, np.ones(2, np.float32), E4M3, BLOCK, name="w")
    with pytest.raises(ValueError, match="channel scales need at least 2 axes"):
        absmax(x[0], CHANNEL)
    one = quantize(x, np.ones(1, np.float32), E4M3, TENSOR)  # checkpoints write [] or [1]
    np.testing.assert_array_equal(one, quantize(x, np.float32(1), E4M3, TENSOR))


# Scales


@pytest.mark.parametrize("fmt", SIGNED, ids=format_id)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scale_is_amax_over_the_largest_value_as_in_torch(fmt: Format, dtype: Any) -> None:
    amax = np.abs(weights((1000,))).astype(dtype)
    expected = torch.from_numpy(amax).to(torch.float32) / fmt.max
    np.testing.assert_array_equal(scale_from_absmax(amax, fmt), expected.numpy())


@over_float8
def test_amax_itself_becomes_the_largest_value(fmt: Format) -> None:
    amax = np.abs(weights((1000, 1), seed=3))
    codes = quantize(amax, scale_from_absmax(amax, fmt), fmt, TOKEN)
    assert (decode(codes, fmt) == fmt.max).all()


def test_a_tile_of_zeros_has_scale_one() -> None:
    x = np.zeros((2, 4), np.float32)
    x[1] = -0.0
    scale = scale_from_absmax(absmax(x, CHANNEL), E4M3)
    assert scale.tolist() == [[1.0], [1.0]]
    assert quantize(x, scale, E4M3, CHANNEL).tolist() == [[0] * 4, [0x80] * 4]


@pytest.mark.parametrize("fmt", SIGNED, ids=format_id)
@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-140, 2.0**-126, 1e-30, 3.4028235e38])
def test_extreme_scales_are_normal_and_have_a_finite_reciprocal(fmt: Format, amax: float) -> None:
    scale = scale_from_absmax(np.array([[amax]], np.float32), fmt)
    assert scale[0, 0] >= np.finfo(np.float32).tiny
    assert np.isfinite(np.float32(1) / scale).all()
    real = fake_quantize(np.array([[amax, -amax]], np.float32), scale, fmt, TOKEN)
    assert np.isfinite(real).all()
    assert np.abs(real[0, 0] - amax) <= max(
        0.07 * amax, float(scale[0, 0]) * fmt.smallest_subnormal
    )


def test_overflow_of_the_division_saturates_without_a_warning() -> None:
    codes = quantize(np.array([3e38, -3e38], np.float32), np.float32(1e-10), E5M2, TENSOR)
    assert decode(codes, E5M2).tolist() == [57344, -57344]


# What is wrong with the data


@over_granularities
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_reported_with_the_tensors_name(
    granularity: Granularity, dtype: Any, bad: float
) -> None:
    x = weights((130, 140)).astype(dtype)
    x[129, 139] = bad
    counts = "1 NaN and 0 Inf" if np.isnan(bad) else "0 NaN and 1 Inf"
    match = f"'layers.0.up_proj' holds {counts} among 18200 values"
    scale = np.ones(granularity.scale_shape(x.shape), np.float32)
    with pytest.raises(NumericsError, match=match):
        absmax(x, granularity, name="layers.0.up_proj")
    with pytest.raises(NumericsError, match=match):
        quantize(x, scale, E4M3, granularity, name="layers.0.up_proj")
    with pytest.raises(NumericsError, match="the tensor holds"):
        fake_quantize(x, scale, E4M3, granularity)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_that_cannot_be_one_is_refused(bad: float) -> None:
    scale = np.array([[1.0], [bad]], np.float32)
    for call in (
        lambda: quantize(np.ones((2, 4), np.float32), scale, E4M3, CHANNEL, name="w"),
        lambda: dequantize(np.ones((2, 4), np.uint8), scale, E4M3, CHANNEL, name="w"),
    ):
        with pytest.raises(NumericsError, match="'w' has a scale that is not positive and finite"):
            call()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_an_amax_that_cannot_be_one_is_refused(bad: float) -> None:
    with pytest.raises(NumericsError, match="amax must be finite and not negative"):
        scale_from_absmax(np.array([1.0, bad], np.float32), E4M3)


# Errors of quantization


@settings(deadline=None)
@given(
    amax=st.floats(2.0**-100, 2.0**100, width=32),
    code=st.integers(0, 123),
    fmt=st.sampled_from(SIGNED),
)
def test_quantizing_a_dequantized_value_returns_its_code(
    amax: float, code: int, fmt: Format
) -> None:
    scale = scale_from_absmax(np.array(amax), fmt)
    codes = np.array([code % len(grid(fmt))], np.uint8)
    real = dequantize(codes, scale, fmt, TENSOR)
    np.testing.assert_array_equal(quantize(real, scale, fmt, TENSOR), codes)


# ONNX QuantizeLinear and DequantizeLinear


def onnx_model(
    fmt: Format, shape: tuple[int, ...], scale: NDArray[np.float32], **attributes: int
) -> onnx.ModelProto:
    """x → QuantizeLinear (saturate=1) → q → DequantizeLinear → y, opset 21."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(ML_DTYPES_NAME[fmt.name]))
    zero = helper.make_tensor("zero", kind, scale.shape, [0.0] * scale.size)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], saturate=1, **attributes),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], **attributes),
    ]
    graph = helper.make_graph(
        nodes,
        "quantize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [
            helper.make_tensor_value_info("q", kind, shape),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, shape),
        ],
        [onnx.numpy_helper.from_array(scale, "scale"), zero],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


ONNX_CASES = [  # granularity, shape, ONNX attributes
    (TENSOR, (96, 80), {}),
    (CHANNEL, (96, 80), {"axis": 0}),
    (group(16), (96, 80), {"axis": 1, "block_size": 16}),
    (group(40), (96, 80), {"axis": 1, "block_size": 40}),
]


@over_float8
@pytest.mark.parametrize(("granularity", "shape", "attributes"), ONNX_CASES)
def test_onnx_gives_the_same_codes_and_values(
    fmt: Format, granularity: Granularity, shape: tuple[int, int], attributes: dict[str, int]
) -> None:
    """In its reference and in ONNX Runtime; half the scale that amax asks for: some overflow."""
    x = weights(shape, seed=11)
    scale = scale_from_absmax(absmax(x, granularity), fmt) / np.float32(2)
    as_onnx = scale.reshape(-1) if granularity is CHANNEL else scale
    model = onnx_model(fmt, shape, as_onnx, **attributes)
    q, y = ReferenceEvaluator(model).run(None, {"x": x})
    codes = quantize(x, scale, fmt, granularity)
    np.testing.assert_array_equal(codes, q.view(np.uint8))
    np.testing.assert_array_equal(dequantize(codes, scale, fmt, granularity), y)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(["y"], {"x": x})
    np.testing.assert_array_equal(fake_quantize(x, scale, fmt, granularity), y)


@over_float8
def test_onnx_reference_agrees_at_every_rounding_point(fmt: Format) -> None:
    x = rounding_points(fmt, np.float32)
    for scale in (np.float32(1), np.float32(0.3), np.float32(7)):
        with np.errstate(over="ignore"):
            points = x * scale
        points = points[np.isfinite(points)]
        model = onnx_model(fmt, points.shape, np.asarray(scale))
        with np.errstate(over="ignore"):
            q, _ = ReferenceEvaluator(model).run(None, {"x": points})
        codes = quantize(points, scale, fmt, TENSOR)
        np.testing.assert_array_equal(codes, q.view(np.uint8), err_msg=f"scale {scale}")
