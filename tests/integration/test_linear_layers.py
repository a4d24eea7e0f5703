"""Linear layers of Transformer Engine and torchao on a GPU, against ours on the same inputs.

The packages must be in this environment: `pip install torchao 'transformer_engine[pytorch]'`.
Octet's result is that of `calibrate/decoder/rounding.py`: rounded inputs and weights, multiplied in
float64. The layers may differ from it by the order of their sums and by the rounding to bfloat16,
which is little against what quantization costs. torchao's scales are compared as it stores them: it
divides in the dtype of its input, so that scales of bfloat16 values are rounded to bfloat16. Of
Transformer Engine, the codes of inputs and weights are compared too.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calibrate.decoder.rounding import fake_quantize, round_to
from calibrate.scales.activations import scale_of
from octet.numerics.formats import E2M1, E4M3
from octet.numerics.microscaling import global_scale
from octet.recipe import PRESETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # of the packages' imports
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU; there: pytest -m gpu tests/integration/test_linear_layers.py",
    ),
]
ROWS, INTO, OUT = 256, 512, 384


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor]:
    """Inputs [256, 512], with a few channels of large values, and a weight [384, 512]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, INTO, generator=generator)
    x[:, ::64] *= 20
    weight = torch.randn(OUT, INTO, generator=generator) / 32
    return x.cuda().bfloat16(), weight.cuda().bfloat16()


def rounded(x: Tensor, recipe: str) -> Tensor:
    """`x` as the activations of a preset; float64."""
    scheme, amax = PRESETS[recipe].activations, float(x.abs().max())
    scale = None if scheme.dynamic else torch.tensor(scale_of(amax, E4M3)).cuda()
    shared = torch.from_numpy(global_scale(amax, E2M1)).cuda() if scheme.two_level else None
    return fake_quantize(x.float(), scheme, scale, shared).double()


def block_scales(x: Tensor, rows: int, power_of_two: bool) -> Tensor:
    """Scales [N/rows, K/128] of blocks of `rows` rows and 128 columns; float32.

    Powers of two are the least that are no less than amax / 448.
    """
    blocks = x.float().abs().reshape(len(x) // rows, rows, x.shape[1] // 128, 128)
    scale = blocks.amax((1, 3)) / blocks.new_full((), E4M3.max)
    if not power_of_two:
        return scale
    fraction, exponent = torch.frexp(scale)  # scale = fraction * 2^exponent, fraction in [0.5, 1)
    exponent = exponent - (fraction == 0.5).int()
    return torch.ldexp(torch.ones_like(scale), exponent)


def rounded_as_torchao(x: Tensor, rows: bool) -> Tensor:
    """`x` in E4M3 under its scale, or a scale for each row, which is in the dtype of `x`."""
    amax = x.abs().amax(1, keepdim=True) if rows else x.abs().max()
    scale = (amax / 448).float()
    return round_to(x.float() / scale, E4M3).double() * scale.double()


def assert_ours(theirs: Tensor, x: Tensor, weight: Tensor, recipe: str) -> None:
    assert_computes(theirs, x, weight, rounded(x, recipe) @ rounded(weight, recipe).T)


def assert_computes(theirs: Tensor, x: Tensor, weight: Tensor, ours: Tensor) -> None:
    exact = x.double() @ weight.double().T
    cost = (ours - exact).norm()
    assert (theirs.double() - ours).norm() < cost / 3
    assert cost > exact.norm() / 100  # there is something to tell apart


def code_steps(layer: Any, index: int, x: Tensor, ours: Tensor, scale: Tensor) -> Tensor:
    """How many codes of E4M3 the layer's `x` is from `ours`, float64 under `scale`; [N, K].

    `index` is 0 for the quantizer of the inputs, 1 for that of the weights.
    """
    quantizer = layer.quantizers["scaling_fwd"][index].copy()
    quantizer.internal = quantizer.optimize_for_gemm = False  # plain layouts
    quantizer.set_usage(rowwise=True, columnwise=False)
    with torch.no_grad():
        held = quantizer(x)
    codes = getattr(held, "_data", None)
    codes = getattr(held, "_rowwise_data", None) if codes is None else codes
    assert codes is not None
    codes = codes.view(torch.uint8).reshape(x.shape)
    mine = (ours / scale.double()).float().to(torch.float8_e4m3fn).view(torch.uint8)
    steps = (codes.int() - mine.int()).abs()
    return torch.where((codes | mine) == 0x80, 0, steps)  # zeros of either sign are equal


def run_layer(te: Any, recipe: Any, x: Tensor, weight: Tensor) -> tuple[Any, Tensor]:
    """Returns a linear layer with that weight, and what its second pass gives."""
    layer = te.Linear(INTO, OUT, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(weight)
    # The first pass of delayed scaling has scale 1, and the second that of the first.
    for _ in range(2):
        with te.autocast(enabled=True, recipe=recipe):
            theirs = layer(x)
    return layer, theirs.detach()


def transformer_engine(available: str) -> tuple[Any, Any]:
    """Returns the library and its recipes; skips where the GPU has not the recipe's arithmetic."""
    te: Any = pytest.importorskip("transformer_engine.pytorch", reason="no transformer_engine")
    from transformer_engine.common import recipe as recipes

    can, why = getattr(te, available)(return_reason=True)
    if not can:
        pytest.skip(f"{why} There: pytest -m gpu tests/integration/test_linear_layers.py")
    return te, recipes


@pytest.mark.parametrize(
    ("name", "options", "available", "recipe"),
    [
        ("DelayedScaling", {}, "is_fp8_available", "fp8-static"),
        ("Float8CurrentScaling", {}, "is_fp8_available", "fp8-static"),
        ("MXFP8BlockScaling", {}, "is_mxfp8_available", "mxfp8"),
        # As served: weights in groups of 16, not in squares.
        ("NVFP4BlockScaling", {"disable_2d_quantization": True}, "is_nvfp4_available", "nvfp4"),
    ],
)
def test_transformer_engines_linear_computes_ours(
    tensors: tuple[Tensor, Tensor], name: str, options: dict[str, Any], available: str, recipe: str
) -> None:
    te, recipes = transformer_engine(available)
    x, weight = tensors
    layer, theirs = run_layer(te, getattr(recipes, name)(**options), x, weight)
    if recipe == "fp8-static":
        for index, tensor in enumerate((x, weight)):
            scale = torch.tensor(scale_of(float(tensor.abs().max()), E4M3)).cuda()
            assert not code_steps(layer, index, tensor, rounded(tensor, recipe), scale).any()
    assert_ours(theirs, x, weight, recipe)


@pytest.mark.parametrize("power_of_two", [False, True], ids=["float32", "powers of two"])
def test_transformer_engines_linear_computes_our_blocks(
    tensors: tuple[Tensor, Tensor], power_of_two: bool
) -> None:
    """fp8-block has its powers of two for weights, and float32 scales for activations."""
    te, recipes = transformer_engine("is_fp8_block_scaling_available")
    recipe = recipes.Float8BlockScaling()
    # `use_f32_scales=True` changes nothing in 2.20: they follow a variable that is read at import.
    parameters = recipes.QParams(power_2_scale=power_of_two, amax_epsilon=0.0)
    recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = parameters
    x, weight = tensors
    layer, theirs = run_layer(te, recipe, x, weight)
    preset, ours = PRESETS["fp8-block"], []
    for index, (tensor, scheme, rows) in enumerate(
        ((x, preset.activations, 1), (weight, preset.weights, 128))
    ):
        scales = block_scales(tensor, rows, power_of_two)
        ours.append(fake_quantize(tensor.float(), scheme, scales).double())
        each = scales.repeat_interleave(rows, 0).repeat_interleave(128, 1)
        steps = code_steps(layer, index, tensor, ours[-1], each)
        # It multiplies by 1 / scale, which is exact for powers of two alone: values in the middle
        # of two codes, 30 of 131,072 here, may get the other one.
        assert int(steps.max()) <= 1
        assert int(steps.sum()) <= (0 if power_of_two else tensor.numel() / 1000)
    assert_computes(theirs, x, weight, ours[0] @ ours[1].T)


@pytest.mark.parametrize("granularity", ["PerTensor", "PerRow"])
def test_torchaos_quantized_linear_computes_ours_under_its_scales(
    tensors: tuple[Tensor, Tensor], granularity: str
) -> None:
    ao: Any = pytest.importorskip("torchao.quantization", reason="no torchao")
    x, weight = tensors
    layer = nn.Linear(INTO, OUT, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.weight = nn.Parameter(weight)
    model = nn.Sequential(layer)
    scales = getattr(ao, granularity)()
    ao.quantize_(model, ao.Float8DynamicActivationFloat8WeightConfig(granularity=scales))
    ours = [rounded_as_torchao(values, granularity == "PerRow") for values in (x, weight)]
    with torch.no_grad():
        assert_computes(model(x), x, weight, ours[0] @ ours[1].T)
