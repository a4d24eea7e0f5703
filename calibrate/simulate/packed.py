"""Runs golden records through decoder layers, packed in one row without padding.

Linears and norms process each real token once, about a thousand at a time. Attention runs on padded
batches of records, because even keys that no query sees affect the order of summation. In the last
layer, attention runs only for queries needed for the compared tokens, and only those tokens
continue past it.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache

from calibrate.decoder.attention import replace_attention
from calibrate.decoder.layers import LayeredModel
from calibrate.samples.batches import Batch, real, real_tokens
from octet.artifacts.golden import GoldenSet
from octet.errors import UnsupportedError

__all__ = ["Pack", "packs"]

# Queries are skipped in multiples of this: torch's attention on a CPU takes them in blocks of 32 or
# 64, and a block of another size may be summed in another order.
_BLOCK = 64
_LAST_BIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}  # its size relative to the value


def packs(
    batches: Sequence[Batch],
    golden: GoldenSet,
    most: int,
    device: torch.device,
    *,
    padded: bool = False,
) -> list["Pack"]:
    """Packs `batches` of records, in order, up to `most` tokens a pack, but at least one batch.

    If `padded`, layers process each batch by itself, with its padding, for a model whose attention
    may not support separating the records of a row.
    """
    found: list[list[Batch]] = []
    for batch in batches:
        if found and not padded and sum(x.tokens for x in [*found[-1], batch]) <= most:
            found[-1].append(batch)
        else:
            found.append([batch])
    return [Pack(part, golden, device, padded=padded) for part in found]


class Pack:
    """Batches with their n real tokens in one row; m of the tokens are compared with a server's.

    `records` and `at`, int64 [m], are the record and the position of each compared token.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        golden: GoldenSet,
        device: torch.device,
        *,
        padded: bool = False,
    ) -> None:
        self._batches, self._padded = tuple(batches), padded
        self.tokens = sum(batch.tokens for batch in batches)
        lengths = [length for batch in batches for length in batch.lengths]
        of = [int(origin) for batch in batches for origin in batch.origins]
        counts = [len(golden.records[record].tops) for record in of]
        self.records = np.repeat(of, counts)
        self.at = np.concatenate([np.arange(count) for count in counts])
        first = np.cumsum(lengths) - counts
        self._compared = torch.from_numpy(np.repeat(first, counts) + self.at).to(device)
        self._positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
        self._rows = [_Rows.of(batch, golden, device) for batch in batches]
        self._alone = len(lengths) == 1

    def embed(self, model: LayeredModel, noise: torch.Generator | None) -> Tensor:
        """Returns embeddings [1, n, H]; with `noise`, each is off by at most its last bit."""
        found = []
        for batch in self._batches:
            states = model.embed(batch.token_ids)
            if noise is not None:
                off = 2 * torch.rand(states.shape, generator=noise).to(states.device) - 1
                states = (states.float() * (1 + off * _LAST_BIT[states.dtype])).to(states.dtype)
            found.append(real(states, batch))
        return torch.cat(found)[None]

    def forward(self, model: LayeredModel, layer: Any, states: Tensor) -> Tensor:
        """Runs hidden states [1, n, H] through `layer`, which is in memory; returns [1, n, H]."""
        if self._padded:
            (rows,) = self._rows
            found = model.forward(rows.padded(states[:, None])[:, 0], _NoCache())
            return rows.packed(found[:, :, None])[:, :, 0]
        if self._alone:
            return model.forward(states, _NoCache())
        with replace_attention(layer.self_attn, self._attention):
            return model.forward(states, _NoCache(), position_ids=self._positions)

    def finish(self, model: LayeredModel, layer: Any, states: Tensor) -> Tensor:
        """Runs [1, n, H] through `layer`, the last one; returns [1, m, H] of the compared tokens.

        Raises UnsupportedError if transformers does not let attention be replaced.
        """
        if self._padded:
            return self.forward(model, layer, states)[:, self._compared]
        attended: list[Tensor] = []

        def attend(*args: Any, **options: Any) -> Any:
            out, _ = self._attention(*args, compared=True, **options)
            attended.append(out[:, self._compared])
            raise _Attended

        with replace_attention(layer.self_attn, attend), suppress(_Attended):
            whole = model.forward(states, _NoCache(), position_ids=self._positions)
            if not self._alone:  # the replacement never ran: one attention mixed all records
                raise UnsupportedError(
                    f"{model.checkpoint.path}: transformers {transformers.__version__} does not"
                    f" let the attention of {model.spec.architecture} be replaced, so nothing can"
                    " be predicted: install another release of it, or give --no-predict"
                )
            return whole[:, self._compared]
        with replace_attention(layer.self_attn, lambda *_, **__: (attended[0], None)):
            few, at = states[:, self._compared], self._positions[:, self._compared]
            return model.forward(few, _NoCache(), position_ids=at)

    def _attention(
        self,
        inner: Any,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        compared: bool = False,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Applies `calibrate.decoder.attention.Attention` batch by batch; returns [1, n, H, D].

        If a layer has a mask, such as that of a window, it covers the whole row. The part for the
        first record of a batch, which is the longest, holds for all records of the batch. If
        `compared`, output before the first compared token may be zeros.
        """
        found, start = [], 0
        for rows in self._rows:
            first = rows.first if compared else 0
            own = slice(start, start + rows.length)
            seen = None if mask is None else mask[..., own, own][..., first:, :]
            if first and seen is None:
                seen = torch.ones(rows.length, rows.length, dtype=torch.bool, device=key.device)
                seen = seen.tril_()[None, None, first:]
            ours = slice(start, start + rows.tokens)
            q, k, v = (rows.padded(x[:, :, ours]) for x in (query, key, value))
            out, _ = inner(module, q[:, :, first:], k, v, seen, **options)  # [B, T - first, H, D]
            found.append(rows.packed(pad(out, (0, 0, 0, 0, first, 0))))
            start += rows.tokens
        return torch.cat(found, 1), None


@dataclass(frozen=True)
class _Rows:
    """Layout of a batch [B, T].

    `places` int64 [n] are the indices of real tokens among B * T, None if all are real. No row has
    a compared token before `first`.
    """

    count: int
    length: int
    tokens: int
    first: int
    places: Tensor | None

    @classmethod
    def of(cls, batch: Batch, golden: GoldenSet, device: torch.device) -> "_Rows":
        count, length = batch.token_ids.shape
        least = min(
            size - len(golden.records[int(origin)].tops)
            for origin, size in zip(batch.origins, batch.lengths, strict=True)
        )
        places = None
        if batch.tokens < count * length:
            places = real_tokens(batch).flatten().nonzero()[:, 0].to(device)
        return cls(count, length, batch.tokens, least // _BLOCK * _BLOCK, places)

    def padded(self, x: Tensor) -> Tensor:
        """Converts [1, H, n, D] to [B, H, T, D], with zeros for padding."""
        found = x[0].transpose(0, 1)
        if self.places is not None:
            room = found.new_zeros(self.count * self.length, *found.shape[1:])
            found = room.index_copy_(0, self.places, found)
        return found.view(self.count, self.length, *found.shape[1:]).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """Converts [B, T, H, D] to [1, n, H, D]."""
        found = x.flatten(0, 1)
        return (found if self.places is None else found[self.places])[None]


class _Attended(Exception):
    """Ends a forward pass once a layer's attention is computed; the rest is not needed."""


class _NoCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """KV cache that stores nothing: each pass computes all keys and values itself."""

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value
