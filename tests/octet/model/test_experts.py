"""Mixtures of experts: which linears they have, and which tensors of a checkpoint are missed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octet.errors import CheckpointError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.storage.tensors import Tensor, write_tensors
from tests.models import write_model
from tests.octet.published import QWEN3_30B_A3B


def test_tensors_that_nothing_describes_are_told(tmp_path: Path, moe: Path) -> None:
    checkpoint = Checkpoint.open(moe)
    tensors = {each: checkpoint.read(each) for each in checkpoint.tensor_names}
    norm = tensors["model.norm.weight"]
    (tmp_path / "config.json").write_text((moe / "config.json").read_text())
    write_tensors(tmp_path / "model.safetensors", tensors | {"score.weight": norm, "x.bias": norm})
    (warning,) = Checkpoint.open(tmp_path).warnings
    assert warning.startswith("config.json does not describe score.weight, x.bias: Octet does not")


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
