"""Opening a checkpoint: what is accepted, and the one line said of what is not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octet.errors import CheckpointError, OctetError, UnsupportedError
from octet.model.checkpoint import Checkpoint


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def test_opens_and_reads_what_transformers_saved(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(tiny_model)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert checkpoint.spec.kv_heads == 2 and checkpoint.spec.tied_embeddings
    for linear in checkpoint.spec.linears():
        name = f"{linear.name}.weight"
        expected = reference[name].float().numpy()
        assert (checkpoint.read(name).float32() == expected).all(), name


def test_a_sharded_checkpoint_is_the_same(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    one, many = Checkpoint.open(tiny_model), Checkpoint.open(tmp_path)
    assert len(many.shards) > 2
    assert set(one.tensor_names) == set(many.tensor_names)
    for name in one.tensor_names:
        assert (one.read(name).codes == many.read(name).codes).all(), name


def test_linears_that_share_an_input_say_so(tiny_model: Path) -> None:
    linears = {linear.name: linear for linear in Checkpoint.open(tiny_model).spec.linears()}
    layer = "model.layers.1"
    q, k = linears[f"{layer}.self_attn.q_proj"], linears[f"{layer}.self_attn.k_proj"]
    assert q.input == k.input == f"{layer}.self_attn.q_proj.input"
    assert linears[f"{layer}.mlp.up_proj"].input == f"{layer}.mlp.gate_proj.input"
    assert (k.out_features, k.in_features) == (128, 256)


BAD = {
    "absent directory": (lambda p: shutil.rmtree(p), CheckpointError, "no such directory"),
    "no config": (lambda p: (p / "config.json").unlink(), CheckpointError, "no config.json"),
    "config not JSON": (
        lambda p: (p / "config.json").write_text("{"),
        CheckpointError,
        "not valid JSON",
    ),
    "no weights": (
        lambda p: (p / "model.safetensors").unlink(),
        CheckpointError,
        "no model.safetensors",
    ),
    "other architecture": (
        lambda p: edit(p, lambda c: c.update(architectures=["GPT2LMHeadModel"])),
        UnsupportedError,
        "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, MistralForCausalLM",
    ),
    "biases": (
        lambda p: edit(p, lambda c: c.update(attention_bias=True)),
        CheckpointError,
        r"model.layers.0.self_attn.q_proj.bias is missing",
    ),
    "rope scaling without a factor": (
        lambda p: edit(p, lambda c: c.update(rope_parameters={"rope_type": "linear"})),
        UnsupportedError,
        "config.json: rope_scaling.factor: Input should be a valid number",
    ),
    "size missing": (
        lambda p: edit(p, lambda c: c.pop("hidden_size")),
        UnsupportedError,
        "hidden_size",
    ),
    "size absurd": (
        lambda p: edit(p, lambda c: c.update(vocab_size="many")),
        UnsupportedError,
        "vocab_size",
    ),
    "shapes disagree": (
        lambda p: edit(p, lambda c: c.update(intermediate_size=640)),
        CheckpointError,
        r"gate_proj.weight has shape \(512, 256\)",
    ),
    "quantized already": (
        lambda p: edit(p, lambda c: c.update(quantization_config={"quant_method": "fp8"})),
        UnsupportedError,
        "quantized already",
    ),
    "more layers than described": (
        lambda p: edit(p, lambda c: c.update(num_hidden_layers=1)),
        CheckpointError,
        r"model.layers.1.* is not one that config.json describes",
    ),
    "no positions": (
        lambda p: edit(p, lambda c: c.update(max_position_embeddings=None)),
        UnsupportedError,
        "max_position_embeddings",
    ),
    "RoPE as a list": (
        lambda p: edit(p, lambda c: c.update(rope_parameters=[1])),
        UnsupportedError,
        "rope_parameters is not an object",
    ),
    "architectures as a string": (
        lambda p: edit(p, lambda c: c.update(architectures="LlamaForCausalLM")),
        UnsupportedError,
        "architecture .none. is not supported",
    ),
    "layers missing": (
        lambda p: edit(p, lambda c: c.update(num_hidden_layers=3)),
        CheckpointError,
        r"model.layers.2.self_attn.q_proj.weight is missing",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_checkpoint_is_named(case: str, copy: Path) -> None:
    damage, error, message = BAD[case]
    damage(copy)
    with pytest.raises(error, match=message) as caught:
        Checkpoint.open(copy)
    assert isinstance(caught.value, OctetError)
    assert str(copy) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_shard_is_named(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(
        CheckpointError, match=f"{shard.name} named by model.safetensors.index.json is missing"
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("weight_map", [[], {"a": "../../etc/passwd"}, {"a": 3}])
def test_an_index_that_names_no_files_beside_it_is_refused(copy: Path, weight_map: Any) -> None:
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map does not name files beside it"):
        Checkpoint.open(copy)
