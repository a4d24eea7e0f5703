"""Watching a model run: one exact histogram per distinct linear input, key and value.

q/k/v read one tensor and so do gate/up: it is counted once. Keys (after RoPE) and values are
counted where they enter the cache. What the model computes at padding is not counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from calibrate.batches import Batch
from calibrate.counting import Counter
from calibrate.histogram import CodeDtype, Histogram
from octet.calibration import Observation
from octet.errors import NumericsError
from octet.model import ModelSpec

__all__ = ["Observer", "observe"]


class Observer:
    """Runs batches through a decoder, without its logits, and counts what flows.

    `histograms` and `observations` have the keys that `octet.calibration.Calibration` lists.
    """

    def __init__(self, model: Any, spec: ModelSpec, counter: Counter) -> None:
        dtype: torch.dtype = model.dtype
        code_dtype: CodeDtype = "float16" if dtype == torch.float16 else "bfloat16"
        self.observations = _observations(spec, code_dtype, str(dtype).removeprefix("torch."))
        self.histograms = {name: Histogram.empty(code_dtype) for name in self.observations}
        self._decoder = model.base_model
        self._spec = spec
        self._counter = counter
        self._batch: Batch | None = None

    @torch.inference_mode()
    def run(self, batch: Batch) -> None:
        """One forward pass; NumericsError names the first tensor that holds NaN or Inf."""
        self._batch = batch
        try:
            self._decoder(
                input_ids=batch.token_ids, past_key_values=_WatchedCache(self), use_cache=True
            )
        finally:
            self._batch = None

    def check(self, tokens: int) -> None:
        """RuntimeError unless every tensor was counted once for each of `tokens`.

        It guards against a transformers release that routes its tensors differently.
        """
        spec = self._spec
        kv = spec.kv_heads * spec.head_dim
        widths = {linear.input: linear.in_features for linear in spec.linears()}
        for name, histogram in self.histograms.items():
            expected = tokens * widths.get(name, kv)
            if histogram.total != expected:
                raise RuntimeError(f"{name}: counted {histogram.total} elements, not {expected}")

    def count(self, name: str, x: torch.Tensor) -> None:
        """Counts `x` [B, T, ...] of the batch that is running."""
        if self._batch is None:  # someone else runs the model: not ours to count
            return
        bad = self._counter.add(self.histograms[name].counts, x, self._batch.lengths)
        if bad:
            raise _not_finite(name, x, self._batch)

    def count_cache(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Counts `key` and `value`, both [B, H, T, D]."""
        attention = f"{self._spec.layer(layer)}.self_attn"
        self.count(f"{attention}.key", key.transpose(1, 2))
        self.count(f"{attention}.value", value.transpose(1, 2))


class _WatchedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """A cache that stores nothing: each batch is one forward pass from position 0."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._observer.count_cache(layer_idx, key_states, value_states)
        return key_states, value_states


@contextmanager
def observe(model: Any, spec: ModelSpec, *, threads: int | None = None) -> Iterator[Observer]:
    """An `Observer` of `model`, whose hooks are gone when the block ends.

    `threads` count; half as many as torch's if not given. torch's own threads spin for a while
    after each operation and hold their cores, so that on 2 cores a second counting thread gains
    nothing.
    """
    counter = Counter(threads or max(1, torch.get_num_threads() // 2))
    counter.warm_up()
    observer = Observer(model, spec, counter)
    handles = []
    try:
        for name, observation in observer.observations.items():
            if observation.kind == "input":
                module = model.get_submodule(observation.consumers[0])
                hook = _input_hook(observer, name)
                handles.append(module.register_forward_pre_hook(hook))
        yield observer
    finally:
        for handle in handles:
            handle.remove()
        counter.close()


def _input_hook(observer: Observer, name: str) -> Any:
    def hook(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        observer.count(name, inputs[0])

    return hook


def _observations(
    spec: ModelSpec, code_dtype: CodeDtype, observed_dtype: str
) -> dict[str, Observation]:
    """What is observed, in the order in which the model computes it."""
    found: dict[str, Observation] = {}

    def add(name: str, kind: Any, consumers: tuple[str, ...]) -> None:
        found[name] = Observation(
            kind=kind, consumers=consumers, code_dtype=code_dtype, observed_dtype=observed_dtype
        )

    linears = list(spec.linears())
    for linear in linears:
        if linear.input in found:
            continue
        add(linear.input, "input", tuple(x.name for x in linears if x.input == linear.input))
        attention, _, projection = linear.name.rpartition(".")
        if projection == "q_proj":
            add(f"{attention}.key", "key", (attention,))
            add(f"{attention}.value", "value", (attention,))
    return found


def _not_finite(name: str, x: torch.Tensor, batch: Batch) -> NumericsError:
    rows = [
        (origin, row[:length])
        for origin, row, length in zip(batch.origins, x, batch.lengths, strict=True)
    ]
    counted = [(origin, int((~part.isfinite()).sum()), part) for origin, part in rows]
    first = next(origin for origin, bad, _ in counted if bad)
    nans = sum(int(part.isnan().sum()) for _, _, part in counted)
    bad = sum(bad for _, bad, _ in counted)
    total = sum(part.numel() for _, _, part in counted)
    return NumericsError(
        f"{name} holds {nans} NaN and {bad - nans} Inf among {total} values of one batch (first in"
        f" the sample of {first}): the model itself is broken there, or overflows in this dtype"
    )
