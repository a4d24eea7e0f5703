"""Which decoders are known, what their checkpoints hold, and which variants are refused by name."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from octet.checkpoint import Checkpoint
from octet.errors import CheckpointError, UnsupportedError
from octet.model import ModelSpec
from octet.tensors import Tensor, write_tensors
from tests.models import write_model

# As published, without what no reader of ours asks for.
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN3_30B_A3B, 30_532_122_624),
        (QWEN3_8B, 8_190_735_360),
        (MIXTRAL_8X7B, 46_702_792_704),
    ],
)
def test_the_tensors_of_a_published_model_add_up(config: dict[str, Any], parameters: int) -> None:
    """The sizes that the models' cards give."""
    spec = ModelSpec.from_config(config, "model")
    shapes = list(spec.tensor_shapes())
    assert sum(prod(shape) for _, shape in shapes) == parameters
    assert len(dict(shapes)) == len(shapes)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "mixtral"])
def test_what_transformers_writes_is_what_is_expected(kind: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path, kind))
    expected = dict(checkpoint.spec.tensor_shapes())
    assert {name: checkpoint.read(name).shape for name in checkpoint.tensor_names} == expected


def test_an_expert_is_a_swiglu_with_an_input_of_its_own() -> None:
    linears = {x.name: x for x in ModelSpec.from_config(QWEN3_30B_A3B, "model").linears()}
    expert = "model.layers.7.mlp.experts.127"
    gate, up, down = (linears[f"{expert}.{x}_proj"] for x in ("gate", "up", "down"))
    assert gate.input == up.input == f"{expert}.gate_proj.input"
    assert down.input == f"{expert}.down_proj.input"
    assert (gate.out_features, gate.in_features) == (up.out_features, up.in_features) == (768, 2048)
    assert (down.out_features, down.in_features) == (2048, 768)
    assert not any(name.endswith((".gate", ".router")) for name in linears)


def test_the_linears_are_those_of_each_layer_in_turn() -> None:
    spec = ModelSpec.from_config(QWEN3_30B_A3B | {"mlp_only_layers": [1]}, "model")
    assert list(spec.linears()) == [x for index in range(48) for x in spec.linears(index)]
    assert all(x.name.startswith("model.layers.1.") for x in spec.linears(1))


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, tuple(range(48))),
        ({"decoder_sparse_step": 3}, tuple(range(2, 48, 3))),
        ({"mlp_only_layers": [0, 2]}, (1, *range(3, 48))),
        ({"mlp_only_layers": list(range(48))}, ()),
    ],
)
def test_some_layers_may_be_dense(change: dict[str, Any], sparse: tuple[int, ...]) -> None:
    spec = ModelSpec.from_config(QWEN3_30B_A3B | change, "model")
    assert spec.sparse_layers == sparse
    dense = {x.name: x for x in spec.linears() if x.name.endswith(".mlp.gate_proj")}
    assert set(dense) == {f"model.layers.{i}.mlp.gate_proj" for i in range(48) if i not in sparse}
    assert all(linear.out_features == 6144 for linear in dense.values())


@pytest.mark.parametrize(
    ("config", "expected"), [(QWEN3_8B, 128), (QWEN3_30B_A3B, 64), (MIXTRAL_8X7B, 128)]
)
def test_without_a_head_size_it_is_what_transformers_assumes(
    config: dict[str, Any], expected: int
) -> None:
    """Qwen3's configuration class has a default of 128, the others divide."""
    given = {key: value for key, value in config.items() if key != "head_dim"}
    assert ModelSpec.from_config(given, "model").head_dim == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sliding window": (
        QWEN3_8B | {"use_sliding_window": True, "sliding_window": 4096},
        "sliding_window 4096 is not supported",
    ),
    "sliding layers": (
        QWEN3_8B | {"layer_types": ["full_attention", "sliding_attention"]},
        "layer type 'sliding_attention' is not supported",
    ),
    "layer types no list": (QWEN3_8B | {"layer_types": 3}, "layer type '3'"),
    "bias": (QWEN3_8B | {"attention_bias": True}, "attention_bias is not supported"),
    "other experts": (
        QWEN3_30B_A3B | {"architectures": ["Qwen2MoeForCausalLM"]},
        "architecture Qwen2MoeForCausalLM is not supported; supported: LlamaForCausalLM, "
        "MistralForCausalLM, MixtralForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM",
    ),
    "no experts": (QWEN3_30B_A3B | {"num_experts": 0}, "num_experts is 0, not a count"),
    "experts unsaid": (QWEN3_30B_A3B | {"num_experts": None}, "num_experts is None"),
    "too many chosen": (
        QWEN3_30B_A3B | {"num_experts_per_tok": 129},
        "num_experts_per_tok 129 of 128 experts",
    ),
    "no step": (QWEN3_30B_A3B | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    "dense layers no list": (QWEN3_30B_A3B | {"mlp_only_layers": 1}, "mlp_only_layers is not a"),
    "expert size unsaid": (
        {k: v for k, v in QWEN3_30B_A3B.items() if k != "moe_intermediate_size"},
        "config.json lacks 'moe_intermediate_size'",
    ),
    "no heads": (MIXTRAL_8X7B | {"num_attention_heads": 0}, "head_dim: Input should be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_variant_that_is_not_built_is_refused_by_name(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match="^somewhere: .*" + message) as caught:
        ModelSpec.from_config(config, "somewhere")
    assert "\n" not in str(caught.value)


def test_a_window_that_is_switched_off_is_none() -> None:
    """Qwen3 configurations carry a window beside the switch that disables it."""
    ModelSpec.from_config(QWEN3_8B | {"sliding_window": 4096}, "model")


def test_a_spec_that_was_written_before_experts_were_known_still_loads() -> None:
    config = QWEN3_8B | {"architectures": ["LlamaForCausalLM"]}
    spec = ModelSpec.from_config(config, "model")
    new = {"qk_norm", "experts", "experts_per_token", "moe_intermediate_size", "norm_topk_prob"}
    old = spec.model_dump_json(exclude=new | {"sparse_layers"})
    assert ModelSpec.model_validate_json(old) == spec


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe"), "qwen3_moe")


EXPERT = "model.layers.1.mlp.experts.6.down_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"
NORM = "model.layers.1.self_attn.k_norm.weight"


@pytest.mark.parametrize("name", [EXPERT, ROUTER, NORM, "lm_head.weight"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    name: str, damage: str, moe: Path, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(moe)
    tensors = {each: checkpoint.read(each) for each in checkpoint.tensor_names}
    whole = tensors.pop(name)
    if damage == "short":
        tensors[name] = Tensor(whole.dtype, whole.codes[:-1])
    (tmp_path / "config.json").write_text((moe / "config.json").read_text())
    write_tensors(tmp_path / "model.safetensors", tensors)
    message = f"tensor {name} is missing" if damage == "missing" else f"{name} has shape .* says"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(num_local_experts=4), "experts.4.* is not one that config.json"),
        (lambda c: c.update(num_local_experts=16), r"experts.8.gate_proj.weight is missing"),
        (lambda c: c.update(mlp_only_layers=[1]), "experts.0.* is not one that config.json"),
        (lambda c: c.update(moe_intermediate_size=32), r"has shape \(48, 64\)"),
    ],
)
def test_a_config_that_says_otherwise_than_the_shards(
    change: Callable[[dict[str, Any]], None], message: str, moe: Path, tmp_path: Path
) -> None:
    config = json.loads((moe / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(moe / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)
