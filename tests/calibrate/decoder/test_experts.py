"""Experts one by one are transformers' own block to the bit, and what each reads is told."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from calibrate.decoder.experts import Tap, expert_weights, tap_experts
from calibrate.samples.batches import Batch
from calibrate.scales.expert_fallback import fallback_warnings, of_enough_tokens, with_fallback
from octet.errors import UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from tests.models import write_model

KINDS = ("qwen3_moe", "mixtral")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("experts")
    return {kind: Checkpoint.open(write_model(folder / kind, kind)) for kind in KINDS}


@pytest.fixture(params=KINDS)
def moe(request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def padded(sequences: list[list[int]]) -> Batch:
    """12 rows of unequal length; token 0 is the padding."""
    longest = max(map(len, sequences))
    rows = [ids + [0] * (longest - len(ids)) for ids in sequences]
    lengths = tuple(map(len, sequences))
    assert min(lengths) < longest
    return Batch(torch.tensor(rows), lengths, ("line 1",) * len(rows))


def load(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The model with transformers' own loop over the experts, the reference of everything here."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.path, dtype=dtype, experts_implementation="eager"
    )
    return model.eval()


def run(model: Any, spec: ModelSpec, batch: Batch, tap: Tap | None) -> torch.Tensor:
    """The last hidden states [B, T, H], through `tap` if there is one."""
    with ExitStack() as stack, torch.inference_mode():
        for index, layer in enumerate(model.model.layers):
            if tap is not None:
                stack.enter_context(tap_experts(layer, spec.layer(index), spec, tap))
        return model.model(batch.token_ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_one_by_one_give_the_same_bits(
    moe: Checkpoint, padded: Batch, dtype: torch.dtype
) -> None:
    model = load(moe, dtype)
    before = run(model, moe.spec, padded, None)
    tapped = run(model, moe.spec, padded, lambda name, rows, index: rows)
    assert torch.equal(tapped, before)
    assert torch.equal(run(model, moe.spec, padded, None), before)
    assert "forward" not in vars(model.model.layers[0].mlp.experts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: pytest -m gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_on_a_gpu(moe: Checkpoint, padded: Batch, dtype: torch.dtype) -> None:
    model = load(moe, dtype).cuda()
    batch = replace(padded, token_ids=padded.token_ids.cuda())
    before = run(model, moe.spec, batch, None)
    told: list[torch.device] = []

    def tap(name: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        told.append(index.device)
        return rows

    assert torch.equal(run(model, moe.spec, batch, tap), before)
    assert {device.type for device in told} == {"cuda"}


class Products(TorchFunctionMode):
    """The first operand of every torch.nn.functional.linear, by where the weight lies."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            self.read[args[1].data_ptr()] = args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_expert_is_told_of_what_the_stock_block_multiplies(
    moe: Checkpoint, padded: Batch, dtype: torch.dtype
) -> None:
    """The operands of the stock loop, caught at its matrix products, are the rows of the tap."""
    model, spec = load(moe, dtype), moe.spec
    told: dict[str, torch.Tensor] = {}

    def tap(name: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert name not in told
        told[name] = rows.clone()
        return rows

    run(model, spec, padded, tap)
    with Products() as products:
        run(model, spec, padded, None)
    gate, _, down = spec.expert_projections
    for index, layer in enumerate(model.model.layers):
        for expert in range(spec.experts):
            name = f"{spec.experts_of(spec.layer(index))}.{expert}"
            experts = layer.mlp.experts
            pairs = ((gate, experts.gate_up_proj[expert]), (down, experts.down_proj[expert]))
            for projection, weight in pairs:
                assert torch.equal(
                    told.pop(f"{name}.{projection}.input"), products.read[weight.data_ptr()]
                )
    assert not told


def test_what_the_tap_returns_is_what_is_multiplied(moe: Checkpoint, padded: Batch) -> None:
    """Zeros for one projection of every expert: the block adds nothing."""
    model, spec = load(moe, torch.float32), moe.spec
    gate, _, down = spec.expert_projections
    for projection in (gate, down):
        outputs: list[torch.Tensor] = []
        hook = model.model.layers[1].mlp.register_forward_hook(
            lambda module, inputs, output, outputs=outputs: outputs.append(output)
        )

        def tap(
            name: str, rows: torch.Tensor, index: torch.Tensor, projection: str = projection
        ) -> torch.Tensor:
            return rows * 0 if name.endswith(f"{projection}.input") else rows

        run(model, spec, padded, tap)
        hook.remove()
        assert outputs[0].abs().max() == 0


def test_an_expert_that_nothing_is_sent_to_is_not_called(moe: Checkpoint) -> None:
    model, spec = load(moe, torch.float32), moe.spec
    called: set[str] = set()

    def tap(name: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert len(rows)
        called.add(name)
        return rows

    one = Batch(torch.tensor([[5]]), (1,), ("line 1",))
    run(model, spec, one, tap)
    assert len(called) == spec.layers * spec.experts_per_token * 2


def test_the_block_is_as_it_was_after_an_error(moe: Checkpoint, padded: Batch) -> None:
    model, spec = load(moe, torch.float32), moe.spec

    def tap(name: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, spec, padded, tap)
    assert "forward" not in vars(model.model.layers[0].mlp.experts)


def test_the_inner_of_two_taps_is_called_and_then_the_outer_again(moe: Checkpoint) -> None:
    model, spec = load(moe, torch.float32), moe.spec
    calls = {"outer": 0, "inner": 0}

    def tap(which: str) -> Tap:
        def count(name: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            calls[which] += 1
            return rows

        return count

    one = Batch(torch.tensor([[5]]), (1,), ("line 1",))
    each = spec.experts_per_token * 2  # calls a layer, of one token
    with tap_experts(model.model.layers[0], spec.layer(0), spec, tap("outer")):
        with tap_experts(model.model.layers[0], spec.layer(0), spec, tap("inner")):
            run(model, spec, one, None)
        assert calls == {"outer": 0, "inner": each}
        run(model, spec, one, None)
    assert calls == {"outer": each, "inner": each}
    assert "forward" not in vars(model.model.layers[0].mlp.experts)


def test_a_dense_layer_among_sparse_ones_is_left_alone(tmp_path: Path, padded: Batch) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path, "qwen3_moe", decoder_sparse_step=2))
    model, spec = load(checkpoint, torch.float32), checkpoint.spec
    assert spec.sparse_layers == (1,)
    called: set[str] = set()

    def tap(name: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        called.add(name)
        return rows

    run(model, spec, padded, tap)
    wanted = {x.input for x in spec.linears() if ".experts." in x.name}
    assert called == wanted and all(name.startswith("model.layers.1.") for name in called)
    assert expert_weights(model.model.layers[0], spec.layer(0), spec) == {}


def test_experts_that_are_not_fused_are_refused(moe: Checkpoint) -> None:
    """transformers 4 has a list of modules there."""
    experts = torch.nn.ModuleList([torch.nn.Identity()])
    layer: Any = SimpleNamespace(mlp=SimpleNamespace(experts=experts))
    with (
        pytest.raises(UnsupportedError, match="mixtures of experts need transformers 5"),
        tap_experts(layer, "model.layers.0", moe.spec, lambda name, rows, index: rows),
    ):
        pass


def test_each_experts_weights_are_views_by_name(moe: Checkpoint) -> None:
    model, spec = load(moe, torch.float32), moe.spec
    for index, layer in enumerate(model.model.layers):
        weights = expert_weights(layer, spec.layer(index), spec)
        named = [x.name for x in spec.linears() if x.name.startswith(spec.layer(index) + ".")]
        assert list(weights) == [name for name in named if ".experts." in name]
        for name, weight in weights.items():
            expected = moe.read(f"{name}.weight").float32()
            assert (weight.numpy() == expected).all(), name
            weight.zero_()
        assert not layer.mlp.experts.gate_up_proj.any() and not layer.mlp.experts.down_proj.any()


def drawn(spec: ModelSpec, tokens: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Histograms int64[32768] of every linear input, of as many tokens as are given by expert."""
    generator = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}
    for linear in spec.linears():
        if linear.input not in found:
            count = tokens.get(linear.input.rsplit(".", 2)[0], 1000) * linear.in_features
            codes = generator.integers(0x3000, 0x4000, count)
            found[linear.input] = np.bincount(codes, minlength=1 << 15)
    return found


@pytest.mark.parametrize("chunks", [0, 3])
def test_an_expert_hardly_used_takes_the_sum_of_all(moe: Checkpoint, chunks: int) -> None:
    spec = moe.spec
    names = [f"{spec.experts_of(spec.layer(1))}.{e}" for e in range(spec.experts)]
    histograms = drawn(spec, {names[0]: 0, names[1]: 99, names[2]: 100})
    if chunks:  # the tokens of all chunks count, not those of each
        histograms = {
            name: np.stack([counts // 2, counts * 0, counts - counts // 2])
            for name, counts in histograms.items()
        }
    filled, facts = with_fallback(spec, histograms, 100)
    layers = [spec.layer(index) for index in range(2)]
    assert facts["min_tokens"] == 100 and "sum" in facts["rule"]
    assert facts["layers"] == {
        layers[0]: {"tokens": [1000] * spec.experts},
        layers[1]: {"tokens": [0, 99, 100] + [1000] * (spec.experts - 3)},
    }
    assert facts["fallback"] == [
        {"name": names[0], "tokens": 0},
        {"name": names[1], "tokens": 99},
    ]
    taken: set[str] = set()
    for projection in (spec.expert_projections[0], spec.expert_projections[2]):
        everyone = [histograms[f"{name}.{projection}.input"] for name in names]
        for name in names[:2]:
            taken.add(f"{name}.{projection}.input")
            assert (filled[f"{name}.{projection}.input"] == np.sum(everyone, axis=0)).all()
    assert list(filled) == list(histograms)
    assert all(filled[name] is histograms[name] for name in filled if name not in taken)
    assert histograms[f"{names[0]}.{spec.expert_projections[0]}.input"].sum() == 0
    inputs = {linear.input: np.ones(3, np.float32) for linear in spec.linears()}
    left_out = inputs.keys() - of_enough_tokens(inputs, facts).keys()
    assert left_out == taken
    (warning,) = fallback_warnings(facts)
    assert f"2 of {2 * spec.experts} experts saw fewer than 100 tokens" in warning
    assert f"{names[0]} (0), {names[1]} (99);" in warning


def test_a_model_without_experts_has_no_facts(checkpoint: Checkpoint) -> None:
    histograms = drawn(checkpoint.spec, {})
    filled, facts = with_fallback(checkpoint.spec, histograms)
    means = {"model.layers.0.mlp.down_proj.input": np.ones(3, np.float32)}
    assert of_enough_tokens(means, facts) == means
    assert filled is histograms and facts == {} and fallback_warnings(facts) == ()


def test_with_every_expert_well_used_nothing_changes(moe: Checkpoint) -> None:
    histograms = drawn(moe.spec, {})
    filled, facts = with_fallback(moe.spec, histograms, 1000)
    assert all(filled[name] is counts for name, counts in histograms.items())
    assert facts["fallback"] == [] and fallback_warnings(facts) == ()
