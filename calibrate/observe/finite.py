"""Where a tensor holds NaN or Inf: channel and sample, among the values as they are counted."""

from collections.abc import Sequence

import torch

from octet.errors import NumericsError

__all__ = ["require_finite"]


def require_finite(name: str, rows: Sequence[tuple[str, torch.Tensor]]) -> None:
    """NumericsError if any of `rows`, (origin, [n, ...]), holds NaN or Inf as it is counted."""
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
