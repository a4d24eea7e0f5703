"""Observes a whole model in memory, so that its passes can be timed beside bare ones.

Calibration observes one layer at a time (`calibrate.observe.sweep`), by the same hooks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from calibrate.observe.counting_cpu import Counter
from calibrate.observe.layer_observer import LayerObserver
from calibrate.observe.observer import observations_of
from calibrate.samples.batches import Batch
from octet.model.spec import ModelSpec

__all__ = ["observing"]


@contextmanager
def observing(
    model: Any, spec: ModelSpec, counter_of: Callable[[int], Counter]
) -> Iterator[tuple[Callable[[Sequence[Batch]], None], Counter]]:
    """Yields a function that runs batches through `model`, and the counter that observes them.

    `counter_of` makes it, for a number of tensors.
    """
    names = observations_of(spec, model.dtype)
    counter = counter_of(len(names))
    observer = LayerObserver(spec, counter, {name: slot for slot, name in enumerate(names)})

    def forward(ids: torch.Tensor, cache: Any) -> Any:
        return model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def run(batches: Sequence[Batch]) -> None:
        for batch in batches:
            ids = batch.token_ids.to(model.device)
            observer.run(batch, partial(forward, ids))
        observer.check()

    with ExitStack() as stack:
        stack.callback(counter.close)
        for index, layer in enumerate(model.base_model.layers):
            stack.enter_context(observer.watching(layer, index))
        yield run, counter
