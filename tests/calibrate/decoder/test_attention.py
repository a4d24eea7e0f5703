"""Attention in E4M3 is what it says, and nothing stays behind when a module's is replaced."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from calibrate.decoder.attention import e4m3_attention, replace_attention, tap_queries
from calibrate.decoder.rounding import round_cache
from octet.model.checkpoint import Checkpoint

IDS = torch.arange(40).reshape(2, 20) + 7


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """A query [2, 4, 9, 32], and keys and values of two heads [2, 2, 9, 32]."""
    source = torch.Generator().manual_seed(0)
    sizes = ((2, 4, 9, 32), (2, 2, 9, 32), (2, 2, 9, 32))
    query, key, value = (torch.randn(size, generator=source) for size in sizes)
    return query, key, value


def written_out(
    query: Tensor, key: Tensor, value: Tensor, scale: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """[B, T, H, D], one query at a time; FP8 is torch's own cast. `sinks` are [H]."""
    out = torch.zeros(2, 9, 4, 32)
    queries = (query / scale).to(torch.float8_e4m3fn).float() * scale
    for batch, position, head in torch.cartesian_prod(*map(torch.arange, (2, 9, 4))).tolist():
        keys = key[batch, head // 2, : position + 1]
        scores = keys @ queries[batch, head, position] / 32**0.5
        weights = torch.exp(scores - scores.max()) * 256
        rounded = weights.to(torch.float8_e4m3fn).float()
        out[batch, position, head] = rounded @ value[batch, head // 2, : position + 1]
        sink = 0 if sinks is None else torch.exp(sinks[head] - scores.max()) * 256
        out[batch, position, head] /= weights.sum() + sink
    return out


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_queries_and_probabilities_are_rounded(scale: float) -> None:
    query, key, value = tensors()
    attention = e4m3_attention(torch.tensor(scale))
    found, _ = attention(None, None, query, key, value, None)
    torch.testing.assert_close(found, written_out(query, key, value, torch.tensor(scale)))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    masked, _ = attention(None, None, query, key, value, causal[None, None], scaling=32**-0.5)
    added, _ = attention(None, None, query, key, value, torch.where(causal, 0.0, -torch.inf))
    torch.testing.assert_close(masked, found)
    torch.testing.assert_close(added, found)


def test_a_sink_takes_its_share_of_the_probability() -> None:
    query, key, value = tensors()
    sinks, one = torch.tensor([-3.0, 0.0, 1.5, 9.0]), torch.ones(())
    found, _ = e4m3_attention(one)(None, None, query, key, value, None, s_aux=sinks)
    torch.testing.assert_close(found, written_out(query, key, value, one, sinks))


def test_one_module_attends_otherwise_and_all_as_before_afterwards(
    model: Any, checkpoint: Checkpoint
) -> None:
    layers: list[nn.Module] = [layer.self_attn for layer in model.base_model.layers]
    seen: list[int] = []

    def nothing(_inner: Any, _module: Any, query: Tensor, *_: Any, **__: Any) -> Any:
        return torch.zeros_like(query).transpose(1, 2), None

    def hidden() -> Tensor:
        with torch.inference_mode():
            return model.base_model(IDS, use_cache=False).last_hidden_state

    before, function = hidden(), ALL_ATTENTION_FUNCTIONS["sdpa"]
    with tap_queries(layers[1], lambda query: seen.append(query.shape[1])):
        torch.testing.assert_close(hidden(), before, rtol=0, atol=0)
        with replace_attention(layers[0], nothing):
            assert not torch.equal(hidden(), before)
    assert seen == [checkpoint.spec.heads] * 2
    with pytest.raises(ZeroDivisionError), replace_attention(layers[0], nothing):
        raise ZeroDivisionError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is function
    assert torch.equal(hidden(), before)


@pytest.mark.parametrize(("kv_cache", "bits"), [("e5m2", 2), ("e4m3", 3)])
def test_a_cache_that_truncates_keeps_the_first_bits(kv_cache: Any, bits: int) -> None:
    """Of normal values: a sign, a leading one and `bits` more; what is too large saturates."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 8
    x = x[x.abs() > 2**-5]
    power = torch.exp2(torch.floor(torch.log2(x.abs())) - bits)
    expected = torch.trunc(x / power) * power
    one = torch.ones(())
    found = round_cache(x, kv_cache, one, toward_zero=True)
    assert torch.equal(found, expected)
    assert (found.abs() <= x.abs()).all()
    largest = torch.tensor([1e9, -1e9])
    assert torch.equal(
        round_cache(largest, kv_cache, one, toward_zero=True), round_cache(largest, kv_cache, one)
    )
    quarter = round_cache(x, kv_cache, torch.tensor(0.25), toward_zero=True)
    assert torch.equal(quarter, found)  # a power of two changes no mantissa
