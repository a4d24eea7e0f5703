"""Attention of the ONNX decoder, with results that do not depend on how a sequence was split.

FP8 rounding turns a difference in the last bit into a whole step of the grid, which after a few
layers may change the next token. So the graph makes ONNX Runtime add the same numbers in the same
order, whether a token is computed in prefill or decode, alone or in a batch:

- Key j of a row is always the token at position j. The S cached slots and the T new rows are
  concatenated, then the new rows are written at their positions; slots beyond them are masked.
- One query row is added and its result dropped: for a single row ONNX Runtime would use a
  matrix-vector kernel, which sums in another order.

`Positional` does both. `Concatenated` does neither: it is for TensorRT, whose kernels guarantee no
order of summation.

A layer with a sliding window attends to what the mask allows at the last `sliding_window`
positions. The graph derives the window from the positions, so that all models have the same inputs.

The tables of RotaryEmbedding are cos and sin of position · f, with f = theta^(-2i/D) for pair i of
D = rotary_dim, changed by ModelSpec.rope_scaling. They are computed in float32, operation by
operation as in transformers' rope utilities: the model was trained with these numbers.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from export.onnx.graph import Graph
from octet.model.spec import ModelSpec, RopeScaling

__all__ = ["Concatenated", "KeyOrder", "Positional", "rope_tables"]


class KeyOrder(Protocol):
    """Joins cached and new rows, and attends to them.

    `mask` is the graph's input, with the cached slots first.
    """

    def prepare(self, graph: Graph, spec: ModelSpec, past: str, positions: str, mask: str) -> None:
        """Adds the nodes that all layers share; `past` is any cache input."""
        ...

    def join(self, graph: Graph, past: str, new: str, name: str) -> str:
        """Joins [B, Hkv, S, D] and [B, Hkv, T, D] → [B, Hkv, S+T, D]."""
        ...

    def attend(
        self, graph: Graph, query: str, key: str, value: str, name: str, *, sliding: bool
    ) -> str:
        """Adds attention: query [B, H, T, D] → [B, H, T, D]; `sliding` in a layer with a window."""
        ...


class Concatenated:
    """Keys in the order of concatenation: cached slots first, then the new rows."""

    def prepare(self, graph: Graph, spec: ModelSpec, past: str, positions: str, mask: str) -> None:
        self.scale = float(spec.head_dim) ** -0.5
        self.masks = {False: mask}
        if spec.sliding_layers and spec.sliding_window is not None:
            window = self._window(graph, spec.sliding_window, positions, mask)
            self.masks[True] = graph.node("And", [mask, window], "mask.sliding")

    def join(self, graph: Graph, past: str, new: str, name: str) -> str:
        return graph.node("Concat", [past, new], name, axis=2)

    def attend(
        self, graph: Graph, query: str, key: str, value: str, name: str, *, sliding: bool
    ) -> str:
        inputs = [query, key, value, self.masks[sliding]]
        return graph.node("Attention", inputs, name, scale=self.scale)

    def _window(self, graph: Graph, size: int, positions: str, mask: str) -> str:
        """Marks the keys at one of the last `size` positions: bool [B, 1, T, S+T].

        Slot j holds position j, and the new rows follow the cached tokens.
        """
        zero, one, two = (
            graph.array(name, np.array([n], np.int64))
            for n, name in enumerate(("zero", "one", "two"))
        )
        axes = graph.array("axes.head_token", np.array([1, 3], np.int64))
        position = graph.node("Unsqueeze", [positions, axes], "mask.position")  # [B, 1, T, 1]
        cached = graph.node("Slice", [position, zero, one, two], "mask.cached")
        total = graph.node("Shape", [mask], "mask.total", start=3, end=4)
        tokens = graph.node("Shape", [positions], "mask.tokens", start=1, end=2)
        slots = graph.node("Sub", [total, tokens], "mask.slots")
        column = count(graph, total, "mask.column")  # [S+T]
        moved = graph.node("Sub", [column, slots], "mask.moved")
        new = graph.node("Add", [moved, cached], "mask.new")  # [B, 1, 1, S+T]
        is_new = graph.node("GreaterOrEqual", [column, slots], "mask.is_new")
        key = graph.node("Where", [is_new, new, column], "mask.key_position")
        return within(graph, size, key, position)


class Positional:
    """Keys in the order of positions: every key at the index that is its position."""

    def prepare(self, graph: Graph, spec: ModelSpec, past: str, positions: str, mask: str) -> None:
        self.scale = float(spec.head_dim) ** -0.5
        self.zero = graph.array("zero", np.array([0], np.int64))
        self.one = graph.array("one", np.array([1], np.int64))
        self.two = graph.array("two", np.array([2], np.int64))
        self.last = graph.array("minus_one", np.array([-1], np.int64))
        allowed = self._mask_by_position(graph, past, positions, mask)
        self.masks = {}
        if len(spec.sliding_layers) < spec.layers:
            self.masks[False] = self._padded(graph, allowed)
        if spec.sliding_layers and spec.sliding_window is not None:
            window = within(graph, spec.sliding_window, "mask.column", "mask.position")
            self.masks[True] = self._padded(
                graph, graph.node("And", [allowed, window], "mask.sliding")
            )
        self.slots = self._slots(graph, spec, positions)

    def join(self, graph: Graph, past: str, new: str, name: str) -> str:
        # Appending the new rows makes space; ScatterND then writes them at their positions.
        room = graph.node("Concat", [past, new], f"{name}.room", axis=2)
        return graph.node("ScatterND", [room, self.slots, new], name)

    def attend(
        self, graph: Graph, query: str, key: str, value: str, name: str, *, sliding: bool
    ) -> str:
        rows = [query, self.zero, self.one, self.two]
        first = graph.node("Slice", rows, f"{name}.first_row")
        padded = graph.node("Concat", [query, first], f"{name}.query_padded", axis=2)
        inputs = [padded, key, value, self.masks[sliding]]
        context = graph.node("Attention", inputs, f"{name}.padded", scale=self.scale)
        return graph.node("Slice", [context, self.zero, self.last, self.two], name)

    def _padded(self, graph: Graph, mask: str) -> str:
        """Adds a row to the mask for the extra query: [B, 1, T, S+T] → [B, 1, T+1, S+T]."""
        rows = [mask, self.zero, self.one, self.two]
        first = graph.node("Slice", rows, f"{mask}.first_row")
        return graph.node("Concat", [mask, first], f"{mask}.padded", axis=2)

    def _mask_by_position(self, graph: Graph, past: str, positions: str, mask: str) -> str:
        """Reorders the mask's key axis by position: bool [B, 1, T, S+T].

        Slot j is column j if j is below the number of cached tokens, which is the position of the
        row's first new token. The columns of the new rows, S and on, follow.
        """
        axes = graph.array("axes.head_token", np.array([1, 3], np.int64))
        position = graph.node("Unsqueeze", [positions, axes], "mask.position")  # [B, 1, T, 1]
        cached = graph.node("Slice", [position, self.zero, self.one, self.two], "mask.cached")
        slots = graph.node("Shape", [past], "mask.slots", start=2, end=3)
        total = graph.node("Shape", [mask], "mask.total", start=3, end=4)
        column = count(graph, total, "mask.column")
        gap = graph.node("Sub", [slots, cached], "mask.gap")
        moved = graph.node("Add", [column, gap], "mask.moved")  # [B, 1, 1, S+T]
        end = graph.node("Sub", [total, self.one], "mask.end")
        inside = graph.node("Min", [moved, end], "mask.inside")
        is_new = graph.node("GreaterOrEqual", [column, cached], "mask.is_new")
        source = graph.node("Where", [is_new, inside, column], "mask.source")
        shape = graph.node("Shape", [mask], "mask.shape")
        everywhere = graph.node("Expand", [source, shape], "mask.sources")
        allowed = graph.node("GatherElements", [mask, everywhere], "mask.gathered", axis=3)
        causal = graph.node("LessOrEqual", [column, position], "mask.causal")
        return graph.node("And", [allowed, causal], "mask.by_position")

    def _slots(self, graph: Graph, spec: ModelSpec, positions: str) -> str:
        """Computes the indices at which ScatterND writes the new rows: int64 [B, Hkv, T, 3].

        The last axis is (batch row, head, position).
        """
        batch = graph.node("Shape", [positions], "slots.batch", start=0, end=1)
        tokens = graph.node("Shape", [positions], "slots.tokens", start=1, end=2)
        heads = graph.array("slots.heads", np.array([spec.kv_heads], np.int64))
        shape = graph.node("Concat", [batch, heads, tokens, self.one], "slots.shape", axis=0)
        row = count(graph, batch, "slots.row")
        head = graph.array("slots.head", np.arange(spec.kv_heads, dtype=np.int64))
        parts = []
        for name, value, axes in (
            ("row", row, [1, 2, 3]),
            ("head", head, [0, 2, 3]),
            ("position", positions, [1, 3]),
        ):
            where = graph.array(f"slots.{name}.axes", np.array(axes, np.int64))
            spread = graph.node("Unsqueeze", [value, where], f"slots.{name}.spread")
            parts.append(graph.node("Expand", [spread, shape], f"slots.{name}.index"))
        return graph.node("Concat", parts, "slots.index", axis=-1)


def count(graph: Graph, length: str, name: str) -> str:
    """Adds int64 0 … length - 1; `length` is an int64 value of shape [1]."""
    start = graph.array("range.start", np.array(0, np.int64))
    step = graph.array("range.step", np.array(1, np.int64))
    scalar = graph.node("Squeeze", [length], f"{name}.length")
    return graph.node("Range", [start, scalar, step], name)


def within(graph: Graph, size: int, key: str, query: str) -> str:
    """Tests whether position `key` is one of the `size` positions that end with `query`."""
    window = graph.array("mask.window", np.array(size, np.int64))
    before = graph.node("Sub", [query, window], "mask.before_window")
    return graph.node("Greater", [key, before], "mask.within_window")


Float32Array = npt.NDArray[np.float32]


def rope_tables(spec: ModelSpec) -> tuple[Float32Array, Float32Array]:
    """Computes cos and sin, float32 [max_positions, rotary_dim/2]."""
    dim = spec.rotary_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = np.float32(1) / np.power(np.float32(spec.rope_theta), exponents)
    if spec.rope_scaling is not None:
        frequencies = _scaled(frequencies, spec.rope_scaling)
    angles = np.arange(spec.max_positions, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def _scaled(frequencies: Float32Array, scaling: RopeScaling) -> Float32Array:
    """Scales RoPE's inverse frequencies [rotary_dim/2] as `linear` or `llama3` does."""
    slowed = frequencies / np.float32(scaling.factor)
    if scaling.type == "linear":
        return slowed
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    positions = scaling.original_max_positions
    assert low is not None and high is not None and positions is not None  # llama3 has all
    lengths = np.float32(2 * np.pi) / frequencies  # wavelengths, in positions
    kept = (np.float32(positions) / lengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - kept) * frequencies / np.float32(scaling.factor) + kept * frequencies
    middle = np.where(lengths > np.float32(positions / low), slowed, blended)
    return np.where(lengths < np.float32(positions / high), frequencies, middle)
