"""The compiled encoders equal `octet.numerics.scaling` to the bit, on every possible weight."""

import numpy as np
import pytest

from export import codes
from octet.errors import NumericsError
from octet.numerics import formats, microscaling, scaling
from octet.numerics.bits import pack_e2m1
from octet.recipe import PRESETS, TensorScheme
from octet.storage.tensors import Tensor

SCHEMES = {name: recipe.weights for name, recipe in PRESETS.items()}


def every_bf16() -> np.ndarray:
    """Every finite bfloat16, as codes uint16 [510, 128]."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    return patterns[(patterns & 0x7F80) != 0x7F80].reshape(-1, 128)


def scales_of(
    weight: np.ndarray, scheme: TensorScheme, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray | None]:
    """Random scales such that elements overflow, underflow and lie between."""
    granularity = scaling.Granularity.of(scheme.granularity, scheme.group_size)
    shape = granularity.scale_shape(weight.shape)
    exponents = rng.uniform(-60, 60, shape)
    if scheme.scale_format == "e8m0":
        return np.exp2(np.round(exponents)).astype(np.float32), None
    if scheme.two_level:
        scale = formats.round_to(rng.uniform(0, 448, shape).astype(np.float32), formats.E4M3)
        scale.flat[0] = 0.0  # a group that is lost
        return scale, np.float32(2.0 ** rng.uniform(-40, 40))
    return np.exp2(exponents).astype(np.float32), None


def expected(
    weight: Tensor, scale: np.ndarray, shared: np.ndarray | None, scheme: TensorScheme
) -> np.ndarray:
    fmt = formats.format_named(scheme.format)
    granularity = scaling.Granularity.of(scheme.granularity, scheme.group_size)
    factor = microscaling.combined(scale, shared)
    found = scaling.quantize(weight.float32(), factor, fmt, granularity)
    return found if fmt.bits == 8 else pack_e2m1(found)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_bfloat16_is_encoded_as_by_octet_scaling(name: str) -> None:
    rng = np.random.default_rng(0)
    scheme = SCHEMES[name]
    for _ in range(20):
        weight = Tensor("BF16", rng.permuted(every_bf16().reshape(-1)).reshape(-1, 128))
        scale, shared = scales_of(weight.codes, scheme, rng)
        found = codes.weight_codes(weight, scale, shared, scheme)
        assert np.array_equal(found, expected(weight, scale, shared, scheme))


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_numbers_at_and_beside_every_boundary_round_to_even(fmt: str) -> None:
    grid = formats.grid(formats.format_named(fmt))
    middles = (grid[:-1] + grid[1:]) / 2
    edges = np.concatenate([grid, middles, [grid[-1] * 1.0714, grid[-1] * 1e30]]).astype(np.float32)
    around = [edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(0))]
    flat = np.concatenate([*around, *(-part for part in around)])
    weight = Tensor.of(np.resize(flat, (len(flat) // 2 + 1, 2)))
    scheme = SCHEMES["fp8"].model_copy(update={"format": fmt})
    scale = np.ones((len(weight.codes), 1), np.float32)
    found = codes.weight_codes(weight, scale, None, scheme)
    assert np.array_equal(found, expected(weight, scale, None, scheme))


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64"])
@pytest.mark.parametrize("name", SCHEMES)
def test_other_dtypes_and_uneven_shapes(name: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((130, 200)) * 0.02
    container = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
    weight = Tensor(dtype, values.astype(container))
    scale, shared = scales_of(values, SCHEMES[name], rng)
    found = codes.weight_codes(weight, scale, shared, SCHEMES[name])
    assert np.array_equal(found, expected(weight, scale, shared, SCHEMES[name]))


@pytest.mark.parametrize(
    ("bad", "said"), [(0x7FC0, "1 NaN and 0 Inf"), (0xFF80, "0 NaN and 1 Inf")]
)
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_a_weight_that_is_not_finite_is_named(name: str, bad: int, said: str) -> None:
    weight = Tensor("BF16", every_bf16())
    weight.codes[3, 5] = bad
    scale, shared = scales_of(weight.codes, SCHEMES[name], np.random.default_rng(2))
    with pytest.raises(NumericsError, match=f"'a.weight' holds {said}"):
        codes.weight_codes(weight, scale, shared, SCHEMES[name], name="a.weight")


def test_a_scale_that_is_not_positive_is_named() -> None:
    weight = Tensor("BF16", every_bf16())
    scale = np.zeros((len(weight.codes), 1), np.float32)
    with pytest.raises(NumericsError, match=r"'a\.weight' has a scale that is not positive"):
        codes.weight_codes(weight, scale, None, SCHEMES["fp8"], name="a.weight")


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_without_numba_the_codes_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Tensor("BF16", every_bf16())
    scale, shared = scales_of(weight.codes, SCHEMES[name], np.random.default_rng(3))
    compiled = codes.weight_codes(weight, scale, shared, SCHEMES[name])
    monkeypatch.setattr(codes, "_kernel", lambda fmt: None)
    assert np.array_equal(codes.weight_codes(weight, scale, shared, SCHEMES[name]), compiled)
