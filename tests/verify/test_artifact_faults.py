"""Faults that an engine would serve without a word: each is found, and named with its tensor.

Hashes are of the damaged files, so that names and numbers alone can tell.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.export.handmade import E4M3_SCHEME, Damage, Tensors, write_handmade
from verify.artifact import verify

LAYER = "model.layers.1"
Q, K, V = (f"{LAYER}.self_attn.{p}_proj" for p in "qkv")
UP, DOWN = f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@dataclass(frozen=True)
class Fault:
    """`damage` to a checkpoint in `form` is reported at `where`, in words that hold `what`."""

    name: str
    form: str
    damage: Damage
    where: str
    what: str


FAULTS: list[Fault] = []


def fault(form: str, where: str, what: str) -> Callable[[Damage], Damage]:
    def add(damage: Damage) -> Damage:
        name = getattr(damage, "__name__", "")
        FAULTS.append(Fault(f"{name}-{form}", form, damage, where, what))
        return damage

    return add


@fault("ct-channel", f"{UP}.weight_scale", "missing: float-quantized channel needs it")
def scale_dropped(tensors: Tensors, _: dict[str, Any]) -> None:
    del tensors[f"{UP}.weight_scale"]


@fault("ct-nvfp4", f"{UP}.input_global_scale", "missing: nvfp4-pack-quantized")
def input_scale_dropped(tensors: Tensors, _: dict[str, Any]) -> None:
    del tensors[f"{UP}.input_global_scale"]


@fault("ct-channel", f"{UP}.scale", "no engine reads it")
@fault("ct-channel", f"{UP}.weight_scale", "missing")
def scale_renamed(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{UP}.scale"] = tensors.pop(f"{UP}.weight_scale")


@fault("fp8-block", f"{UP}.weight_scale", "of model.layers.1.mlp.up_proj it reads weight")
def scale_without_inv(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{UP}.weight_scale"] = tensors.pop(f"{UP}.weight_scale_inv")


@fault("ct-channel", f"{UP}.weight", "its scales divide where they should multiply")
@fault("ct-block", f"{UP}.weight", "its scales divide where they should multiply")
@fault("ct-static", f"{UP}.weight", "its scales divide where they should multiply")
def scale_divides(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{UP}.weight_scale"] = 1 / tensors[f"{UP}.weight_scale"]


@fault("ct-nvfp4", f"{DOWN}.weight_packed", "is written as a multiplier, and should divide")
def global_scale_multiplies(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{DOWN}.weight_global_scale"] = 1 / tensors[f"{DOWN}.weight_global_scale"]


@fault("modelopt-nvfp4", f"{DOWN}.weight", "is written as a divisor, and should multiply")
def global_scale_divides(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{DOWN}.weight_scale_2"] = 1 / tensors[f"{DOWN}.weight_scale_2"]


@fault("ct-channel", f"{DOWN}.weight", "has shape [512, 256], and should be [256, 512]")
def transposed(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].T.contiguous()


@fault("ct-static", f"{Q}.weight", "it is transposed")
def transposed_square(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].T.contiguous()


@fault("ct-channel", f"{K}.weight", f"it holds the weight of {V}")
@fault("ct-nvfp4", f"{V}.weight_packed", f"it holds the weight of {K}")
def projections_swapped(tensors: Tensors, _: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith(f"{K}.")]:
        other = name.replace(K, V)
        tensors[name], tensors[other] = tensors[other], tensors[name]


@fault("ct-channel", f"{UP}.weight", "1 of 131072 codes are not the nearest")
@fault("ct-nvfp4", f"{UP}.weight_packed", "1 of 131072 codes are not the nearest")
@fault("ct-mxfp8", f"{UP}.weight", "the first at [300, ")
def a_byte_flipped(tensors: Tensors, _: dict[str, Any]) -> None:
    weight = tensors.get(f"{UP}.weight_packed", tensors.get(f"{UP}.weight"))
    assert weight is not None
    bits(weight)[300, 17] ^= 1


@fault("ct-nvfp4", f"{UP}.weight_packed", "the two nibbles of each byte are swapped")
@fault("ct-mxfp4", f"{UP}.weight_packed", "the two nibbles of each byte are swapped")
@fault("modelopt-nvfp4", f"{UP}.weight", "the two nibbles of each byte are swapped")
def high_nibble_first(tensors: Tensors, _: dict[str, Any]) -> None:
    name = f"{UP}.weight_packed" if f"{UP}.weight_packed" in tensors else f"{UP}.weight"
    tensors[name] = (tensors[name] >> 4) | (tensors[name] << 4)


@fault("ct-channel", "model.layers.0.self_attn.k_scale", "made for an E5M2 cache")
def e5m2_scales_under_an_e4m3_scheme(tensors: Tensors, config: dict[str, Any]) -> None:
    config["quantization_config"]["kv_cache_scheme"] = E4M3_SCHEME
    for layer in ("model.layers.1", "model.layers.0"):
        for kind in "kv":
            tensors[f"{layer}.self_attn.{kind}_scale"] = torch.ones(1)


@fault("ct-channel", f"{LAYER}.self_attn.v_scale", "missing: config.json declares an E4M3 cache")
def cache_scale_dropped(tensors: Tensors, config: dict[str, Any]) -> None:
    e5m2_scales_under_an_e4m3_scheme(tensors, config)
    for kind in "kv":
        tensors[f"model.layers.0.self_attn.{kind}_scale"] = torch.tensor([0.125])
    del tensors[f"{LAYER}.self_attn.v_scale"]


@fault("ct-channel", f"{LAYER}.self_attn.key_cache_scale", "no engine maps this name")
def cache_scale_renamed(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{LAYER}.self_attn.key_cache_scale"] = torch.ones(1)


@fault("ct-channel", f"{K}.output_scale", "no engine maps this name")
def cache_scale_of_another_dialect(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{K}.output_scale"] = torch.ones(1)


@fault("ct-channel", f"{UP}.weight", "stored as BF16, not quantized, and group group_0 says")
def ignore_lacks_a_module(tensors: Tensors, _: dict[str, Any]) -> None:
    codes = tensors[f"{UP}.weight"].float() * tensors.pop(f"{UP}.weight_scale")
    tensors[f"{UP}.weight"] = codes.bfloat16()


@fault("ct-channel", f"{UP}.weight", "stored as BF16")
@fault("ct-channel", f"{LAYER}.self_attn.o_proj.weight", "stored as BF16")
def silently_bfloat16(tensors: Tensors, _: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        real = tensors[name].float() * tensors[f"{name}_scale"]
        tensors[name] = real.bfloat16()


@fault("ct-channel", UP, "ignore lists it: engines would read its codes as plain weights")
def ignored_and_quantized(_: Tensors, config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"].append(UP)


@fault("ct-channel", "config group group_1", "target 're:.*experts.*' matches no module")
def a_group_without_modules(_: Tensors, config: dict[str, Any]) -> None:
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = groups["group_0"] | {"targets": ["re:.*experts.*"]}


@fault("ct-channel", DOWN, "no config group matches it")
def a_module_without_group(_: Tensors, config: dict[str, Any]) -> None:
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["targets"] = [r"re:.*self_attn.*", r"re:.*gate_proj", r"re:.*up_proj"]


@fault("ct-channel", f"{UP}.weight_scale", "2 of 512 scales are not finite")
def nan_scales(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{UP}.weight_scale"][3:5] = torch.nan


@fault("ct-channel", f"{UP}.weight_scale", "1 of 512 scales are zero")
def zero_scale(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{UP}.weight_scale"][3] = 0


@fault("modelopt-fp8", f"{UP}.input_scale", "1 of 1 scales are negative")
def negative_scale(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{UP}.input_scale"] *= -1


@fault("ct-nvfp4", f"{UP}.weight_packed", "codes are not the nearest")
def a_group_scale_of_zero(tensors: Tensors, _: dict[str, Any]) -> None:
    bits(tensors[f"{UP}.weight_scale"])[7, 3] = 0


@fault("ct-nvfp4", f"{V}.weight_global_scale", "engines fuse them and take the largest for all")
def global_scale_of_its_own(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{V}.weight_global_scale"] *= 2
    tensors[f"{V}.weight_scale"] = (tensors[f"{V}.weight_scale"].float() * 2).to(
        torch.float8_e4m3fn
    )


@fault("ct-mxfp8", f"{UP}.weight", "every scale is 2 times what it should be")
def exponents_off_by_one(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{UP}.weight_scale"] += 1


@fault("ct-channel", f"{UP}.weight", "its scales are those of another tensor")
def scales_of_another_tensor(tensors: Tensors, _: dict[str, Any]) -> None:
    scale = tensors[f"{UP}.weight_scale"]
    tensors[f"{UP}.weight_scale"] = scale * torch.logspace(-3, 3, len(scale))[:, None]


@fault("ct-channel", f"{UP}.weight_scale", "stored as BF16")
def half_a_scale(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].bfloat16()


@fault("ct-channel", "model.embed_tokens.weight", "missing")
def embeddings_dropped(tensors: Tensors, _: dict[str, Any]) -> None:
    del tensors["model.embed_tokens.weight"]


@fault("ct-channel", f"{LAYER}.input_layernorm.weight", "the original is BF16")
def norm_in_another_dtype(tensors: Tensors, _: dict[str, Any]) -> None:
    name = f"{LAYER}.input_layernorm.weight"
    tensors[name] = tensors[name].half()


@fault(
    "ct-channel",
    "config.json",
    "declares no quantization, but 14 linear layers hold codes, such as",
)
@fault(
    "ct-nvfp4", "config.json", "declares no quantization, but 14 linear layers hold codes, such as"
)
def configuration_dropped(_: Tensors, config: dict[str, Any]) -> None:
    del config["quantization_config"]


FIRST = "model.layers.0.self_attn.q_proj"  # all linears are wrong: it stands for them


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]
    return group


def drop(tensors: Tensors, name: str) -> None:
    for tensor in [tensor for tensor in tensors if tensor.endswith(f".{name}")]:
        del tensors[tensor]


@fault("ct-channel", FIRST, "its inputs are not rounded (weight-only), and recipe fp8 has them")
@fault("ct-static", FIRST, "its inputs are not rounded (weight-only), and recipe fp8-static has")
@fault("ct-block", FIRST, "e4m3 by group of 128, float32 scales at run time; so are 13 others")
@fault("ct-nvfp4", FIRST, "its inputs are not rounded (weight-only)")
@fault("ct-mxfp4", FIRST, "its inputs are not rounded (weight-only)")
def weight_only(tensors: Tensors, config: dict[str, Any]) -> None:
    arguments(config)["input_activations"] = None
    drop(tensors, "input_scale")
    drop(tensors, "input_global_scale")


@fault("ct-channel", FIRST, "e4m3 by tensor, float32 scales at run time, and recipe fp8 has e4m3")
def inputs_by_tensor(_: Tensors, config: dict[str, Any]) -> None:
    arguments(config)["input_activations"]["strategy"] = "tensor"


@fault("ct-channel", f"{UP}.input_scale", "missing: float-quantized channel needs it")
def static_inputs(_: Tensors, config: dict[str, Any]) -> None:
    arguments(config)["input_activations"] |= {"strategy": "tensor", "dynamic": False}


@fault("ct-nvfp4", FIRST, "rounded to e4m3 by token, float32 scales at run time, and recipe nvfp4")
def inputs_of_8_bits(tensors: Tensors, config: dict[str, Any]) -> None:
    dynamic = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    arguments(config)["input_activations"] = dynamic


@fault("modelopt-nvfp4", FIRST, "its inputs are not rounded (weight-only), and recipe nvfp4 has")
def the_algorithm_of_weights_alone(tensors: Tensors, config: dict[str, Any]) -> None:
    config["quantization_config"]["quant_algo"] = "W4A16_NVFP4"
    drop(tensors, "input_scale")


@fault("modelopt-channel", FIRST, "recipe fp8-static has e4m3 weights by tensor")
def another_algorithm(_: Tensors, __: dict[str, Any]) -> None:
    """The manifest has another recipe: RECIPES."""


@fault("fp8-static", FIRST, "e4m3 by token, float32 scales at run time, and recipe fp8-static has")
def dynamic_scheme(tensors: Tensors, config: dict[str, Any]) -> None:
    config["quantization_config"]["activation_scheme"] = "dynamic"
    drop(tensors, "input_scale")


@fault("fp8-block", FIRST, "rounded to e4m3 by tensor, float32 scales static, and recipe fp8-block")
def static_scheme(_: Tensors, config: dict[str, Any]) -> None:
    config["quantization_config"]["activation_scheme"] = "static"


@fault("ct-mxfp4", FIRST, "stored as e2m1 by group, e8m0 scales, and recipe nvfp4 has e2m1 weights")
@fault("modelopt-mxfp8", FIRST, "stored as e4m3 by group, e8m0 scales, and recipe fp8 has e4m3")
def another_recipe(_: Tensors, __: dict[str, Any]) -> None:
    """The manifest has another recipe: RECIPES."""


RECIPES = {
    "another_recipe-ct-mxfp4": "nvfp4",
    "another_recipe-modelopt-mxfp8": "fp8",
    "another_algorithm-modelopt-channel": "fp8-static",
}


@fault("ct-channel", "config.json", "rope_theta': 5000.0")
def another_rope(_: Tensors, config: dict[str, Any]) -> None:
    config["rope_parameters"] = config["rope_parameters"] | {"rope_theta": 5000.0}


@fault("ct-channel", "config.json", "rms_norm_eps is None, and 1e-06 in the original")
def a_key_dropped(_: Tensors, config: dict[str, Any]) -> None:
    del config["rms_norm_eps"]


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_a_fault_is_named_with_its_tensor(case: Fault, tiny_model: Path, tmp_path: Path) -> None:
    path = write_handmade(
        tmp_path / "out",
        tiny_model,
        case.form,
        damage=case.damage,
        recipe=RECIPES.get(case.name),
    )
    found = verify(path, model=tiny_model)
    assert found.exit_code == 1
    matching = [problem for problem in found.problems if problem.where == case.where]
    assert any(case.what in problem.what for problem in matching), [*map(str, found.problems)]
    assert len(found.problems) <= 20  # one cause is not told a hundred times
