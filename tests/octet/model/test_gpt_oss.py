"""gpt-oss as OpenAI publishes it: experts in MXFP4, stacked in one tensor of each layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.decoder.loading import load_model
from calibrate.golden import golden_set
from octet.errors import OctetError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.storage.tensors import Tensor
from tests.command import octet
from tests.models import Tensors, rewrite_model, write_model
from tests.mxfp4 import MXFP4, pack_experts, unpacked
from verify.reader.checkpoint import Written

EXPERTS = "model.layers.1.mlp.experts"
IDS = torch.tensor([[5, 99, 7, 1200, 31, 8, 4095, 640, 12] * 5])  # longer than the window


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in BF16, with experts that MXFP4 does not hold."""
    return write_model(tmp_path_factory.mktemp("gpt-oss") / "model", "gpt_oss")


@pytest.fixture(scope="module")
def packed(model: Path) -> Path:
    return pack_experts(model, model.with_name("packed"))


@pytest.fixture(scope="module")
def decoded(packed: Path) -> Path:
    return unpacked(packed, packed.with_name("decoded"))


@pytest.fixture(scope="module")
def logits(decoded: Path) -> torch.Tensor:
    """What transformers computes of its own decoded model, in float32."""
    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    with torch.inference_mode():
        found: torch.Tensor = model(IDS, use_cache=False).logits[0]
    return found


def test_mxfp4_is_decoded_as_transformers_does_to_the_bit(packed: Path, decoded: Path) -> None:
    ours, theirs = Checkpoint.open(packed), Checkpoint.open(decoded)
    assert set(ours.tensor_names) == set(theirs.tensor_names) and ours.warnings == ()
    assert "quantization_config" not in ours.config
    for name in theirs.tensor_names:
        assert (ours.dtype(name), ours.shape(name)) == (theirs.dtype(name), theirs.shape(name))
        np.testing.assert_array_equal(ours.read(name).codes, theirs.read(name).codes, name)
        buffer = memoryview(bytearray(ours.nbytes(name)))
        ours.read_into(name, buffer)
        assert bytes(buffer) == theirs.read(name).codes.tobytes()


def test_the_reader_of_verify_decodes_the_same(packed: Path, decoded: Path) -> None:
    written, theirs = Written.open(packed), Checkpoint.open(decoded)
    experts = [x for x in theirs.spec.linear_names if ".experts." in x]
    assert len(experts) == 2 * 8 * 2
    for name in experts:
        found = written.dequantized(name)
        assert found is not None
        np.testing.assert_array_equal(found, theirs.read(f"{name}.weight").float32(), name)
    assert written.dequantized("model.layers.0.self_attn.q_proj") is None


@pytest.mark.parametrize("form", ["packed", "decoded"])
def test_logits_are_those_of_transformers(
    form: str, logits: torch.Tensor, packed: Path, decoded: Path
) -> None:
    checkpoint = Checkpoint.open({"packed": packed, "decoded": decoded}[form])
    with torch.inference_mode():
        whole = load_model(checkpoint, "float32")(IDS, use_cache=False).logits[0]
    torch.testing.assert_close(whole, logits, atol=1e-4, rtol=0)
    (record,) = golden_set(checkpoint, [("", IDS[0].tolist())]).records
    top = logits[-1].double().log_softmax(-1).topk(20)
    assert record.tops[0].token_ids == tuple(top.indices.tolist())
    np.testing.assert_allclose(record.tops[0].logprobs, top.values.numpy(), atol=1e-4)


def test_a_published_config_is_described() -> None:
    spec = ModelSpec.from_config(GPT_OSS_20B, "model")
    assert sum(int(np.prod(shape)) for _, shape in spec.tensor_shapes()) == 20_914_757_184
    assert spec.sliding_layers == tuple(range(0, 24, 2)) and spec.sliding_window == 128
    assert spec.rope_scaling is not None
    assert (spec.rope_scaling.type, spec.rope_scaling.truncate) == ("yarn", False)
    assert (spec.swiglu_alpha, spec.swiglu_limit, spec.attention_sinks) == (1.702, 7.0, True)
    short = {key: x for key, x in GPT_OSS_20B.items() if key not in ("rope_scaling", "layer_types")}
    assert ModelSpec.from_config(short, "model") == spec  # what transformers takes by default


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            ("calibrate", "--samples", "x.jsonl", "-o", "out"),
            "Octet does not quantize GptOssForCausalLM",
        ),
        (
            ("plan", "--gpu", "h100", "--context", "1k", "--concurrency", "1"),
            "Octet does not quantize GptOssForCausalLM",
        ),
        (("serve",), "Octet does not quantize GptOssForCausalLM"),
        (("doctor",), "which engines run gpt-oss's MXFP4 on which GPU is not in Octet's table"),
    ],
)
def test_what_needs_a_recipe_refuses_it_and_names_what_works(
    command: tuple[str, ...],
    line: str,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = octet(command[0], packed, *command[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {packed}: {line}") and done.stderr.count("\n") == 1
    assert "`octet golden`" in done.stderr and not list(tmp_path.iterdir())


def renamed(before: str, after: str) -> Callable[[Tensors], Tensors]:
    return lambda x: {name.replace(before, after): tensor for name, tensor in x.items()}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda x: {key: tensor for key, tensor in x.items() if key != name}


def with_codes(
    name: str, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
) -> Callable[[Tensors], Tensors]:
    return lambda x: x | {name: Tensor(x[name].dtype, np.ascontiguousarray(change(x[name].codes)))}


BLOCKS, SCALES = f"{EXPERTS}.gate_up_proj_blocks", f"{EXPERTS}.down_proj_scales"
# What is wrong -> the change of tensors, keys of config.json, and a part of the line.
BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], str]] = {
    "no scales": (without(SCALES), {}, f"tensor {SCALES} is missing"),
    "an unknown name": (
        renamed(SCALES, f"{EXPERTS}.down_proj_zeros"),
        {},
        f"tensor {EXPERTS}.down_proj_zeros is unknown in a GptOssForCausalLM",
    ),
    "codes in rows": (
        with_codes(BLOCKS, lambda x: x.reshape(*x.shape[:2], -1)),
        {},
        f"{BLOCKS} has shape [8, 192, 32], config.json says [8, 192, 2, 16]",
    ),
    "an expert too few": (
        with_codes(SCALES, lambda x: x[:7]),
        {},
        f"{SCALES} has shape [7, 64, 3]",
    ),
    "scales of another dtype": (
        lambda x: x | {SCALES: Tensor("F16", x[SCALES].codes.astype(np.float16))},
        {},
        f"{SCALES} is stored as F16; Octet reads U8",
    ),
    "codes that config.json does not declare": (
        dict,
        {"quantization_config": None},
        f"tensor {EXPERTS.replace('1', '0')}.down_proj_blocks is unknown in a"
        " GptOssForCausalLM whose config.json declares no MXFP4",
    ),
    "an unknown field": (
        dict,
        {"quantization_config": MXFP4 | {"group_size": 16}},
        "quantization_config has group_size 16, which Octet does not read with quant_method mxfp4",
    ),
    "experts of a layer in BF16": (
        dict,
        {"quantization_config": MXFP4 | {"modules_to_not_convert": ["model.layers.*.mlp.experts"]}},
        "modules_to_not_convert names model.layers.*.mlp.experts, and Octet reads the experts of",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_bad_tensors_are_named_in_one_line(case: str, packed: Path, tmp_path: Path) -> None:
    change, config, line = BROKEN[case]
    broken = rewrite_model(packed, tmp_path / "broken", change, **config)
    with pytest.raises(OctetError) as refused:
        Checkpoint.open(broken)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_scale_that_is_no_number_is_named(packed: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        codes = np.array(tensors[SCALES].codes)
        codes[5, 3, 2] = 255
        return tensors | {SCALES: Tensor("U8", codes)}

    broken = Checkpoint.open(rewrite_model(packed, tmp_path / "broken", change))
    with pytest.raises(OctetError, match=r"experts\.5\.down_proj\.weight_scale.* at \[3, 2\] is N"):
        broken.read(f"{EXPERTS}.5.down_proj.weight")


GPT_OSS_20B: dict[str, Any] = json.loads(
    """{"architectures": ["GptOssForCausalLM"], "attention_bias": true, "eos_token_id": 200002,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000, "rope_scaling":
    {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": false}, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": false, "vocab_size": 201088}"""
)
GPT_OSS_20B["layer_types"] = ["sliding_attention", "full_attention"] * 12
