"""Observes a model as it runs: one exact histogram per distinct linear input, key and value.

q/k/v read one tensor and so do gate/up: it is counted once. Each expert of a mixture has inputs of
its own. Keys (after RoPE) and values are counted where they enter the cache. Queries (after RoPE),
if requested, are counted where they enter attention. Activations at padding are not counted.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from calibrate.observe.counting_cpu import Counter, make_counter
from calibrate.observe.histogram import CodeDtype, Histogram
from calibrate.observe.layer_observer import LayerObserver
from calibrate.samples.batches import Batch
from octet.artifacts.calibration import Observation
from octet.model.spec import ModelSpec

__all__ = ["Observer", "check_totals", "observations_of", "observe"]


class Observer:
    """Runs batches through a whole decoder, without its logits, and counts activations.

    `histograms` and `observations` have the keys that `octet.artifacts.calibration.Calibration`
    lists.
    """

    def __init__(
        self, model: Any, spec: ModelSpec, threads: int | None, *, queries: bool = False
    ) -> None:
        dtype: torch.dtype = model.dtype
        self.observations = observations_of(spec, dtype, queries=queries)
        self._code_dtype: CodeDtype = "float16" if dtype == torch.float16 else "bfloat16"
        slots = {name: slot for slot, name in enumerate(self.observations)}
        counter = make_counter(model.device, len(slots), threads=threads)
        patience = 16 if model.device.type == "cuda" else 1
        self.layers = LayerObserver(spec, counter, slots, patience)
        self._decoder = model.base_model
        self._spec = spec
        self._counts: NDArray[np.int64] | None = None  # once closed

    @property
    def counter(self) -> Counter:
        return self.layers.counter

    @counter.setter
    def counter(self, counter: Counter) -> None:
        self.layers.counter = counter

    def close(self) -> None:
        """Ends the counting; `histograms` stay available."""
        self._counts = self.counter.counts()
        self.counter.close()

    @property
    def histograms(self) -> dict[str, Histogram]:
        """The histogram of each observed tensor, over everything that ran so far."""
        counts = self.counter.counts() if self._counts is None else self._counts
        return {
            name: Histogram(counts[slot], self._code_dtype)
            for slot, name in enumerate(self.observations)
        }

    @torch.inference_mode()
    def run(self, batch: Batch) -> None:
        """Runs one forward pass.

        Raises NumericsError for a NaN or Inf, on a GPU up to 15 passes later.
        """
        token_ids = batch.token_ids.to(self._decoder.device)

        def compute(cache: DynamicCache) -> torch.Tensor:
            output = self._decoder(input_ids=token_ids, past_key_values=cache, use_cache=True)
            hidden: torch.Tensor = output.last_hidden_state
            return hidden

        self.layers.run(batch, compute)

    def check(self, tokens: int) -> None:
        """See `check_totals`."""
        check_totals(self._spec, {name: h.counts for name, h in self.histograms.items()}, tokens)


@contextmanager
def observe(
    model: Any, spec: ModelSpec, *, threads: int | None = None, queries: bool = False
) -> Iterator[Observer]:
    """Yields an `Observer` of `model`, whose hooks are removed when the block ends.

    `threads` threads count on a CPU; by default `make_counter` chooses. `queries` are observed if
    set.
    """
    observer = Observer(model, spec, threads, queries=queries)
    with ExitStack() as stack:
        stack.callback(observer.close)
        for index, layer in enumerate(model.base_model.layers):
            stack.enter_context(observer.layers.watching(layer, index))
        yield observer
        observer.layers.require_finite()


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
