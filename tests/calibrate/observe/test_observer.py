"""What is counted is what flows: every real token once, keys after RoPE, never padding."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoder.loading import load_model
from calibrate.observe.counting_cpu import count_reference
from calibrate.observe.observer import Observer, observe
from calibrate.samples.batches import Batch, make_batches
from octet.errors import ConfigError, NumericsError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec


def observed(model: Any, spec: ModelSpec, batches: Sequence[Batch]) -> Observer:
    with observe(model, spec) as observer:
        for batch in batches:
            observer.run(batch)
    return observer


def captured(model: Any, batch: Batch, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The inputs of the modules `names` in transformers' own forward pass, [B, T, K]."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, inputs: found.update({name: inputs[0]})

    handles = [model.get_submodule(x).register_forward_pre_hook(keep(x)) for x in names]
    with torch.inference_mode():
        model(batch.token_ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def real(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The elements of x [B, T, ...] that are not padding, flat."""
    rows = zip(x, batch.lengths, strict=True)
    return torch.cat([row[:length].flatten() for row, length in rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counts_what_each_linear_reads(checkpoint: Checkpoint, batch: Batch, dtype: Any) -> None:
    model = load_model(checkpoint, dtype)
    observer = observed(model, checkpoint.spec, [batch])
    linears = list(checkpoint.spec.linears())
    inputs = captured(model, batch, [linear.name for linear in linears])
    for linear in linears:
        expected = count_reference(real(inputs[linear.name], batch))
        assert (observer.histograms[linear.input].counts == expected).all(), linear.name


def test_each_distinct_tensor_is_observed_once(checkpoint: Checkpoint, model: Any) -> None:
    observer = observed(model, checkpoint.spec, [])
    layer = {
        name.removeprefix("model.layers.1."): observation.consumers
        for name, observation in observer.observations.items()
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


def test_keys_are_counted_after_rope_and_values_as_projected(
    checkpoint: Checkpoint, model: Any, batch: Batch
) -> None:
    spec = checkpoint.spec
    observer = observed(model, spec, [batch])
    for layer in range(spec.layers):
        attention = f"{spec.layer(layer)}.self_attn"
        projection = f"{attention}.k_proj"
        x = captured(model, batch, [projection])[projection]
        weights = [checkpoint.read(f"{attention}.{p}_proj.weight").float32() for p in "kv"]
        with torch.inference_mode():
            before, value = (x @ torch.from_numpy(w).T for w in weights)
        shape = (*before.shape[:2], spec.kv_heads, spec.head_dim)
        after = rope(before.reshape(shape), spec.rope_theta)
        counted = observer.histograms[f"{attention}.key"]
        assert distance(counted.counts, count_reference(real(after, batch))) < 1e-3
        assert distance(counted.counts, count_reference(real(before, batch))) > 0.05
        value_counts = observer.histograms[f"{attention}.value"].counts
        assert distance(value_counts, count_reference(real(value, batch))) < 1e-3


def test_queries_are_counted_after_rope_if_asked_for(
    checkpoint: Checkpoint, model: Any, batch: Batch
) -> None:
    spec = checkpoint.spec
    with observe(model, spec, queries=True) as observer:
        observer.run(batch)
    observer.check(batch.tokens)
    for layer in range(spec.layers):
        attention = f"{spec.layer(layer)}.self_attn"
        x = captured(model, batch, [f"{attention}.q_proj"])[f"{attention}.q_proj"]
        with torch.inference_mode():
            before = model.get_submodule(f"{attention}.q_proj")(x)
        after = rope(before.reshape(*x.shape[:2], spec.heads, spec.head_dim), spec.rope_theta)
        counted = observer.histograms[f"{attention}.query"].counts
        assert distance(counted, count_reference(real(after, batch))) < 1e-3
        assert distance(counted, count_reference(real(before, batch))) > 0.03
    assert observed(model, spec, []).observations.keys() == {
        name for name in observer.observations if not name.endswith(".query")
    }


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Fraction of elements in another bin: those next to a rounding edge differ by chance."""
    assert a.sum() == b.sum()
    return float(np.abs(a - b).sum() / 2 / a.sum())


def test_padding_is_never_counted(checkpoint: Checkpoint, model: Any, batch: Batch) -> None:
    assert min(batch.lengths) < max(batch.lengths)
    rows = torch.arange(batch.token_ids.shape[1])
    padding = rows[None] >= torch.tensor(batch.lengths)[:, None]
    other = replace(batch, token_ids=batch.token_ids.masked_fill(padding, 4095))
    assert not torch.equal(other.token_ids, batch.token_ids)
    first, second = (observed(model, checkpoint.spec, [x]) for x in (batch, other))
    for name, histogram in first.histograms.items():
        assert (histogram.counts == second.histograms[name].counts).all(), name


def test_batch_size_does_not_change_what_is_counted(
    checkpoint: Checkpoint, model: Any, sequences: list[list[int]]
) -> None:
    origins = [""] * len(sequences)
    tokens = sum(len(ids) for ids in sequences)
    one, eight = (
        observed(model, checkpoint.spec, make_batches(sequences, origins, batch_size=size))
        for size in (1, 8)
    )
    one.check(tokens)
    eight.check(tokens)
    for name, histogram in one.histograms.items():
        # Matrix products of other shapes differ in the last bit of float32.
        assert distance(histogram.counts, eight.histograms[name].counts) < 1e-3, name


def test_the_model_is_left_as_it_was(checkpoint: Checkpoint, model: Any, batch: Batch) -> None:
    with torch.inference_mode():
        before = model(batch.token_ids, use_cache=False).logits
        observer = observed(model, checkpoint.spec, [batch])
        counts = {name: h.total for name, h in observer.histograms.items()}
        after = model(batch.token_ids, use_cache=False).logits
    assert torch.equal(before, after)
    assert counts == {name: h.total for name, h in observer.histograms.items()}


def test_only_the_observers_own_batches_count(
    checkpoint: Checkpoint, model: Any, batch: Batch
) -> None:
    with observe(model, checkpoint.spec) as observer, torch.inference_mode():
        model(batch.token_ids, use_cache=False)
    assert all(histogram.total == 0 for histogram in observer.histograms.values())
    with pytest.raises(RuntimeError, match=r"q_proj\.input: counted 0"):
        observer.check(batch.tokens)


@pytest.mark.parametrize(
    ("weight", "poison", "name"),
    [
        ("model.layers.1.mlp.up_proj", float("nan"), "model.layers.1.mlp.down_proj.input"),
        ("model.layers.0.self_attn.k_proj", float("inf"), "model.layers.0.self_attn.key"),
        ("model.layers.0.self_attn.v_proj", float("nan"), "model.layers.0.self_attn.value"),
    ],
)
def test_nan_and_inf_are_named_by_tensor_and_sample(
    checkpoint: Checkpoint, batch: Batch, weight: str, poison: float, name: str
) -> None:
    model = load_model(checkpoint, "float32")
    with torch.no_grad():
        model.get_submodule(weight).weight[0, 0] = poison
    with pytest.raises(NumericsError) as error, observe(model, checkpoint.spec) as observer:
        observer.run(batch)
    message = str(error.value)
    assert message.startswith(f"{name} holds ")
    assert "first in channel" in message
    assert "line 1" in message
    elements = observer.histograms[name].total
    assert f"among {elements} values" in message
    nans, infs = observer.histograms[name].nans, observer.histograms[name].infs
    assert f"{nans} NaN and {infs} Inf" in message


def test_a_float32_that_no_bfloat16_holds_is_an_inf_and_named(
    checkpoint: Checkpoint, batch: Batch
) -> None:
    model = load_model(checkpoint, "float32")
    name = "model.layers.1.self_attn.o_proj.input"
    module = model.get_submodule(name.removesuffix(".input"))

    def overflow(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = inputs[0].clone()
        x[2, :2, 5] = 3.4e38  # bfloat16 ends at 3.39e38
        return (x,)

    module.register_forward_pre_hook(overflow)
    with pytest.raises(NumericsError) as error, observe(model, checkpoint.spec) as observer:
        observer.run(batch)
    message = str(error.value)
    assert message.startswith(f"{name} holds 0 NaN and 2 Inf among ")
    assert (
        "channel 5 in the sample of line 1: it is finite in float32 but beyond bfloat16" in message
    )


def test_an_inf_that_is_gone_when_looked_for_still_ends_the_run(
    checkpoint: Checkpoint, batch: Batch
) -> None:
    model = load_model(checkpoint, "float32")
    passes = []

    def fail_once(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        passes.append(1)
        return (inputs[0] + (float("inf") if len(passes) == 1 else 0.0),)

    model.model.layers[1].mlp.gate_proj.register_forward_pre_hook(fail_once)
    with (
        pytest.raises(
            NumericsError,
            match=r"^NaN or Inf was counted in model\.layers\.1\.mlp\.gate_proj\.input, "
            r"model\.layers\.1\.mlp\.down_proj\.input, but not found .* run it again",
        ),
        observe(model, checkpoint.spec) as observer,
    ):
        observer.run(batch)
    assert len(passes) == 2


@pytest.mark.parametrize(("rows", "flag"), [(12, "--batch-size"), (1, "--max-length")])
def test_a_batch_that_the_gpu_cannot_hold_is_told_with_the_flag(
    checkpoint: Checkpoint, model: Any, batch: Batch, rows: int, flag: str
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    fewer = Batch(batch.token_ids[:rows], batch.lengths[:rows], batch.origins[:rows])
    size = f"{rows} x {batch.token_ids.shape[1]}"
    told = f"^the GPU ran out of memory in a batch of {size} tokens: give a smaller {flag}, or"
    with observe(model, checkpoint.spec) as observer:
        handle = model.model.layers[1].register_forward_pre_hook(full)
        try:
            with pytest.raises(ConfigError, match=told):
                observer.run(fewer)
        finally:
            handle.remove()


def test_histograms_of_two_runs_are_equal(checkpoint: Checkpoint, model: Any, batch: Batch) -> None:
    first, second = (observed(model, checkpoint.spec, [batch]) for _ in range(2))
    for name, histogram in first.histograms.items():
        assert (histogram.counts == second.histograms[name].counts).all()
