"""Lists what is observed: each distinct linear input, key and value, with one histogram.

q/k/v read one tensor and so do gate/up: it is counted once. Each expert of a mixture has inputs of
its own. Keys (after RoPE) and values are counted where they enter the cache. Queries (after RoPE),
if requested, are counted where they enter attention. Activations at padding are not counted.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.observe.histogram import CodeDtype
from octet.artifacts.calibration import Observation
from octet.model.spec import ModelSpec

__all__ = ["check_totals", "observations_of"]


def observations_of(
    spec: ModelSpec, dtype: torch.dtype, layer: int | None = None, *, queries: bool = False
) -> dict[str, Observation]:
    """Returns the observations of `layer`, or of all layers, in the order the model computes them.

    `queries` are included for an engine that may round them; they add a linear's width to count in
    every layer.
    """
    observed_dtype = str(dtype).removeprefix("torch.")
    code_dtype: CodeDtype = "float16" if dtype == torch.float16 else "bfloat16"
    found: dict[str, Observation] = {}

    def add(name: str, kind: Any, consumers: tuple[str, ...]) -> None:
        found[name] = Observation(
            kind=kind, consumers=consumers, code_dtype=code_dtype, observed_dtype=observed_dtype
        )

    consumers: dict[str, list[str]] = {}
    for linear in spec.linears(layer):
        consumers.setdefault(linear.input, []).append(linear.name)
    for name, linears in consumers.items():
        add(name, "input", tuple(linears))
        block, inside, _ = linears[0].partition(".self_attn.")
        attention = f"{block}.self_attn"
        if inside and f"{attention}.key" not in found:
            add(f"{attention}.key", "key", (attention,))
            add(f"{attention}.value", "value", (attention,))
            if queries:
                add(f"{attention}.query", "query", (attention,))
    return found


def check_totals(spec: ModelSpec, counts: Mapping[str, NDArray[np.int64]], tokens: int) -> None:
    """Raises RuntimeError unless every tensor was counted once for each of `tokens`.

    The experts of a layer share its tokens, `experts_per_token` for each. The check guards against
    a transformers release that routes its tensors differently.
    """
    kv = spec.kv_heads * spec.head_dim
    widths = {linear.input: linear.in_features for linear in spec.linears()}
    query = spec.heads * spec.head_dim
    widths |= {f"{spec.layer(index)}.self_attn.query": query for index in range(spec.layers)}
    found: dict[str, int] = {}
    expected: dict[str, int] = {}
    for name, histogram in counts.items():
        experts, _, rest = name.partition(".experts.")
        where, share = name, 1
        if rest:
            where = f"{experts}.experts.*.{rest.partition('.')[2]}"
            share = spec.experts_per_token
        found[where] = found.get(where, 0) + int(histogram.sum())
        expected[where] = tokens * widths.get(name, kv) * share
    for where, total in found.items():
        if total != expected[where]:
            raise RuntimeError(f"{where}: counted {total} elements, not {expected[where]}")
