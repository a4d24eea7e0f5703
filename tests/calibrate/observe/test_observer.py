"""Tests which tensors are observed, keys and queries after RoPE, and that NaN and Inf are named."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calibrate.observe.layer_observer import require_finite
from calibrate.observe.observer import check_totals, observations_of
from calibrate.observe.sweep import observe_checkpoint
from calibrate.samples.batches import Batch, real
from octet.errors import ConfigError, NumericsError
from octet.model.checkpoint import Checkpoint
from octet.storage.tensors import Tensor
from tests.calibrate.contents import count_reference
from tests.models import Tensors, rewrite_model


def test_each_distinct_tensor_is_observed_once(checkpoint: Checkpoint) -> None:
    layer = {
        name.removeprefix("model.layers.1."): observation.consumers
        for name, observation in observations_of(checkpoint.spec, torch.float32).items()
        if name.startswith("model.layers.1.")
    }
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    assert layer == {
        "self_attn.q_proj.input": tuple(f"{attention}.{x}_proj" for x in "qkv"),
        "self_attn.key": (attention,),
        "self_attn.value": (attention,),
        "self_attn.o_proj.input": (f"{attention}.o_proj",),
        "mlp.gate_proj.input": (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        "mlp.down_proj.input": (f"{mlp}.down_proj",),
    }


def rope(x: torch.Tensor, theta: float) -> torch.Tensor:
    """RoFormer's rotation by hand, halves as Llama has them; x [B, T, H, D], positions from 0."""
    _, length, _, dim = x.shape
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).float()


def test_keys_and_queries_are_counted_after_rope_and_values_as_projected(
    checkpoint: Checkpoint, batch: Batch
) -> None:
    spec = checkpoint.spec
    counted = observe_checkpoint(checkpoint, [batch], dtype="float32", queries=True).histograms
    attention = "model.layers.0.self_attn"
    norm = checkpoint.read("model.layers.0.input_layernorm.weight").float32()
    embedded = checkpoint.read("model.embed_tokens.weight").float32()
    x = torch.nn.functional.rms_norm(
        torch.from_numpy(embedded)[batch.token_ids],
        (spec.hidden_size,),
        torch.from_numpy(norm),
        spec.rms_norm_eps,
    )
    for projection, kind in (("q", "query"), ("k", "key"), ("v", "value")):
        weight = checkpoint.read(f"{attention}.{projection}_proj.weight").float32()
        before = (x @ torch.from_numpy(weight).T).unflatten(-1, (-1, spec.head_dim))
        after = before if kind == "value" else rope(before, spec.rope_theta)
        found = counted[f"{attention}.{kind}"][0]
        assert distance(found, count_reference(real(after, batch))) < 1e-3, kind
        if kind != "value":
            assert distance(found, count_reference(real(before, batch))) > 0.03, kind


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Fraction of elements in another bin: those next to a rounding edge differ by chance."""
    assert a.sum() == b.sum()
    return float(np.abs(a - b).sum() / 2 / a.sum())


def test_queries_are_counted_only_if_asked_for(checkpoint: Checkpoint) -> None:
    with_queries = observations_of(checkpoint.spec, torch.float32, queries=True)
    queries = {f"model.layers.{index}.self_attn.query" for index in range(2)}
    assert with_queries.keys() - observations_of(checkpoint.spec, torch.float32) == queries


def test_a_tensor_that_is_not_counted_for_every_token_is_named(
    checkpoint: Checkpoint, batch: Batch
) -> None:
    counts = observe_checkpoint(checkpoint, [batch], dtype="float32").histograms
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn\.q_proj\.input: counted \d+ el"):
        check_totals(checkpoint.spec, counts, batch.tokens + 1)


def test_a_float32_that_no_bfloat16_holds_is_an_inf_and_named() -> None:
    x = torch.ones(9, 8)
    x[2:4, 5] = 3.4e38  # bfloat16 ends at 3.39e38
    told = (
        "^x holds 0 NaN and 2 Inf among 144 values of one batch, first in channel 5 in the sample"
        " of line 2: it is finite in float32 but beyond bfloat16"
    )
    with pytest.raises(NumericsError, match=told):
        require_finite("x", [("line 1", torch.ones(9, 8)), ("line 2", x)])


def test_an_inf_that_is_gone_when_looked_for_still_ends_the_run(
    checkpoint: Checkpoint, batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(tensors: Tensors) -> Tensors:
        name = "model.layers.1.mlp.up_proj.weight"
        codes = np.full_like(tensors[name].codes, 0x7F80)
        return tensors | {name: Tensor("BF16", codes)}

    broken = Checkpoint.open(rewrite_model(checkpoint.path, tmp_path / "model", overflow))
    monkeypatch.setattr("calibrate.observe.layer_observer.require_finite", lambda *_: None)
    told = r"^NaN or Inf was counted in model\.layers\.1\.mlp\.down_proj\.input, but not found .* a"
    with pytest.raises(NumericsError, match=told):
        observe_checkpoint(broken, [batch], dtype="float32")


@pytest.mark.parametrize(("rows", "flag"), [(12, "--batch-size"), (1, "--max-length")])
def test_a_batch_that_the_gpu_cannot_hold_is_told_with_the_flag(
    checkpoint: Checkpoint, batch: Batch, rows: int, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("calibrate.decoder.layers.LayeredModel.forward", full)
    fewer = Batch(batch.token_ids[:rows], batch.lengths[:rows], batch.origins[:rows])
    size = f"{rows} x {batch.token_ids.shape[1]}"
    told = f"^the GPU ran out of memory in a batch of {size} tokens: give a smaller {flag}, or"
    with pytest.raises(ConfigError, match=told):
        observe_checkpoint(checkpoint, [fewer], dtype="float32")
