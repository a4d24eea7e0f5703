"""Golden records in one row, without padding, through one decoder layer after another.

Linears and norms meet each real token once, a thousand or so at a time. Attention meets records in
batches, padded: keys that no query sees still decide in which order a sum is taken. In the last
layer only the tokens that are compared ask, and only they go on behind its attention.
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

# Queries are left out by multiples of it: torch's attention takes them in blocks of 32 or 64 on a
# CPU, and a block of another size may be summed in another order.
_BLOCK = 64
_UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}  # a last bit, relative


def packs(
    batches: Sequence[Batch],
    golden: GoldenSet,
    most: int,
    device: torch.device,
    *,
    padded: bool = False,
) -> list["Pack"]:
    """`batches` of records, in order: as many together as have at most `most` tokens, or one.

    If `padded`, layers meet each batch by itself and with its padding, for a model whose attention
    may not be one that can be told records apart.
    """
    found: list[list[Batch]] = []
    for batch in batches:
        if found and not padded and sum(x.tokens for x in [*found[-1], batch]) <= most:
            found[-1].append(batch)
        else:
            found.append([batch])
    return [Pack(part, golden, device, padded=padded) for part in found]


class Pack:
    """Batches whose n real tokens are one row; m of those tokens are compared with a server's.

    `records` and `at` int64 [m] say which record each of the m is of, and at which position.
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
        """The embeddings [1, n, H]; with `noise`, each is off by its last bit at most."""
        found = []
        for batch in self._batches:
            states = model.embed(batch.token_ids)
            if noise is not None:
                off = 2 * torch.rand(states.shape, generator=noise).to(states.device) - 1
                states = (states.float() * (1 + off * _UNIT[states.dtype])).to(states.dtype)
            found.append(real(states, batch))
        return torch.cat(found)[None]

    def forward(self, model: LayeredModel, layer: Any, states: Tensor) -> Tensor:
        """[1, n, H] through `layer`, which is in memory: [1, n, H]."""
        if self._padded:
            (rows,) = self._rows
            found = model.forward(rows.padded(states[:, None])[:, 0], _NoCache())
            return rows.packed(found[:, :, None])[:, :, 0]
        if self._alone:
            return model.forward(states, _NoCache())
        with replace_attention(layer.self_attn, self._attention):
            return model.forward(states, _NoCache(), position_ids=self._positions)

    def finish(self, model: LayeredModel, layer: Any, states: Tensor) -> Tensor:
        """[1, n, H] through `layer`, the last one: [1, m, H] of the tokens that are compared.

        UnsupportedError where transformers does not let attention be replaced.
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
            if not self._alone:  # what was replaced was not asked: all records met in one attention
                raise UnsupportedError(
                    f"{model.checkpoint.path}: transformers {transformers.__version__} lets nobody"
                    f" replace the attention of {model.spec.architecture}, so that nothing can be"
                    " predicted: install another release of it, or give --no-predict"
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
        """`calibrate.decoder.attention.Attention` of each batch by itself: [1, n, H, D].

        Where a layer has a mask, such as that of a window, it is one of the whole row; what it lets
        the first record of a batch see, which is the longest, holds for all of them. If `compared`,
        what is before the first token that is compared may be zeros.
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
    """A batch [B, T]; `places` int64 [n] are those of its real tokens among B * T, None for all.

    No token of any row is compared before `first`.
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
        """[1, H, n, D] → [B, H, T, D], zeros where there is no token."""
        found = x[0].transpose(0, 1)
        if self.places is not None:
            room = found.new_zeros(self.count * self.length, *found.shape[1:])
            found = room.index_copy_(0, self.places, found)
        return found.view(self.count, self.length, *found.shape[1:]).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """[B, T, H, D] → [1, n, H, D]."""
        found = x.flatten(0, 1)
        return (found if self.places is None else found[self.places])[None]


class _Attended(Exception):
    """The attention of a layer is known: the rest of the pass is not needed."""


class _NoCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """Keeps nothing: each pass has all that it needs."""

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value
