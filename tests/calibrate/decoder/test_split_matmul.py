"""Float32 on BF16 tensor cores is as exact as float32."""

import pytest
import torch

from calibrate.decoder.arithmetic import linear
from calibrate.decoder.split_matmul import split, split_linear

GPU = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs an NVIDIA GPU; there: pytest -m gpu tests/calibrate/decoder/test_split_matmul.py",
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[GPU, pytest.mark.gpu])])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_three_parts_are_the_whole_value(device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, device=device) * 2.0 ** torch.randint(-100, 100, (1000,), device=device)
    first, second, third = (part.double() for part in split(x))
    assert torch.equal(first + second + third, x.double())


def worst(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Returns the largest error of a product, as a share of Σ|x·w|."""
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    return float(((found.double() - exact).abs() / size).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 1500])
@pytest.mark.parametrize("terms", [96, 4096, 5000])
def test_errors_are_those_of_float32(
    device: str, dtype: torch.dtype, rows: int, terms: int
) -> None:
    torch.manual_seed(1)
    x = torch.randn(rows, terms, device=device)
    weight = torch.randn(64, terms, device=device).to(dtype)
    with torch.inference_mode():
        found = split_linear(x, weight)
    assert found.dtype == torch.float32
    assert worst(found, x, weight) < 2.0**-21  # float32's own rounding is 2^-24; BF16's 2^-9


def test_shapes_and_bias(device: str) -> None:
    torch.manual_seed(2)
    x, bias = torch.randn(2, 3, 40, device=device), torch.randn(8, device=device)
    weight = torch.randn(8, 40, device=device).bfloat16()
    found = split_linear(x, weight, bias)
    torch.testing.assert_close(found, x @ weight.float().T + bias, rtol=1e-5, atol=1e-5)
    assert split_linear(x[:0], weight, bias).shape == (0, 3, 8)


@GPU
@pytest.mark.gpu
def test_a_gpu_multiplies_a_bf16_weight_as_it_is() -> None:
    x, weight = torch.randn(4, 64, device="cuda"), torch.randn(8, 64, device="cuda").bfloat16()
    with torch.inference_mode():
        assert torch.equal(linear(x, weight), split_linear(x, weight))
