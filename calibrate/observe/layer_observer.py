"""Counts the activations of decoder layers, by hooks, while a batch passes through them.

Locates NaN and Inf by channel and sample, among the values as they are counted. Checks that linears
whose names say that they read one tensor do so.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from calibrate.decoder.attention import tap_queries
from calibrate.decoder.experts import tap_experts
from calibrate.observe.counting_cpu import Counter
from calibrate.samples.batches import Batch
from octet.errors import ConfigError, NumericsError, UnsupportedError
from octet.model.spec import Linear, ModelSpec

__all__ = ["LayerObserver", "require_finite", "require_shared_inputs"]


@contextmanager
def require_shared_inputs(layer: Any, prefix: str, linears: Iterable[Linear]) -> Iterator[None]:
    """While active, requires that linears of one `input` in decoder layer `prefix` read one tensor.

    Raises UnsupportedError if a linear reads another tensor than the first of them. It would be
    served with scales of a tensor that it never reads.
    """
    last: dict[str, torch.Tensor] = {}

    def hook_of(linear: Linear) -> Any:
        def hook(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            first = linear.input.removesuffix(".input")
            if linear.name == first:
                last[first] = args[0]
            elif first not in last or last[first].data_ptr() != args[0].data_ptr():
                raise UnsupportedError(
                    f"{linear.name} does not read what {first} reads, as their names promise:"
                    " this architecture is not supported"
                )

        return hook

    with ExitStack() as stack:
        for linear in linears:
            module = layer.get_submodule(linear.name.removeprefix(f"{prefix}."))
            stack.enter_context(module.register_forward_pre_hook(hook_of(linear)))
        yield


def require_finite(name: str, rows: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises NumericsError if any of `rows`, (origin, [n, ...]), holds NaN or Inf as counted."""
    parts = [(origin, _as_counted(row.flatten(1))) for origin, row in rows]
    broken = [(origin, part) for origin, part in parts if not part.isfinite().all()]
    if not broken:
        return
    origin, first = broken[0]
    channel = int((~first.isfinite()).any(dim=0).nonzero()[0])
    nans = sum(int(part.isnan().sum()) for _, part in broken)
    infs = sum(int(part.isinf().sum()) for _, part in broken)
    total = sum(part.numel() for _, part in parts)
    if all(bool(row.isfinite().all()) for _, row in rows):
        why = "it is finite in float32 but beyond bfloat16, in which values are counted"
    else:
        why = "the model itself is broken there, or overflows in this dtype"
    raise NumericsError(
        f"{name} holds {nans} NaN and {infs} Inf among {total} values of one batch, first in"
        f" channel {channel} in the sample of {origin}: {why}"
    )


def _as_counted(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16() if x.dtype == torch.float32 else x


class LayerObserver:
    """Counts the activations of decoder layers while `run` computes a batch.

    `slots` maps the names of the tensors to count, those of the layers, to slots of `counter`.
    """

    def __init__(self, spec: ModelSpec, counter: Counter, slots: Mapping[str, int]) -> None:
        self.counter = counter
        self._spec = spec
        self._slots = slots
        self._batch: Batch  # that is running
        self._real: torch.Tensor | None = None  # bool [B*T] of the batch, once needed
        self._squares = False
        self._locating = False
        self._unchecked: Callable[[], None] | None = None  # of the last batch

    @contextmanager
    def watching(self, layer: Any, index: int) -> Iterator[None]:
        """While active, observes `layer`, the module of decoder layer `index`."""
        prefix = self._spec.layer(index)
        with ExitStack() as stack:
            for name in self._slots:
                if not name.startswith(f"{prefix}.") or not name.endswith(".input"):
                    continue
                if ".experts." not in name:
                    module = name.removeprefix(f"{prefix}.").removesuffix(".input")
                    handle = layer.get_submodule(module).register_forward_pre_hook(self._hook(name))
                    stack.callback(handle.remove)
            stack.enter_context(tap_experts(layer, prefix, self._spec, self.count_rows))
            if self._spec.generic:
                linears = [x for x in self._spec.linears(index) if ".experts." not in x.name]
                stack.enter_context(require_shared_inputs(layer, prefix, linears))
            if f"{prefix}.self_attn.query" in self._slots:
                stack.enter_context(tap_queries(layer.self_attn, self._count_query(prefix)))
            yield

    def run(
        self,
        batch: Batch,
        compute: Callable[[DynamicCache], torch.Tensor],
        *,
        squares: bool = False,
    ) -> torch.Tensor:
        """Returns the result of `compute(cache)`, which passes `batch` through layers.

        With `squares`, also sums the squares of each channel of the linears' inputs.

        Checks the batch before this one for NaN and Inf, so that a GPU computes while the host
        prepares more; call `check` after the last. `compute` must be repeatable until then, since
        it runs again to locate a NaN or Inf. Raises NumericsError naming the first tensor in which
        one was counted, and ConfigError if the GPU runs out of memory.
        """
        self._squares = squares
        result = self._watched(batch, compute)
        bad = self.counter.bad()
        self.check()
        self._unchecked = lambda: self._require_good(bad(), batch, compute)
        return result

    def check(self) -> None:
        """Raises NumericsError, as `run` does, if NaN or Inf was counted in the last batch."""
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None:
            unchecked()

    def _require_good(
        self, bad: Sequence[int], batch: Batch, compute: Callable[[DynamicCache], torch.Tensor]
    ) -> None:
        if not bad:
            return
        self._locating = True  # the same pass again, checking each tensor
        try:
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

    def count(self, name: str, x: torch.Tensor) -> None:
        """Counts `x` [B, T, ...] of the batch that is running."""
        if self._locating:
            rows = zip(self._batch.origins, x, self._batch.lengths, strict=True)
            require_finite(name, [(origin, row[:length]) for origin, row, length in rows])
        else:
            squares = self._squares and name.endswith(".input")
            self.counter.add(self._slots[name], x, self._batch.lengths, squares=squares)

    def count_rows(self, name: str, rows: torch.Tensor, token_index: torch.Tensor) -> torch.Tensor:
        """Counts the `rows` [n, K] that are not padding, and returns `rows`; see `Tap`."""
        batch = self._batch
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
            self.counter.add(self._slots[name], real, None, squares=self._squares)
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
            if x.dim() == 2:  # a shared expert, in some models
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
