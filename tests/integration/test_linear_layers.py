"""Linear layers of Transformer Engine and torchao on a GPU, against ours on the same inputs.

The packages must be in this environment: `pip install torchao 'transformer_engine[pytorch]'`.
Octet's result is that of `calibrate/decoder/rounding.py`: rounded inputs and weights, multiplied in
float64. The layers may differ from it by the order of their sums and by the rounding to bfloat16,
which is little against what quantization costs. torchao's scales are compared as it stores them: it
divides in the dtype of its input, so that scales of bfloat16 values are rounded to bfloat16.
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
    te: Any = pytest.importorskip("transformer_engine.pytorch", reason="no transformer_engine")
    from transformer_engine.common import recipe as recipes

    can, why = getattr(te, available)(return_reason=True)
    if not can:
        pytest.skip(f"{name}: {why}")
    x, weight = tensors
    layer = te.Linear(INTO, OUT, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(weight)
    # The first pass of delayed scaling has scale 1, and the second that of the first.
    for _ in range(2):
        with te.autocast(enabled=True, recipe=getattr(recipes, name)(**options)):
            theirs = layer(x)
    assert_ours(theirs.detach(), x, weight, recipe)


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
