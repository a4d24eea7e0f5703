"""Replaces the histograms of experts that saw few tokens with the pooled ones of their layer."""

from collections import ChainMap
from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from octet.model.spec import ModelSpec

__all__ = ["MIN_TOKENS", "fallback_warnings", "of_enough_tokens", "with_fallback"]

# After n tokens, the next of the same distribution exceeds the largest of them with probability
# 1/(n + 1), whatever the distribution: after 256, 1 token in 257 saturates. The number is rather
# high because a scale that is too large costs a floating-point format little, while one that is too
# small saturates. On the example model the largest of 256 tokens is 0.17 octaves (inputs of
# gate_proj, median) and 0.28 (of down_proj) below that of all 22,238; for 64 tokens it is 0.51 and
# 1.10 below.
MIN_TOKENS = 256
_RULE = "the sum of the histograms of all experts of the same layer and projection"
Counts: TypeAlias = NDArray[np.int64]
MeanSquare: TypeAlias = NDArray[np.float32]  # [K]


def with_fallback(
    spec: ModelSpec, histograms: Mapping[str, Counts], min_tokens: int = MIN_TOKENS
) -> tuple[Mapping[str, Counts], dict[str, Any]]:
    """Gives experts that saw fewer than `min_tokens` tokens the pooled histograms of their layer.

    A pooled histogram is the exact sum over all experts of a layer and projection, so an expert
    that was routed no token has one too. Counts are int64 [32768], or [chunks, 32768]; then the
    tokens of all chunks decide. The returned mapping is a view of `histograms`, without a copy. An
    artifact stores the histograms without this fallback.

    Also returns facts, {} for a model without experts, else:
    {"min_tokens", "rule", "layers": {<layer>: {"tokens": [one an expert]}},
     "fallback": [{"name": <expert>, "tokens"}]}
    Weights are not affected: an expert's are always quantized from themselves.
    """
    if not spec.sparse_layers:
        return histograms, {}
    filled: dict[str, Counts] = {}
    gate, *_, down = spec.expert_projections
    widths = {gate: spec.hidden_size, down: spec.moe_intermediate_size}
    layers, fallback = {}, []
    for layer in map(spec.layer, spec.sparse_layers):
        names = [f"{spec.experts_of(layer)}.{expert}" for expert in range(spec.experts)]
        tokens = [int(histograms[f"{x}.{gate}.input"].sum()) // widths[gate] for x in names]
        layers[layer] = {"tokens": tokens}
        few = [(x, seen) for x, seen in zip(names, tokens, strict=True) if seen < min_tokens]
        fallback += [{"name": name, "tokens": seen} for name, seen in few]
        for projection in widths if few else ():
            pooled = reduce(add, (histograms[f"{x}.{projection}.input"] for x in names))
            filled |= {f"{name}.{projection}.input": pooled for name, _ in few}
    facts = {"min_tokens": min_tokens, "rule": _RULE, "layers": layers, "fallback": fallback}
    # A ChainMap writes only to its first map, but its type requires all of them to be mutable.
    return ChainMap(filled, cast(dict[str, Counts], histograms)), facts


def of_enough_tokens(
    mean_squares: Mapping[str, MeanSquare], facts: Mapping[str, Any]
) -> dict[str, MeanSquare]:
    """Leaves out the inputs of experts that fell back: too few tokens say little of a channel.

    `facts` are those of `with_fallback`. The scales of these experts' weights have the least error
    of the weights themselves.
    """
    few = {item["name"] for item in facts.get("fallback", ())}
    return {
        name: means
        for name, means in mean_squares.items()
        if name.removesuffix(".input").rpartition(".")[0] not in few
    }


def fallback_warnings(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns one line on the experts that fell back, naming the first few; () if none did."""
    few = sorted(facts.get("fallback", ()), key=lambda item: item["tokens"])
    if not few:
        return ()
    total = sum(len(layer["tokens"]) for layer in facts["layers"].values())
    named = ", ".join(f"{item['name']} ({item['tokens']})" for item in few[:3])
    more = f" and {len(few) - 3} more in report.json" if len(few) > 3 else ""
    return (
        f"{len(few)} of {total} experts saw fewer than {facts['min_tokens']} tokens, and take the"
        f" input scales of all experts of their layer together: {named}{more}; more or more varied"
        " samples would reach them",
    )
