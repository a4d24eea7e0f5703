"""The planned bytes are those of real exports, and shards add up to the whole."""

import math
from pathlib import Path
from typing import Any

import pytest

from export.checkpoint.write import export_checkpoint
from octet.model.checkpoint import Checkpoint
from octet.plan.sizes import Sizes
from octet.recipe import PRESETS, KvCacheDtype, Recipe
from octet.storage.tensors import TensorFile
from tests.export.conftest import make_calibration
from tests.models import write_model
from tests.octet.plan.shapes import LLAMA_8B, LLAMA_70B, QWEN3_MOE, spec_of

# Whole groups of 32 and blocks of 128, so that every recipe can be exported.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 128, "mlp_only_layers": [0]},
    "mixtral": {},
    "gemma": {"num_key_value_heads": 2},
    "phi3": {"head_dim": 32, "num_key_value_heads": 4},
}


def exported(path: Path, model: Path, recipe: Recipe, kv_cache: KvCacheDtype) -> dict[str, int]:
    """Exports a checkpoint and returns the bytes of each tensor."""
    layers = Checkpoint.open(model).spec.layers
    queries = {f"model.layers.{index}.self_attn.q_scale_e4m3": 0.5 for index in range(layers)}
    calibration = make_calibration(path / "calibration", model, recipe, scales=queries)
    export_checkpoint(calibration, path / "out", kv_cache=kv_cache)
    found = {}
    for file in (path / "out").glob("*.safetensors"):
        tensors = TensorFile.open(file)
        found |= {name: tensors.span(name)[1] - tensors.span(name)[0] for name in tensors.names}
    return found


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_tensor_has_the_bytes_that_an_export_writes(
    kind: str, recipe: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", kind, **(SIZES | MODELS[kind]))
    spec, chosen = Checkpoint.open(model).spec, Recipe.load(recipe)
    caches: dict[str, KvCacheDtype] = {"fp8": "e5m2", "fp8-static": "e4m3", "nvfp4": "e4m3"}
    kv_cache = caches.get(recipe, "float16")
    written = exported(tmp_path, model, chosen.model_copy(update={"kv_cache": kv_cache}), kv_cache)
    sizes = Sizes(spec, chosen)
    width = 4 if "F32" in str(Checkpoint.open(model).stored("model.norm.weight").dtype) else 2
    planned = {n: math.prod(shape) * size for n, shape, size in sizes.tensors(kv_cache, width)}
    assert planned == written
    assert sizes.checkpoint_bytes(kv_cache, width) == sum(written.values())


def test_one_gpu_holds_the_checkpoint_and_the_table_of_rope() -> None:
    sizes = Sizes(spec_of(LLAMA_8B), Recipe.load("fp8"))
    table = 2 * 131072 * 128
    assert sizes.gpu_bytes(1) == sizes.checkpoint_bytes("e5m2") + table
    assert sizes.parameters == 8_030_261_248  # as published


@pytest.mark.parametrize("config", [LLAMA_8B, LLAMA_70B, QWEN3_MOE], ids=["8b", "70b", "moe"])
@pytest.mark.parametrize("recipe", [None, "fp8", "nvfp4"])
def test_shards_hold_everything_once_but_what_each_gpu_needs(
    config: dict[str, Any], recipe: str | None
) -> None:
    """Norms, routers, RoPE's table and the scales of o and down are on every GPU: little."""
    sizes = Sizes(spec_of(config), recipe and Recipe.load(recipe))
    whole = sizes.gpu_bytes(1)
    for degree in (2, 4):
        assert whole < degree * sizes.gpu_bytes(degree) < 1.02 * whole


def test_kv_heads_are_copied_where_there_are_more_gpus() -> None:
    sizes = Sizes(spec_of(QWEN3_MOE), None)
    assert sizes.cache_bytes("e4m3", 1) == 48 * 2 * 4 * 128
    assert sizes.cache_bytes("float16", 8) == 2 * sizes.cache_bytes("e4m3", 4)


def test_few_tokens_read_few_experts() -> None:
    sizes = Sizes(spec_of(QWEN3_MOE), None)
    one, all_of_them = sizes.read_bytes(1, 1), sizes.read_bytes(1, 10_000)
    assert one / 2 == pytest.approx(3.0e9, rel=0.05)  # the 3 billion active parameters
    assert all_of_them == pytest.approx(2 * (sizes.parameters - 151936 * 2048))
