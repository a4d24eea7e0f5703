"""The rotary tables in the graph are those of transformers, whatever scales the frequencies."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from export.onnx.attention import rope_tables
from octet.model.spec import ModelSpec, RopeScaling

POSITIONS = 4096
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def spec(theta: float, scaling: RopeScaling | None = None, **sizes: int) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        layers=1,
        hidden_size=128,
        intermediate_size=128,
        heads=2,
        kv_heads=2,
        head_dim=64,
        vocab_size=16,
        max_positions=POSITIONS,
        rope_theta=theta,
        rms_norm_eps=1e-6,
        tied_embeddings=True,
        eos_token_ids=(),
        bos_token_id=None,
        rope_scaling=scaling,
        **sizes,
    )


def assert_equal(ours: tuple[np.ndarray, np.ndarray], embedding: Any) -> None:
    half = ours[0].shape[1]
    tables = embedding(torch.zeros(1), torch.arange(POSITIONS)[None])
    for own, theirs in zip(ours, tables, strict=True):
        # An ulp of a frequency is 2e-4 of an angle of 4096 radians.
        np.testing.assert_allclose(own, theirs[0, :, :half].numpy(), atol=1e-3)
        np.testing.assert_allclose(own[:64], theirs[0, :64, :half].numpy(), atol=1e-5)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rope_tables_are_those_of_transformers(theta: float, kind: str) -> None:
    scaling, parameters = None, {"rope_type": kind, "rope_theta": theta}
    if kind == "linear":
        scaling, parameters = RopeScaling(type="linear", factor=4.0), parameters | {"factor": 4.0}
    elif kind == "llama3":
        parameters = parameters | LLAMA3
        scaling = RopeScaling(
            type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=1024,
        )
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters=parameters,
    )
    assert_equal(rope_tables(spec(theta, scaling)), LlamaRotaryEmbedding(config))


def test_partial_rotation_has_frequencies_of_the_part() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    config = Phi3Config(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters=parameters,
        pad_token_id=0,
    )
    tables = rope_tables(spec(1e4, rotary_dim=48))
    assert tables[0].shape == (POSITIONS, 24)
    assert_equal(tables, Phi3RotaryEmbedding(config))
