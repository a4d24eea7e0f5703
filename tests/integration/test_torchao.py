"""torchao, the real thing, as an oracle: its scales and codes against ours, on the same arrays.

Ours equal torchao's but for what a test names. docs/guides/transformer-engine.md lists it.
"""

import subprocess
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from octet.numerics import formats, scaling
from octet.numerics.bits import bf16_to_float32, float32_to_bf16
from octet.numerics.formats import E2M1, E4M3, E5M2, Format
from octet.numerics.microscaling import combined, global_scale, power_of_two_scales
from tests.generators import format_id, rounding_points

REPOSITORY = Path(__file__).parents[2]
MX, NV = scaling.group(32), scaling.group(16)
MX_FORMATS = {"mxfp8": E4M3, "mxfp4": E2M1}

Arrays: TypeAlias = dict[str, Any]  # of numpy
over_fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=format_id)


def random_rows() -> NDArray[np.float32]:
    """[256, 512] of many sizes: a row of zeros, groups of zeros, a group near the smallest."""
    random = np.random.default_rng(0)
    x = random.standard_normal((256, 512)) * np.exp(random.standard_normal((256, 1)))
    x[3, :64], x[5] = 0, 0
    x[7, 64:96] *= 1e-38
    return x.astype(np.float32)


def every_amax() -> NDArray[np.float32]:
    """[32,512, 32]: groups with every bfloat16 below 2^127 as the largest magnitude."""
    amax = bf16_to_float32(np.arange(0x7F00, dtype=np.uint16))[:, None]
    return (amax * np.linspace(1, -1, 32, dtype=np.float32)).astype(np.float32)


def ties(fmt: Format) -> NDArray[np.float32]:
    """[n, 32]: values of a format, middles between them and both neighbours, under scale 1."""
    points = rounding_points(fmt, np.float32)
    points = points[np.abs(points) <= fmt.max]
    points = np.pad(points, (0, -points.size % 31)).reshape(-1, 31)
    return np.concatenate([np.full((len(points), 1), fmt.max, np.float32), points], 1)


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    just_above = np.nextafter(np.ldexp(np.float32(448), np.arange(-100, 100)), np.float32(np.inf))
    return {
        "random": random_rows(),
        "every amax": every_amax(),
        "just above 448": np.repeat(just_above.astype(np.float32)[:, None], 32, 1),
        "ties of e4m3": ties(E4M3),
        "ties of e2m1": ties(E2M1),
    }


@pytest.fixture(scope="module")
def theirs(modelopt_python: Path, arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What torchao makes of the arrays, by `NAME SCHEME codes` and `NAME SCHEME scales`."""
    if subprocess.run([modelopt_python, "-c", "import torchao"], capture_output=True).returncode:
        pytest.skip("no torchao in the modelopt environment: run `make integration`")
    folder = tmp_path_factory.mktemp("torchao")
    np.savez(folder / "in.npz", **arrays)
    files = [str(folder / "in.npz"), str(folder / "out.npz")]
    command = [str(modelopt_python), "-m", "tests.integration.torchao_peer", *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "out.npz"))


@pytest.mark.parametrize(("name", "mode"), [("mxfp8", "rceil"), ("mxfp4", "even")])
def test_mx_scales_are_torchaos_with_its_mode(
    theirs: Arrays, arrays: Arrays, name: str, mode: str
) -> None:
    """But one ulp above 448·2^e, torchao 0.18's logarithm in float32 misses the step up."""
    for array, x in arrays.items():
        ours = power_of_two_scales(scaling.absmax(x, MX), MX_FORMATS[name])
        expected = theirs[f"{array} {name} {mode} scales"]
        if (array, name) == ("just above 448", "mxfp8"):
            assert np.isin(ours / expected, (1, 2)).all()
            assert (ours != expected).any()
        else:
            np.testing.assert_array_equal(ours, expected, array)


@pytest.mark.parametrize(
    ("name", "mode", "ratio", "above", "to"),
    [
        ("mxfp8", "floor", 0.5, 1.75, 2.0),
        ("mxfp8", "even", 0.5, 1.75, 1.9375),
        ("mxfp8", "ceil", 2.0, 1.0, 1.75),
        ("mxfp4", "floor", 0.5, 1.75, 2.0),
        ("mxfp4", "rceil", 2.0, 1.5, 1.75),
        ("mxfp4", "ceil", 2.0, 1.0, 1.75),
    ],
)
def test_mx_scales_of_other_modes_differ_by_a_power_in_a_known_range(
    theirs: Arrays, arrays: Arrays, name: str, mode: str, ratio: float, above: float, to: float
) -> None:
    """Theirs is `ratio` times ours for a significand of amax between `above` and `to`.

    At half of ours, the largest elements saturate. FLOOR is OCP's rule, and `to_mx`'s default;
    torchao's configurations take RCEIL.
    """
    amax = scaling.absmax(arrays["random"], MX)
    ours = power_of_two_scales(amax, MX_FORMATS[name])
    significand = 2 * np.frexp(amax)[0]
    expected = np.where((significand > above) & (significand < to), ours * ratio, ours)
    normal = ours > 2.0**-127
    np.testing.assert_array_equal(theirs[f"random {name} {mode} scales"][normal], expected[normal])


@pytest.mark.parametrize("name", MX_FORMATS)
@pytest.mark.parametrize("mode", ["rceil", "even", "floor", "ceil"])
def test_mx_codes_are_torchaos_under_the_same_scale(
    theirs: Arrays, arrays: Arrays, name: str, mode: str
) -> None:
    """But under 2^-127: torchao 0.18 divides by more, and smaller codes result."""
    magnitude = 0x7F if name == "mxfp8" else 0x7
    for array, x in arrays.items():
        scale = theirs[f"{array} {name} {mode} scales"]
        ours = scaling.quantize(x, scale, MX_FORMATS[name], MX)
        expected = theirs[f"{array} {name} {mode} codes"]
        same = np.repeat(scale > 2.0**-127, 32, 1)
        np.testing.assert_array_equal(ours[same], expected[same], array)
        assert (expected[~same] & magnitude <= ours[~same] & magnitude).all()


def test_nvfp4_scales_are_torchaos_down_to_its_least(theirs: Arrays, arrays: Arrays) -> None:
    """torchao's group scales end at 2^-6, E4M3's smallest normal; ours go on to 2^-9, and 0.

    torchao divides; vLLM and ours multiply by reciprocals: at a tie, one step lies between them.
    """
    for array, x in arrays.items():
        shared = global_scale(float(np.abs(x).max()), E2M1)
        reciprocals = np.float32(1) / np.float32(6), np.float32(1) / shared
        amax = scaling.absmax(x, NV)
        ours = formats.round_to(amax * reciprocals[0] * reciprocals[1], E4M3)
        expected = theirs[f"{array} nvfp4 scales"]
        divided = formats.round_to(amax / np.float32(6) / shared, E4M3)
        np.testing.assert_array_equal(np.maximum(divided, 2.0**-6), expected, array)
        steps = formats.encode(ours, E4M3) - formats.encode(divided, E4M3).astype(int)
        assert np.abs(steps).max() <= 1, array
        if array == "random":
            assert (steps == 0).all()


def test_nvfp4_codes_are_torchaos_under_the_same_scales(theirs: Arrays, arrays: Arrays) -> None:
    """But within an ulp of a tie: torchao multiplies by a reciprocal, where ours divides."""
    for array, x in arrays.items():
        shared = global_scale(float(np.abs(x).max()), E2M1)
        factor = combined(theirs[f"{array} nvfp4 scales"], shared)
        ours, expected = scaling.quantize(x, factor, E2M1, NV), theirs[f"{array} nvfp4 codes"]
        quotient = np.abs(x / np.repeat(factor, 16, 1)).astype(np.float64)
        middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
        to_tie = np.abs(quotient[..., None] / middles - 1).min(-1)
        assert (to_tie[ours != expected] < 2.0**-22).all(), array
        assert np.abs((ours & 7).astype(int) - (expected & 7)).max() <= 1, array


@over_fp8
@pytest.mark.parametrize("rows", ["tensor", "row"])
def test_fp8_is_torchaos_inference(theirs: Arrays, arrays: Arrays, fmt: Format, rows: str) -> None:
    """To the bit. A row of zeros has scale 0 and NaN there; here 1 and zeros.

    No scale of ours is below 2^-126.
    """
    granularity = scaling.TENSOR if rows == "tensor" else scaling.TOKEN
    for array, x in arrays.items():
        scale = scaling.scale_from_absmax(scaling.absmax(x, granularity), fmt)
        codes = scaling.quantize(x, scale, fmt, granularity)
        their_scale = theirs[f"{array} {fmt.name} {rows} scales"].reshape(-1, 1)
        same = np.broadcast_to(their_scale >= 2.0**-126, (len(x), 1))[:, 0]
        expected = theirs[f"{array} {fmt.name} {rows} codes"]
        np.testing.assert_array_equal(codes[same], expected[same], array)
        ours = np.broadcast_to(scale.reshape(-1, 1), (len(x), 1))[same]
        np.testing.assert_array_equal(ours, np.broadcast_to(their_scale, (len(x), 1))[same], array)
    zeros = theirs[f"random {fmt.name} row codes"][5]
    assert np.isnan(formats.decode(zeros, fmt)).all()


@over_fp8
def test_fp8_scales_of_bfloat16_are_ours_rounded_to_bfloat16(
    theirs: Arrays, arrays: Arrays, fmt: Format
) -> None:
    """Their codes are ours under their scale, which is up to 2^-8 from ours."""
    x = bf16_to_float32(float32_to_bf16(arrays["random"]))
    used = np.abs(x).max(1) > 0  # see above
    scale = theirs[f"random {fmt.name} bfloat16 row scales"].reshape(-1, 1)[used]
    ours = scaling.scale_from_absmax(scaling.absmax(x, scaling.TOKEN), fmt).reshape(-1, 1)[used]
    np.testing.assert_array_equal(bf16_to_float32(float32_to_bf16(ours)), scale)
    assert (ours != scale).any()
    codes = scaling.quantize(x[used], scale, fmt, scaling.TOKEN)
    expected = theirs[f"random {fmt.name} bfloat16 row codes"][used]
    np.testing.assert_array_equal(codes, expected)


@over_fp8
def test_fp8_is_torchaos_training(theirs: Arrays, arrays: Arrays, fmt: Format) -> None:
    """`Float8Linear` multiplies by 448/amax, in float32: the inverse of our scale, to two ulp."""
    for array, x in arrays.items():
        scale = scaling.scale_from_absmax(scaling.absmax(x, scaling.TENSOR), fmt)
        codes = scaling.quantize(x, scale, fmt, scaling.TENSOR)
        factor = np.float64(theirs[f"{array} {fmt.name} trained scales"])
        assert abs(factor * np.float64(scale) - 1) < 2.0**-22, array
        steps = codes.astype(int) - theirs[f"{array} {fmt.name} trained codes"]
        assert np.abs(steps).max() <= 1, array  # at a tie
        assert array == "just above 448" or not steps.any(), array
