"""Folding the scales of the cache: the function stays, to the bit, and the cache needs no scale."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.decoder.weights import LayerWeights
from calibrate.observe.histogram import Histograms
from calibrate.observe.sweep import observe_checkpoint
from calibrate.samples.batches import Batch
from calibrate.scales.derive import kv_scales
from calibrate.scales.folding import Folding, find_folds, shifted
from octet.artifacts.calibration import BINS, Observation
from octet.model.checkpoint import Checkpoint
from octet.model.folding import Folds, describe_folds
from octet.numerics.bits import float32_to_bf16
from octet.recipe import Recipe
from octet.storage.tensors import Tensor
from tests.models import GENERIC, KNOWN, Tensors, rewrite_model, scale_tensors, write_model

FOLDS: Folds = {"model.layers.0": {"k": 31, "v": -9}, "model.layers.1": {"v": 24}}
ATTENTION = "model.layers.0.self_attn"


def written(name: str, path: Path) -> Checkpoint:
    kind, settings = (KNOWN | GENERIC)[name]
    return Checkpoint.open(write_model(path / name, kind, **settings))


def logits(checkpoint: Checkpoint, dtype: ComputeDtype) -> torch.Tensor:
    token_ids = torch.arange(96).reshape(2, 48) * 41 % 4096
    with torch.inference_mode():
        found: torch.Tensor = load_model(checkpoint, dtype)(token_ids).logits
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["llama", "llama-biases", "qwen2-window", "qwen3", "qwen3-biases", "gemma", "mixtral"]
)
def test_folding_leaves_every_logit_bit_for_bit(
    name: str, dtype: ComputeDtype, tmp_path: Path
) -> None:
    before = written(name, tmp_path)
    after = before.with_folds(FOLDS)
    assert after.changed and not after.unchanged().changed
    assert torch.equal(logits(after, dtype), logits(before, dtype))


SMALL = {
    # Keys and values of layer 0 that underflow E5M2, and queries and outputs that make up for it.
    "llama-biases": {
        **{f"0.self_attn.{x}_proj": -28 for x in "kv"},
        "0.self_attn.q_proj": 28,
        "0.self_attn.o_proj.weight": 28,
    },
    "qwen3": {"0.self_attn.k_norm": -28, "0.self_attn.q_norm": 28},
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("sign", [1, -1], ids=["small", "large"])
def test_a_cache_that_needs_scales_is_folded_until_it_needs_none(
    name: str, sign: int, batch: Batch, tmp_path: Path
) -> None:
    original = written(name, tmp_path)
    powers = {end: sign * power for end, power in SMALL[name].items()}
    unusual = Checkpoint.open(scale_tensors(original.path, tmp_path / "scaled", powers))
    assert torch.equal(logits(unusual, "float32"), logits(original, "float32"))
    seen = observe_checkpoint(unusual, [batch], dtype="float32", queries=True)
    found = find_folds(unusual, seen.histograms, seen.observations)
    assert not found.refused and found.folds.keys() == {"model.layers.0"}
    counts = shifted(found.folds, seen.histograms, seen.observations)

    folded = unusual.with_folds(found.folds)
    again = observe_checkpoint(folded, [batch], dtype="float32", queries=True)
    for observation, expected in again.histograms.items():
        np.testing.assert_array_equal(counts[observation], expected, err_msg=observation)
    histograms = Histograms(counts, seen.observations)
    scales = kv_scales(folded, Recipe.load("fp8"), histograms)
    assert all(scales[x] == 1 for x in scales if x.endswith(("_scale", "_e5m2")))
    for kind, observed in (("k", "key"), ("v", "value")):
        if kind in found.folds["model.layers.0"]:
            least, most = (8, 16) if sign == 1 else (3584, 7168)
            assert least < histograms[f"{ATTENTION}.{observed}"].absmax <= most
    module = "norm" if name == "qwen3" else "proj"
    assert f"folded into k_{module} and q_{module}" in describe_folds(folded.spec, found.folds)[0]


def test_a_usual_model_is_left_alone(checkpoint: Checkpoint, batch: Batch) -> None:
    seen = observe_checkpoint(checkpoint, [batch], dtype="float32")
    assert find_folds(checkpoint, seen.histograms, seen.observations) == Folding({})
    assert shifted({}, seen.histograms, seen.observations) is seen.histograms


def seen_keys(value: float, name: str = f"{ATTENTION}.key") -> dict[str, Any]:
    """Arguments of `find_folds` for a model whose keys in layer 0 are all `value`."""
    counts = np.zeros(BINS, np.int64)
    counts[float32_to_bf16(np.asarray([value], np.float32))[0]] = 1
    kind = "key" if name.endswith("key") else "value"
    observation = Observation(kind=kind, consumers=(ATTENTION,), observed_dtype="float32")
    return {"counts": {name: counts}, "observations": {name: observation}}


@pytest.mark.parametrize(
    ("k", "q", "message"),
    [
        (2.0**-20 * 1.25, 0.5, "k_proj.weight times 2^-5 is not exact in F16"),  # loses a bit
        (0.5, 2048.0, "q_proj.weight times 2^5 is not exact in F16"),  # over 65,504
    ],
)
def test_an_exponent_that_leaves_the_range_refuses_and_names_the_tensor(
    k: float, q: float, message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    values = {f"{ATTENTION}.k_proj.weight": k, f"{ATTENTION}.q_proj.weight": q}

    def change(tensors: Tensors) -> Tensors:
        half = {name: x.float32().astype(np.float16) for name, x in tensors.items()}
        half |= {name: np.full_like(half[name], value) for name, value in values.items()}
        return {name: Tensor("F16", x) for name, x in half.items()}

    half = Checkpoint.open(rewrite_model(checkpoint.path, tmp_path / "half", change))
    found = find_folds(half, **seen_keys(2.0**17))
    assert found == Folding({}, {f"{ATTENTION}.key": f"{ATTENTION}.{message}"})


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_a_tensor_holds_a_power_only_to_the_bit(dtype: str) -> None:
    def stored(*values: float) -> Tensor:
        if dtype == "BF16":
            return Tensor("BF16", float32_to_bf16(np.asarray(values, np.float32)))
        return Tensor.of(np.asarray(values, {"F16": "f2", "F32": "f4", "F64": "f8"}[dtype]))

    tensor = stored(0.0, -0.0, 1.25, -3.0)
    assert tensor.holds_power(4) and tensor.holds_power(-4)
    assert tensor.times_power(4).dtype == dtype
    assert tensor.times_power(4).codes.tolist() == stored(0.0, -0.0, 20.0, -48.0).codes.tolist()
    if dtype != "F64":
        largest, mantissa = {"F16": (15, 10), "BF16": (126, 7), "F32": (126, 23)}[dtype]
        assert stored(1.25).holds_power(largest)
        assert not stored(4.0).holds_power(largest)  # infinite
        assert not stored(2.0**-10 * (1 + 2.0**-mantissa)).holds_power(
            -largest
        )  # loses its last bit


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("phi3", "qkv_proj holds Q, K and V in one tensor"),
        ("olmo2", "Octet does not know what Olmo2ForCausalLM computes"),
    ],
)
def test_what_cannot_be_folded_keeps_its_scale_and_says_why(
    name: str, reason: str, tmp_path: Path
) -> None:
    found = find_folds(written(name, tmp_path), **seen_keys(2.0**-20))
    assert not found.folds
    assert found.refused and all(reason in why for why in found.refused.values())


def test_a_weight_that_shares_its_scale_is_not_made_too_small(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Small keys of usual weights: their norm is tiny, and q_proj would vanish beside k_proj."""
    found = find_folds(checkpoint, **seen_keys(2.0**-20))
    assert not found.folds and "q_proj.weight would be 2^" in found.refused[f"{ATTENTION}.key"]
    small = {"0.self_attn.k_proj": -20, "0.self_attn.q_proj": 20}
    unusual = Checkpoint.open(scale_tensors(checkpoint.path, tmp_path / "scaled", small))
    assert find_folds(unusual, **seen_keys(2.0**-20)).folds == {"model.layers.0": {"k": 24}}


def test_scales_that_an_algorithm_fitted_weights_to_stay(tmp_path: Path) -> None:
    checkpoint = written("qwen3", tmp_path)
    keys = seen_keys(2.0**-20)  # folded into norms, which are not quantized
    fitted = [f"{ATTENTION}.{x}_proj.weight_scale" for x in "qkv"]
    assert find_folds(checkpoint, **keys, fitted=fitted).folds == {"model.layers.0": {"k": 24}}
    values = seen_keys(2.0**17, f"{ATTENTION}.value")
    assert find_folds(checkpoint, **values).folds == {"model.layers.0": {"v": -5}}
    refused = find_folds(checkpoint, **values, fitted=fitted).refused
    assert refused == {f"{ATTENTION}.value": f"{ATTENTION}.v_proj.weight was fitted to its scale"}


def test_lines_join_layers_of_one_power(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec.model_copy(update={"layers": 8})
    folds: Folds = {f"model.layers.{n}": {"k": -4} for n in (0, 1, 2, 5, 7)}
    folds["model.layers.3"] = {"v": 6}
    assert describe_folds(spec, folds) == [
        "K of layers 0 to 2, 5, 7 times 2^-4, folded into k_proj and q_proj",
        "V of layer 3 times 2^6, folded into v_proj and o_proj",
    ]


def test_bytes_are_read_as_folded(checkpoint: Checkpoint) -> None:
    """Into the memory of a GPU's copies too."""
    folded = checkpoint.with_folds(FOLDS)
    for name in folded.tensor_names:
        wanted = folded.read(name).codes
        buffer = bytearray(wanted.nbytes)
        folded.read_into(name, memoryview(buffer))
        assert bytes(buffer) == wanted.tobytes()
    weights = LayerWeights(folded).read(0, torch.float32)
    own = LayerWeights(checkpoint).read(0, torch.float32)
    assert torch.equal(weights["self_attn.k_proj.weight"], own["self_attn.k_proj.weight"] * 2.0**31)
