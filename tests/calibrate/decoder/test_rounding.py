"""The torch arithmetic of the simulation is numpy's, bit for bit, in every preset."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from calibrate.decoder.rounding import fake_quantize, fake_quantize_learned, round_cache, round_to
from octet.numerics import formats, microscaling, scaling
from octet.numerics.formats import FORMATS, Format
from octet.numerics.scaling import Granularity
from octet.recipe import PRESETS, TensorScheme
from tests.generators import FLOAT8, all_bf16, format_id, rounding_points

SHAPES = [(3, 128), (2, 5, 300), (1, 16), (4, 1)]


def activations(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Magnitudes over 40 octaves, a row of zeros, and a massive element."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(shape) * 2.0 ** generator.integers(-30, 10, shape)
    x = x.astype(np.float32)
    x[0] = 0
    x[-1, ..., 0] = 3e4
    return x


def same_bits(ours: torch.Tensor, theirs: NDArray[Any]) -> None:
    ours_np = ours.numpy()
    assert ours_np.dtype == theirs.dtype
    wrong = np.flatnonzero(ours_np.view(np.uint32) != theirs.view(np.uint32))
    assert not len(wrong), (wrong[:5], ours_np.flat[wrong[:5]], theirs.flat[wrong[:5]])


@pytest.mark.parametrize("fmt", [*FLOAT8, FORMATS["e2m1"]], ids=format_id)
def test_round_to_is_that_of_numpy_on_every_boundary(fmt: Format) -> None:
    bf16 = all_bf16()
    for x in (rounding_points(fmt, np.float32), bf16[~np.isnan(bf16)]):
        same_bits(round_to(torch.from_numpy(x.copy()), fmt), formats.round_to(x, fmt))
    assert round_to(torch.tensor([torch.nan]), fmt).isnan().all()


def run_time_scales(
    x: NDArray[np.float32], scheme: TensorScheme, shared: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """The scales of a dynamic scheme, with vLLM's order of operations."""
    amax = scaling.absmax(x, Granularity.of(scheme.granularity, scheme.group_size))
    fmt = FORMATS[scheme.format]
    if scheme.scale_format == "e8m0":
        return microscaling.power_of_two_scales(amax, fmt)
    if shared is not None:
        sixth = np.float32(1) / np.float32(fmt.max)
        return formats.round_to(np.float32(1) / shared * (amax * sixth), formats.E4M3)
    return scaling.scale_from_absmax(amax, fmt)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_inputs_are_rounded_as_numpy_rounds_them(preset: str, shape: tuple[int, ...]) -> None:
    scheme = PRESETS[preset].activations
    x = activations(shape, seed=0)
    kept = torch.from_numpy(x.copy())
    shared = np.array(2e-3, np.float32) if scheme.two_level else None
    scale = run_time_scales(x, scheme, shared) if scheme.dynamic else np.array(0.037, np.float32)
    theirs = scaling.fake_quantize(
        x,
        microscaling.combined(scale, shared),
        FORMATS[scheme.format],
        Granularity.of(scheme.granularity, scheme.group_size),
    )
    ours = fake_quantize(
        kept,
        scheme,
        None if scheme.dynamic else torch.from_numpy(scale),
        None if shared is None else torch.from_numpy(shared),
    )
    same_bits(ours, theirs)
    assert np.array_equal(kept.numpy(), x), "the input itself is left alone"


def test_two_levels_need_a_global_scale() -> None:
    with pytest.raises(ValueError, match="needs a global scale"):
        fake_quantize(torch.ones(2, 16), PRESETS["nvfp4"].activations)


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
    generator = np.random.default_rng(0)
    spread = np.exp(generator.standard_normal((64, 32, 1))).repeat(16, axis=2).reshape(64, 512)
    x = torch.from_numpy(generator.standard_t(3, (64, 512)) * spread).bfloat16().float()
    shared = microscaling.global_scale(float(x.abs().max()) if amax is None else amax, formats.E2M1)
    theirs, scales = vllm_nvfp4(x, 1 / torch.from_numpy(shared))
    if amax == 1e6:
        assert (scales == 0).any()  # groups that vanish are part of the comparison
    real = fake_quantize(x, PRESETS["nvfp4"].activations, None, torch.from_numpy(shared))
    # Elements may differ in the last place, or by a step within that of a rounding boundary.
    step = (scales * torch.from_numpy(shared)).repeat_interleave(16, 1)
    differ = (real - theirs).abs() > 1e-6 * real.abs()
    assert differ.float().mean() < 1e-3
    assert ((real - theirs).abs()[differ] <= 2.001 * step[differ]).all()


@pytest.mark.parametrize("shape", [(128, 256), (130, 300), (5, 16)])
@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_rounded_as_numpy_rounds_them(preset: str, shape: tuple[int, int]) -> None:
    scheme = PRESETS[preset].weights
    x = activations(shape, seed=1)
    scale = stored_scales(scheme, shape)
    shared = np.asarray(3e-4, np.float32) if scheme.two_level else None
    theirs = scaling.fake_quantize(
        x,
        microscaling.combined(scale, shared),
        FORMATS[scheme.format],
        Granularity.of(scheme.granularity, scheme.group_size),
    )
    ours = fake_quantize(
        torch.from_numpy(x),
        scheme,
        torch.from_numpy(scale),
        None if shared is None else torch.from_numpy(shared),
    )
    same_bits(ours, theirs)


def stored_scales(scheme: TensorScheme, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Any scales that the scheme can store, zeros among two-level ones."""
    granularity = Granularity.of(scheme.granularity, scheme.group_size)
    generator = np.random.default_rng(2)
    drawn = generator.uniform(1e-4, 2, granularity.scale_shape(shape)).astype(np.float32)
    if scheme.scale_format == "e8m0":
        return np.asarray(2.0 ** np.floor(np.log2(drawn)), np.float32)
    return formats.round_to(drawn, formats.E4M3) if scheme.two_level else drawn


@pytest.mark.parametrize("kv_cache", ["e5m2", "e4m3", "float16"])
def test_a_cache_rounds_as_its_format_does(kv_cache: Any) -> None:
    x = activations((2, 3, 5, 64), seed=3)
    scale = np.float32(0.6)
    if kv_cache == "float16":
        theirs = (x / scale).astype(np.float16).astype(np.float32) * scale
    else:
        theirs = scaling.fake_quantize(x, scale, FORMATS[kv_cache], scaling.TENSOR)
    same_bits(round_cache(torch.from_numpy(x), kv_cache, torch.tensor(scale)), theirs)


def test_bfloat16_stays_bfloat16() -> None:
    x = torch.from_numpy(activations((4, 64), seed=4)).bfloat16()
    scheme = PRESETS["fp8"].activations
    rounded = fake_quantize(x, scheme)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, fake_quantize(x.float(), scheme).bfloat16())


@pytest.mark.parametrize(("written", "read"), [("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_bytes_of_one_format_are_read_as_the_other(written: Any, read: str) -> None:
    """E4M3 of 384 and more is no finite number of E5M2."""
    x = activations((64, 128), seed=1)
    scale = np.asarray(2.0**-3, np.float32)
    ours = round_cache(torch.from_numpy(x), written, torch.from_numpy(scale), reread=True)
    codes = formats.encode(x / scale, FORMATS[written])
    theirs = formats.decode(codes, FORMATS[read]) * scale
    np.testing.assert_array_equal(ours.numpy(), theirs)
    assert np.isnan(theirs).any() == (written == "e4m3")


@pytest.mark.parametrize("name", ["fp8", "fp8-static", "fp8-block", "nvfp4"])
def test_a_scale_has_the_gradient_of_learned_step_sizes(name: str) -> None:
    """A value's derivative by its scale is code - x / scale, and that code where it saturates."""
    scheme, shape = PRESETS[name].weights, (130, 300)
    granularity = Granularity.of(scheme.granularity, scheme.group_size)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, requires_grad=True)
    drawn = 0.5 + torch.rand(granularity.scale_shape(shape), generator=generator)
    second = torch.tensor(0.75) if scheme.two_level else None
    most = FORMATS[scheme.format].max
    scale = (drawn * (2.5 / most)).requires_grad_()  # some values saturate
    weights = torch.randn(shape, generator=generator)
    rounded = fake_quantize_learned(x, scheme, scale, second)
    plain = fake_quantize(x.detach(), scheme, scale.detach(), second)
    assert torch.equal(rounded.detach(), plain)
    torch.autograd.backward((rounded * weights).sum())
    assert x.grad is not None and torch.equal(x.grad, weights)

    copy = scale.detach().clone().requires_grad_()
    each = by_element(copy, granularity, shape)
    real = each.detach() * (1.0 if second is None else second)
    saturated = x.detach().abs() > most * real
    assert saturated.any() and not saturated.all()
    error = plain - torch.where(saturated, 0.0, x.detach())
    torch.autograd.backward((each * (error / each.detach()) * weights).sum())
    assert scale.grad is not None and copy.grad is not None
    torch.testing.assert_close(scale.grad, copy.grad, rtol=1e-4, atol=1e-3)


def by_element(scale: torch.Tensor, granularity: Granularity, shape: tuple[int, int]) -> Any:
    """Returns the scale of each element; sums a gradient over tiles."""
    if granularity.columns is None:
        return scale.expand(shape)
    assert granularity.rows is not None
    rows, columns = (torch.arange(length) for length in shape)
    return scale[rows[:, None] // granularity.rows, columns // granularity.columns]


@pytest.mark.parametrize("name", ["fp8", "fp8-static", "nvfp4", "mxfp4"])
def test_gradients_pass_straight_through(name: str) -> None:
    """With a gradient the values are the same to the bit."""
    scheme = PRESETS[name].activations
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    scale = torch.tensor(0.01) if name == "fp8-static" else None
    second = torch.tensor(0.001) if name == "nvfp4" else None
    rounded = fake_quantize(x, scheme, scale, second)
    assert torch.equal(rounded.detach(), fake_quantize(x.detach(), scheme, scale, second))
    torch.autograd.backward((rounded * torch.arange(64)).sum())
    assert x.grad is not None and torch.equal(x.grad, torch.arange(64.0).expand(5, 64))
    kept = round_cache(x, "e5m2", torch.tensor(0.5))
    assert torch.equal(kept.detach(), round_cache(x.detach(), "e5m2", torch.tensor(0.5)))
    assert kept.requires_grad
