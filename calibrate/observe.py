"""Watching a model run: one exact histogram per distinct linear input, key and value.

q/k/v read one tensor and so do gate/up: it is counted once. Keys (after RoPE) and values are
counted where they enter the cache. What the model computes at padding is not counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from calibrate.batches import Batch
from calibrate.counting import Counter, make_counter
from calibrate.histogram import CodeDtype, Histogram
from octet.calibration import Observation
from octet.errors import NumericsError
from octet.model import ModelSpec

__all__ = ["Observer", "observe"]


class Observer:
    """Runs batches through a decoder, without its logits, and counts what flows.

    `histograms` and `observations` have the keys that `octet.calibration.Calibration` lists.
    """

    def __init__(self, model: Any, spec: ModelSpec, threads: int | None) -> None:
        dtype: torch.dtype = model.dtype
        self._code_dtype: CodeDtype = "float16" if dtype == torch.float16 else "bfloat16"
        self.observations = _observations(spec, self._code_dtype, str(dtype).removeprefix("torch."))
        self.counter: Counter = make_counter(model.device, len(self.observations), threads=threads)
        self._slots = {name: slot for slot, name in enumerate(self.observations)}
        self._decoder = model.base_model
        self._spec = spec
        self._batch: Batch | None = None
        self._locating = False
        self._counts: NDArray[np.int64] | None = None  # once closed

    def close(self) -> None:
        """Ends the counting; `histograms` stay."""
        self._counts = self.counter.counts()
        self.counter.close()

    @property
    def histograms(self) -> dict[str, Histogram]:
        """The histogram of each observed tensor, of everything that ran so far."""
        counts = self.counter.counts() if self._counts is None else self._counts
        return {name: Histogram(counts[i], self._code_dtype) for name, i in self._slots.items()}

    @torch.inference_mode()
    def run(self, batch: Batch) -> None:
        """One forward pass; NumericsError names the first tensor that holds NaN or Inf."""
        self._forward(batch)
        if self.counter.bad():
            self._locating = True  # the same pass again, looking at each tensor
            try:
                self._forward(batch)
            finally:
                self._locating = False

    def _forward(self, batch: Batch) -> None:
        self._batch = batch
        try:
            self._decoder(
                input_ids=batch.token_ids.to(self._decoder.device),
                past_key_values=_WatchedCache(self),
                use_cache=True,
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
        if self._locating:
            error = _not_finite(name, x, self._batch)
            if error is not None:
                raise error
            return
        self.counter.add(self._slots[name], x, self._batch.lengths)

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

    `threads` count on a CPU; `make_counter` chooses if not given.
    """
    observer = Observer(model, spec, threads)
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
        observer.close()


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


def _not_finite(name: str, x: torch.Tensor, batch: Batch) -> NumericsError | None:
    """What to say of x [B, T, ...] if it holds NaN or Inf."""
    rows = [
        (origin, row[:length].flatten(1))
        for origin, row, length in zip(batch.origins, x, batch.lengths, strict=True)
    ]
    broken = [(origin, part) for origin, part in rows if not part.isfinite().all()]
    if not broken:
        return None
    origin, first = broken[0]
    channel = int((~first.isfinite()).any(dim=0).nonzero()[0])
    nans = sum(int(part.isnan().sum()) for _, part in broken)
    infs = sum(int(part.isinf().sum()) for _, part in broken)
    total = sum(part.numel() for _, part in rows)
    return NumericsError(
        f"{name} holds {nans} NaN and {infs} Inf among {total} values of one batch, first in"
        f" channel {channel} in the sample of {origin}: the model itself is broken there, or"
        " overflows in this dtype"
    )
