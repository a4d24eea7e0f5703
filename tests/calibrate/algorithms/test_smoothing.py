"""Scaling channels: the function stays, to the bit, and only what can be folded is touched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calibrate.algorithms.smoothing import fold, power_of_two, shared_vector, sites
from calibrate.decoder.loading import ComputeDtype, load_model
from octet.errors import UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.storage.tensors import Tensor, write_tensors
from tests.models import KNOWN, write_model


def random_vectors(checkpoint: Checkpoint, seed: int = 0) -> dict[str, Any]:
    """A vector of powers of two from about 2^-12 to 2^12 for every site."""
    rng = np.random.default_rng(seed)
    widths = {linear.input: linear.in_features for linear in checkpoint.spec.linears()}
    vectors = {}
    for site in sites(checkpoint.spec):
        found = [np.exp2(rng.normal(0, 4, widths[site.input])) for _ in site.linears]
        vectors[site.input] = power_of_two(shared_vector(site, found))
    return vectors


def changed(checkpoint: Checkpoint, tensors: dict[str, Tensor], folder: Path) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    write_tensors(folder / "weights.safetensors", tensors)
    return checkpoint.with_changes(folder / "weights.safetensors")


def logits(checkpoint: Checkpoint, dtype: ComputeDtype) -> torch.Tensor:
    token_ids = torch.arange(96).reshape(2, 48) * 41 % 4096
    with torch.inference_mode():
        found: torch.Tensor = load_model(checkpoint, dtype)(token_ids).logits
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_site_folded_at_once_leaves_every_logit_bit_for_bit(
    checkpoint: Checkpoint, dtype: ComputeDtype, tmp_path: Path
) -> None:
    tensors = fold(checkpoint, random_vectors(checkpoint))
    # All linears, and both norms, of both layers; the same dtype as before.
    assert len(tensors) == 2 * (7 + 2)
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    smoothed = changed(checkpoint, tensors, tmp_path)
    assert torch.equal(logits(smoothed, dtype), logits(checkpoint, dtype))


def test_a_site_without_a_vector_is_left_alone(checkpoint: Checkpoint) -> None:
    vectors = random_vectors(checkpoint)
    name = "model.layers.1.mlp.down_proj.input"
    tensors = fold(checkpoint, {name: vectors[name]})
    assert set(tensors) == {
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    }


def test_an_input_is_multiplied_by_its_vector(checkpoint: Checkpoint, tmp_path: Path) -> None:
    vectors = random_vectors(checkpoint)
    smoothed = changed(checkpoint, fold(checkpoint, vectors), tmp_path)
    token_ids = torch.arange(32).reshape(1, 32)
    seen: dict[str, torch.Tensor] = {}
    for opened, key in ((checkpoint, "before"), (smoothed, "after")):
        model = load_model(opened, "float32")
        for site in sites(opened.spec):
            module = model.get_submodule(site.linears[0])
            name = f"{key} {site.input}"
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.__setitem__(name, args[0])
            )
        with torch.inference_mode():
            model(token_ids)
    for name, vector in vectors.items():
        expected = seen[f"before {name}"] * torch.from_numpy(vector)
        assert torch.equal(seen[f"after {name}"], expected), name


def test_query_heads_that_share_a_value_head_share_its_factors(checkpoint: Checkpoint) -> None:
    site = next(site for site in sites(checkpoint.spec) if "o_proj" in site.input)
    assert (site.repeats, site.block) == (2, 64)
    own = np.random.default_rng(1).uniform(0.5, 2, 256).astype(np.float32)
    vector = shared_vector(site, [own])
    heads, means = vector.reshape(4, 64), own.reshape(2, 2, 64).mean(axis=1)
    np.testing.assert_array_equal(heads[0], heads[1])
    np.testing.assert_array_equal(heads[2], heads[3])
    np.testing.assert_allclose(heads[[0, 2]], means, rtol=1e-6)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.o_proj.input: channels"):
        fold(checkpoint, {site.input: power_of_two(own)})


def test_factors_are_powers_of_two_around_one() -> None:
    vector = np.array([3e-5, 0.2, 0.21, 0.27, 0.9], np.float32)
    assert power_of_two(vector).tolist() == [2.0**-13, 1, 1, 1, 4]


def test_a_factor_that_the_dtype_would_round_keeps_its_tensor_in_float32(
    checkpoint: Checkpoint,
) -> None:
    name = "model.layers.0.mlp.down_proj.input"
    tensors = fold(checkpoint, {name: np.full(512, 1.25, np.float32)})
    assert {tensor.dtype for tensor in tensors.values()} == {"F32"}
    before = checkpoint.read("model.layers.0.mlp.up_proj.weight").float32()
    np.testing.assert_array_equal(
        tensors["model.layers.0.mlp.up_proj.weight"].float32(), before * np.float32(1.25)
    )


def test_float16_stays_where_it_has_the_range(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=128,
        dtype="float16",
    )
    LlamaForCausalLM(config).half().save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    name = "model.layers.0.self_attn.q_proj.input"
    vector = np.ones(64, np.float32)
    vector[5] = 0.25
    assert {t.dtype for t in fold(checkpoint, {name: vector}).values()} == {"F16"}
    vector[5] = 2.0**-24  # a weight of 0.02 becomes 3 * 10^5, beyond float16
    dtypes = {name: t.dtype for name, t in fold(checkpoint, {name: vector}).items()}
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] == "F32"
    assert dtypes["model.layers.0.input_layernorm.weight"] == "F16"


@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "mistral-window"])
def test_biases_are_multiplied_with_the_rows_that_they_are_added_to(
    name: str, tmp_path: Path
) -> None:
    kind, settings = KNOWN[name]
    biased = Checkpoint.open(write_model(tmp_path / "model", kind, **settings))
    smoothed = changed(biased, fold(biased, random_vectors(biased)), tmp_path / "changes")
    assert torch.equal(logits(smoothed, "float32"), logits(biased, "float32"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"experts": 4, "sparse_layers": (1,)}, "experts"),
        ({"fused_qkv": True}, "fused projections"),
        ({"fused_gate_up": True}, "fused projections"),
        ({"norm_offset": 1.0}, "norms that add 1 to their weight"),
        ({"generic": True}, "an architecture that Octet does not know"),
    ],
)
def test_what_no_factor_can_be_folded_into_is_refused(
    change: dict[str, Any], reason: str, checkpoint: Checkpoint
) -> None:
    spec = checkpoint.spec.model_copy(update=change)
    with pytest.raises(UnsupportedError, match=f"do not support {reason}; calibrate without"):
        list(sites(spec))
