"""Tests which decoders are known, what their checkpoints hold, and which variants are refused."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from octet.errors import UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ARCHITECTURES, ModelSpec, RopeScaling
from tests.models import GPT_OSS, KNOWN, write_model
from tests.octet.published import (
    GEMMA_2B,
    LLAMA31_8B,
    MISTRAL_7B_V01,
    MIXTRAL_8X7B,
    PHI3_MINI_4K,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN25_7B,
)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN3_30B_A3B, 30_532_122_624),
        (LLAMA31_8B, 8_030_261_248),
        (MISTRAL_7B_V01, 7_241_732_096),
        (QWEN25_7B, 7_615_616_512),
        (GEMMA_2B, 2_506_172_416),
        (PHI3_MINI_4K, 3_821_079_552),
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


@pytest.mark.parametrize("name", KNOWN | GPT_OSS)
def test_what_transformers_writes_is_what_is_expected(name: str, tmp_path: Path) -> None:
    kind, settings = (KNOWN | GPT_OSS)[name]
    checkpoint = Checkpoint.open(write_model(tmp_path, kind, **settings))
    expected = dict(checkpoint.spec.tensor_shapes())
    assert {name: checkpoint.read(name).shape for name in checkpoint.tensor_names} == expected
    assert checkpoint.warnings == () and not checkpoint.spec.generic


_TYPES = dict(
    zip(
        ARCHITECTURES,
        ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "phi3", "gpt_oss"),
        strict=True,
    )
)
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "vocab_size": 64000,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "moe_intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("architecture", "given"),
    [
        *((architecture, {}) for architecture in ARCHITECTURES),
        *((architecture, {"use_sliding_window": True}) for architecture in ARCHITECTURES),
        ("LlamaForCausalLM", {"num_key_value_heads": None, "head_dim": None}),
        ("Qwen2ForCausalLM", {"num_key_value_heads": None}),
        ("Qwen3ForCausalLM", {"num_key_value_heads": None}),
        ("Phi3ForCausalLM", {"num_key_value_heads": None, "sliding_window": None}),
        ("MistralForCausalLM", {"sliding_window": None, "eos_token_id": None}),
    ],
)
def test_a_key_that_is_absent_is_what_transformers_assumes(
    architecture: str, given: dict[str, Any]
) -> None:
    """A config.json of the sizes alone, and the whole one that transformers makes of it."""
    few = {"architectures": [architecture], **_SIZES, **given}
    config = AutoConfig.for_model(_TYPES[architecture], **few)
    whole = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    assert ModelSpec.from_config(few, "few") == ModelSpec.from_config(whole, "whole")


def test_fused_projections_are_linears_of_their_own() -> None:
    spec = ModelSpec.from_config(PHI3_MINI_4K, "model")
    found = {x.name: (x.out_features, x.in_features, x.input) for x in spec.linears(5)}
    layer = "model.layers.5"
    assert found == {
        f"{layer}.self_attn.qkv_proj": (9216, 3072, f"{layer}.self_attn.qkv_proj.input"),
        f"{layer}.self_attn.o_proj": (3072, 3072, f"{layer}.self_attn.o_proj.input"),
        f"{layer}.mlp.gate_up_proj": (16384, 3072, f"{layer}.mlp.gate_up_proj.input"),
        f"{layer}.mlp.down_proj": (3072, 8192, f"{layer}.mlp.down_proj.input"),
    }


def spec_of(config: dict[str, Any], **change: Any) -> ModelSpec:
    return ModelSpec.from_config(config | change, "model")


def test_biases_are_where_the_architecture_has_them() -> None:
    def biases(spec: ModelSpec) -> tuple[bool, bool, bool]:
        return spec.qkv_bias, spec.o_bias, spec.mlp_bias

    assert biases(spec_of(LLAMA31_8B)) == (False, False, False)
    assert biases(spec_of(LLAMA31_8B, attention_bias=True)) == (True, True, False)
    assert biases(spec_of(LLAMA31_8B, mlp_bias=True)) == (False, False, True)
    assert biases(spec_of(QWEN25_7B)) == (True, False, False)
    assert biases(spec_of(QWEN3_8B, attention_bias=True)) == (True, True, False)
    assert biases(spec_of(GEMMA_2B, attention_bias=True)) == (True, True, False)
    for config in (PHI3_MINI_4K, MISTRAL_7B_V01, MIXTRAL_8X7B):  # which read no such key
        assert biases(spec_of(config, attention_bias=True, mlp_bias=True)) == (False,) * 3
    shapes = dict(spec_of(LLAMA31_8B, attention_bias=True, mlp_bias=True).tensor_shapes())
    biased = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.3.")}
    assert {x.split("3.")[1]: shape for x, shape in biased.items() if x.endswith(".bias")} == {
        "self_attn.q_proj.bias": (4096,),
        "self_attn.k_proj.bias": (1024,),
        "self_attn.v_proj.bias": (1024,),
        "self_attn.o_proj.bias": (4096,),
        "mlp.gate_proj.bias": (14336,),
        "mlp.up_proj.bias": (14336,),
        "mlp.down_proj.bias": (4096,),
    }


@pytest.mark.parametrize(
    ("config", "change", "layers"),
    [
        (MISTRAL_7B_V01, {}, range(32)),
        (MISTRAL_7B_V01, {"sliding_window": None}, ()),
        (MISTRAL_7B_V01, {"sliding_window": 32768}, ()),  # no position is further away
        (PHI3_MINI_4K, {}, range(32)),
        (QWEN25_7B, {}, ()),
        (QWEN25_7B, {"use_sliding_window": True}, ()),  # as large as the positions
        (
            QWEN25_7B,
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20},
            range(20, 28),
        ),
        (
            QWEN3_8B,
            {
                "use_sliding_window": True,
                "sliding_window": 4096,
                "layer_types": ["sliding_attention", "full_attention"] * 18,
            },
            range(0, 36, 2),
        ),
        (QWEN3_30B_A3B, {"use_sliding_window": True, "sliding_window": 4096}, range(48)),
    ],
)
def test_a_window_is_of_the_layers_that_have_it(
    config: dict[str, Any], change: dict[str, Any], layers: Any
) -> None:
    spec = spec_of(config, **change)
    assert spec.sliding_layers == tuple(layers)
    assert spec.sliding_window == ((config | change)["sliding_window"] if layers else None)


def test_gemma_says_gelu_and_means_its_tanh_form() -> None:
    spec = spec_of(GEMMA_2B)
    assert (spec.activation, spec.norm_offset, spec.tied_embeddings) == ("gelu_tanh", 1.0, True)
    assert spec.embedding_scale == 2048**0.5 and spec.undescribed == ()
    assert spec_of(GEMMA_2B, hidden_activation="gelu_pytorch_tanh") == spec
    assert spec_of(GEMMA_2B, hidden_activation="gelu").undescribed == ("hidden_activation 'gelu'",)


def test_rope_is_read_in_both_spellings() -> None:
    scaling = RopeScaling(
        type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )
    assert spec_of(LLAMA31_8B).rope_scaling == scaling
    new = LLAMA31_8B["rope_scaling"] | {"rope_theta": 500000.0}
    left = {k: v for k, v in LLAMA31_8B.items() if k not in ("rope_scaling", "rope_theta")}
    assert spec_of(left, rope_parameters=new) == spec_of(LLAMA31_8B)
    linear = spec_of(LLAMA31_8B, rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.rope_scaling == RopeScaling(type="linear", factor=2.0)
    assert spec_of(PHI3_MINI_4K, partial_rotary_factor=0.75).rotary_dim == 72
    assert spec_of(PHI3_MINI_4K).rotary_dim == 96


@pytest.mark.parametrize(
    ("config", "change", "told"),
    [
        (QWEN25_7B, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        (PHI3_MINI_4K, {"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        (LLAMA31_8B, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA31_8B, {"sliding_window": 4096}, "sliding_window 4096"),
        (LLAMA31_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (QWEN3_8B, {"layer_types": ["chunked_attention"] * 36}, "layer type 'chunked_attention'"),
    ],
)
def test_what_no_field_describes_is_told_and_refused_by_nobody_here(
    config: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    """transformers computes it in a calibration, and a checkpoint keeps its config.json."""
    assert spec_of(config, **change).undescribed == (told,)


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
    "sliding layers without a window": (
        QWEN3_8B | {"layer_types": ["sliding_attention"] * 36},
        "layer_types names sliding_attention, and no window is set",
    ),
    "too few layer types": (
        QWEN3_8B | {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types names 2 of 36 layers",
    ),
    "layer types no list": (QWEN3_8B | {"layer_types": 3}, "layer_types or num_hidden"),
    "window no number": (QWEN3_8B | {"sliding_window": "4k"}, "sliding_window is no integer"),
    "no decoder": (
        QWEN3_30B_A3B | {"architectures": ["BertModel"]},
        "architecture BertModel is not supported; supported: LlamaForCausalLM, MistralForCausalLM,"
        " MixtralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM,"
        " GemmaForCausalLM, Phi3ForCausalLM, GptOssForCausalLM, and others named ...ForCausalLM by"
        " their tensors",
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
    "no heads": (MIXTRAL_8X7B | {"num_attention_heads": 0}, "heads: Input should be"),
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
