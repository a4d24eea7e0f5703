"""Qwen3: keys are observed after the norm of each head and after RoPE, values as projected."""

from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoder.loading import load_model
from calibrate.observe.counting_cpu import count_reference
from calibrate.observe.histogram import Histogram
from calibrate.observe.observer import observe
from calibrate.samples.batches import Batch
from octet.model.checkpoint import Checkpoint
from tests.models import write_model

EPS, THETA = 1e-6, 5e5  # not the defaults of RoPE


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    rope = {"rope_type": "default", "rope_theta": THETA}
    path = tmp_path_factory.mktemp("qwen3")
    return Checkpoint.open(write_model(path, "qwen3", rope_parameters=rope, rms_norm_eps=EPS))


@pytest.fixture(scope="module")
def model(qwen3: Checkpoint) -> Any:
    return load_model(qwen3, "float32")


@pytest.fixture(scope="module")
def histograms(qwen3: Checkpoint, model: Any, batch: Batch) -> dict[str, Histogram]:
    with observe(model, qwen3.spec) as observer:
        observer.run(batch)
        observer.check(batch.tokens)
        return observer.histograms


def normed(x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis (Zhang and Sennrich, 2019), float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * torch.from_numpy(weight).double()


def rotated(x: torch.Tensor) -> torch.Tensor:
    """RoFormer's rotation, halves as Llama has them; x float64 [B, T, H, D], positions from 0."""
    _, length, _, dim = x.shape
    frequency = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def distance(counted: Histogram, x: torch.Tensor, batch: Batch) -> float:
    """Fraction of the real elements of x [B, T, ...] that are counted in another bin."""
    real = [row[:length].flatten() for row, length in zip(x.float(), batch.lengths, strict=True)]
    expected = count_reference(torch.cat(real))
    assert counted.counts.sum() == expected.sum()
    return float(np.abs(counted.counts - expected).sum() / 2 / expected.sum())


def test_keys_are_counted_after_their_norm_and_after_rope(
    qwen3: Checkpoint, model: Any, batch: Batch, histograms: dict[str, Histogram]
) -> None:
    spec = qwen3.spec
    assert spec.qk_norm and spec.head_dim != spec.hidden_size // spec.heads
    read: dict[int, torch.Tensor] = {}
    hooks = [
        layer.self_attn.k_proj.register_forward_pre_hook(
            lambda module, inputs, index=index: read.update({index: inputs[0]})
        )
        for index, layer in enumerate(model.model.layers)
    ]
    with torch.inference_mode():
        model.model(batch.token_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for index, x in read.items():
        attention = f"{spec.layer(index)}.self_attn"
        weights = (qwen3.read(f"{attention}.{p}_proj.weight").float32() for p in "kv")
        key, value = (
            (x.double() @ torch.from_numpy(weight).double().T).unflatten(-1, (spec.kv_heads, -1))
            for weight in weights
        )
        scale = qwen3.read(f"{attention}.k_norm.weight").float32()
        counted = histograms[f"{attention}.key"]
        assert distance(counted, rotated(normed(key, scale)), batch) < 1e-3
        for wrong in (normed(key, scale), rotated(key), normed(rotated(key), scale)):
            assert distance(counted, wrong, batch) > 0.01
        assert distance(histograms[f"{attention}.value"], value, batch) < 1e-3


def test_what_is_observed_is_named_as_in_a_llama(
    qwen3: Checkpoint, histograms: dict[str, Histogram]
) -> None:
    names = [name for name in histograms if name.startswith(f"{qwen3.spec.layer(1)}.")]
    assert [name.removeprefix("model.layers.1.") for name in names] == [
        "self_attn.q_proj.input",
        "self_attn.key",
        "self_attn.value",
        "self_attn.o_proj.input",
        "mlp.gate_proj.input",
        "mlp.down_proj.input",
    ]
