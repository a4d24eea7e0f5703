"""Watching a model run: one exact histogram per distinct linear input, key and value.

q/k/v read one tensor and so do gate/up: it is counted once. Each expert of a mixture has inputs of
its own. Keys (after RoPE) and values are counted where they enter the cache, and queries (after
RoPE), if asked for, where they enter attention. What the model computes at padding is not counted.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from calibrate.attention import tap_queries
from calibrate.batches import Batch
from calibrate.counting import Counter, make_counter
from calibrate.experts import tap_experts
from calibrate.finite import require_finite
from calibrate.histogram import CodeDtype, Histogram
from calibrate.sharing import require_shared_inputs
from octet.calibration import Observation
from octet.errors import ConfigError, NumericsError, UnsupportedError
from octet.model import ModelSpec

__all__ = ["LayerObserver", "Observer", "check_totals", "observations_of", "observe"]


class LayerObserver:
    """Counts what flows in decoder layers while `run` computes a batch.

    `slots` maps the names of the tensors to count, those of the layers, to slots of `counter`. NaN
    and Inf are looked for after each `patience` passes, since a GPU runs dry while it is asked.
    """

    def __init__(
        self, spec: ModelSpec, counter: Counter, slots: Mapping[str, int], patience: int = 1
    ) -> None:
        self.counter = counter
        self._patience = patience
        self._unchecked: list[tuple[Batch, Callable[[DynamicCache], torch.Tensor]]] = []
        self._spec = spec
        self._slots = slots
        self._batch: Batch | None = None
        self._real: torch.Tensor | None = None  # bool [B*T] of the batch, once an expert asks
        self._locating = False

    @contextmanager
    def watching(self, layer: Any, index: int) -> Iterator[None]:
        """While active, `layer`, the module of decoder layer `index`, is watched."""
        prefix = self._spec.layer(index)
        with ExitStack() as stack:
            for name in self._slots:
                module_name = name.removeprefix(f"{prefix}.").removesuffix(".input")
                if not name.startswith(f"{prefix}.") or not name.endswith(".input"):
                    continue
                if ".experts." not in name:
                    hook = self._hook(name)
                    handle = layer.get_submodule(module_name).register_forward_pre_hook(hook)
                    stack.callback(handle.remove)
            stack.enter_context(tap_experts(layer, prefix, self._spec, self.count_rows))
            if self._spec.generic:
                linears = [x for x in self._spec.linears(index) if ".experts." not in x.name]
                stack.enter_context(require_shared_inputs(layer, prefix, linears))
            if f"{prefix}.self_attn.query" in self._slots:
                stack.enter_context(tap_queries(layer.self_attn, self._count_query(prefix)))
            yield

    def run(self, batch: Batch, compute: Callable[[DynamicCache], torch.Tensor]) -> torch.Tensor:
        """What `compute(cache)` gives, which passes `batch` through layers and must do it again.

        NumericsError is that of `require_finite`; ConfigError, that the GPU has no room for it.
        """
        result = self._watched(batch, compute)
        self._unchecked.append((batch, compute))
        if len(self._unchecked) >= self._patience:
            self.require_finite()
        return result

    @torch.inference_mode()
    def require_finite(self) -> None:
        """NumericsError names the first tensor in which NaN or Inf was counted, if any was."""
        unchecked, self._unchecked = self._unchecked, []
        if not unchecked:
            return
        bad = self.counter.bad()
        if not bad:
            return
        self._locating = True  # the same passes again, looking at each tensor
        try:
            for batch, compute in unchecked:
                self._watched(batch, compute)
        finally:
            self._locating = False
        names = [name for name, slot in self._slots.items() if slot in bad]
        raise NumericsError(
            f"NaN or Inf was counted in {', '.join(names[:3])}"
            f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}, but not found when the"
            " same batches ran again: the model does not compute the same twice; run it again, or"
            " with --device cpu"
        )

    def _watched(
        self, batch: Batch, compute: Callable[[DynamicCache], torch.Tensor]
    ) -> torch.Tensor:
        self._batch, self._real = batch, None
        try:
            with self.counter.beside():
                return compute(_WatchedCache(self))
        except torch.OutOfMemoryError:
            rows, tokens = batch.token_ids.shape
            less = "a smaller --batch-size" if rows > 1 else "a smaller --max-length"
            raise ConfigError(
                f"the GPU ran out of memory in a batch of {rows} x {tokens} tokens: give {less},"
                " or --device cpu"
            ) from None
        finally:
            self._batch = None

    def count(self, name: str, x: torch.Tensor) -> None:
        """Counts `x` [B, T, ...] of the batch that is running."""
        if self._batch is None:  # someone else runs the model: not ours to count
            return
        if self._locating:
            rows = zip(self._batch.origins, x, self._batch.lengths, strict=True)
            require_finite(name, [(origin, row[:length]) for origin, row, length in rows])
        else:
            self.counter.add(self._slots[name], x, self._batch.lengths)

    def count_rows(self, name: str, rows: torch.Tensor, token_index: torch.Tensor) -> torch.Tensor:
        """Counts those of `rows` [n, K] that are no padding, and returns `rows`; see `Tap`."""
        batch = self._batch
        if batch is None:
            return rows
        width = batch.token_ids.shape[1]
        real = rows
        if min(batch.lengths) < width:
            if self._real is None:
                lengths = torch.tensor(batch.lengths)[:, None]
                self._real = (torch.arange(width) < lengths).flatten().to(token_index.device)
            kept = self._real[token_index]
            real, token_index = rows[kept], token_index[kept]
        if self._locating:
            sample = token_index // width
            found = [(origin, real[sample == i]) for i, origin in enumerate(batch.origins)]
            require_finite(name, [(origin, part) for origin, part in found if len(part)])
        else:
            self.counter.add(self._slots[name], real, None)
        return rows

    def count_cache(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Counts `key` and `value`, both [B, H, T, D]."""
        attention = f"{self._spec.layer(layer)}.self_attn"
        for x in (key, value):
            if (x.shape[1], x.shape[3]) != (self._spec.kv_heads, self._spec.head_dim):
                raise UnsupportedError(
                    f"{attention} caches {x.shape[1]} heads of {x.shape[3]} values, where"
                    f" config.json says {self._spec.kv_heads} of {self._spec.head_dim}: such a"
                    " cache is not supported"
                )
        self.count(f"{attention}.key", key.transpose(1, 2))
        self.count(f"{attention}.value", value.transpose(1, 2))

    def _count_query(self, prefix: str) -> Callable[[torch.Tensor], None]:
        return lambda query: self.count(f"{prefix}.self_attn.query", query.transpose(1, 2))

    def _hook(self, name: str) -> Any:
        def hook(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0]
            if x.dim() == 2 and self._batch is not None:  # an expert of all tokens, in some models
                x = x.reshape(*self._batch.token_ids.shape, -1)
            self.count(name, x)

        return hook


class _WatchedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """A cache that stores nothing: each batch is one forward pass from position 0."""

    def __init__(self, observer: LayerObserver) -> None:
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


class Observer:
    """Runs batches through a whole decoder, without its logits, and counts what flows.

    `histograms` and `observations` have the keys that `octet.calibration.Calibration` lists.
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
        """Ends the counting; `histograms` stay."""
        self._counts = self.counter.counts()
        self.counter.close()

    @property
    def histograms(self) -> dict[str, Histogram]:
        """The histogram of each observed tensor, of everything that ran so far."""
        counts = self.counter.counts() if self._counts is None else self._counts
        return {
            name: Histogram(counts[slot], self._code_dtype)
            for slot, name in enumerate(self.observations)
        }

    @torch.inference_mode()
    def run(self, batch: Batch) -> None:
        """One forward pass; NumericsError, on a GPU up to 15 passes later, names a NaN or Inf."""
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
    """An `Observer` of `model`, whose hooks are gone when the block ends.

    `threads` count on a CPU; `make_counter` chooses if not given. `queries` are observed if asked.
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
    """What is observed of `layer`, or of all, in the order in which the model computes it.

    `queries` too, if an engine may round them: a linear's width more to count in every layer.
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
    """RuntimeError unless every tensor was counted once for each of `tokens`.

    The experts of a layer share its tokens, `experts_per_token` for each. It guards against a
    transformers release that routes its tensors differently.
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
