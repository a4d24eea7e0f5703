"""On a GPU the simulation rounds to the very same bits, and costs what it costs on a CPU."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calibrate.decoder.arithmetic import fast_matmuls
from calibrate.decoder.rounding import fake_quantize, round_cache
from calibrate.quality.divergence import Divergence, Reference
from calibrate.samples.batches import make_batches
from calibrate.simulate.model import LayerSimulator, replace_weights, simulate
from calibrate.simulate.scales import DeviceScales
from octet.model.spec import ModelSpec
from octet.recipe import PRESETS
from tests.calibrate.decoder.test_rounding import activations, stored_scales

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU; there:"
        " pytest -m gpu tests/calibrate/simulate/test_model_cuda.py",
    ),
]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.equal(ours.cpu().view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("preset", PRESETS)
def test_rounding_is_that_of_the_cpu(preset: str) -> None:
    recipe = PRESETS[preset]
    x = torch.from_numpy(activations((130, 384), seed=5))
    stored = torch.from_numpy(stored_scales(recipe.weights, (130, 384)))
    shared = torch.tensor(3e-4) if recipe.weights.two_level else None
    there = None if shared is None else shared.cuda()
    same_bits(
        fake_quantize(x.cuda(), recipe.weights, stored.cuda(), there),
        fake_quantize(x, recipe.weights, stored, shared),
    )
    static = None if recipe.activations.dynamic else torch.tensor(0.037)
    same_bits(
        fake_quantize(
            x.cuda(), recipe.activations, None if static is None else static.cuda(), there
        ),
        fake_quantize(x, recipe.activations, static, shared),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["fp8", "fp8-static"])
def test_long_rows_are_those_of_the_cpu(preset: str, dtype: torch.dtype) -> None:
    """Longer than what a program rounds at a time, with NaN and Inf."""
    scheme = PRESETS[preset].activations
    x = torch.from_numpy(activations((9, 5000), seed=7)).to(dtype)
    x[3, 17], x[4, 4999] = torch.nan, torch.inf
    scale = None if scheme.dynamic else torch.tensor(0.037)
    ours = fake_quantize(x.cuda(), scheme, None if scale is None else scale.cuda()).cpu()
    theirs = fake_quantize(x, scheme, scale)
    assert ours.dtype == dtype and bool(theirs.isnan().any())
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("kv_cache", ["e5m2", "e4m3", "float16"])
def test_the_cache_is_that_of_the_cpu(kv_cache: str) -> None:
    x, scale = torch.from_numpy(activations((2, 3, 40, 64), seed=6)), torch.tensor(0.6)
    same_bits(round_cache(x.cuda(), kv_cache, scale.cuda()), round_cache(x, kv_cache, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_costs_what_it_costs_on_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        max_position_embeddings=256,
        initializer_range=0.06,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).eval()
    spec = ModelSpec.from_config(config.to_dict(), "here")
    rows = torch.randint(2048, (8, 64)).tolist()
    batches = make_batches(rows, ["here"] * 8, batch_size=4)
    recipe = PRESETS["fp8"]
    scales = {
        f"{linear.name}.weight_scale": (
            model.get_submodule(linear.name).weight.detach().abs().amax(1, keepdim=True) / 448
        ).numpy()
        for linear in spec.linears()
    }
    for index in range(spec.layers):
        for kind in ("k_scale", "v_scale"):
            scales[f"{spec.layer(index)}.self_attn.{kind}"] = torch.tensor(1.0).numpy()

    def cost() -> Divergence:
        reference = Reference(model, spec, batches)
        assert reference.compare().kl == 0
        with simulate(model, spec, recipe, scales):
            return reference.compare()

    expected = cost()
    model.to(device="cuda", dtype=dtype)
    measured = cost()
    assert abs(measured.kl / expected.kl - 1) < (0.03 if dtype == torch.float32 else 0.3)


@pytest.mark.parametrize(
    ("preset", "powers"), [*((preset, False) for preset in PRESETS), ("fp8-block", True)]
)
def test_codes_are_multiplied_as_exactly_as_weights(preset: str, powers: bool) -> None:
    """Codes are BF16 values times a scale, but for blocks whose scales are not powers of two."""
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    spec = ModelSpec.from_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, "here")
    layer = fast_matmuls(LlamaForCausalLM(config)).eval().model.layers[0].cuda()
    name, down = "model.layers.0.mlp.down_proj", layer.mlp.down_proj
    scheme = PRESETS[preset].weights
    drawn = stored_scales(scheme, (256, 512))
    scales = {f"{name}.weight_scale": np.exp2(np.floor(np.log2(drawn))) if powers else drawn}
    if scheme.two_level:
        scales[f"{name}.weight_global_scale"] = torch.tensor(3e-4).numpy()
    served = LayerSimulator(
        spec,
        {name: (scheme, PRESETS[preset].activations)},
        DeviceScales(scales, torch.device("cuda")),
    )
    before, x = down.weight, torch.randn(2000, 512, device="cuda")
    with torch.inference_mode():
        weights = served.weights(layer, 0, [name])
        exact = x.double() @ weights[name].double().T
        with replace_weights(layer, "model.layers.0", spec, weights, served.factors(weights)):
            found = down(x)
            factors = scheme.granularity == "block" and not powers
            assert down.weight.dtype == (torch.float32 if factors else torch.bfloat16)
    assert down.weight is before and down.scale is None
    size = x.double().abs() @ weights[name].double().abs().T  # 0 for a row of small weights
    assert bool(((found.double() - exact).abs() <= 2.0**-21 * size).all())
