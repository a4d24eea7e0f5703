"""Makes rows of limited length from token sequences: cut, split or refused, then packed or not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from octet.errors import SampleError

__all__ = ["Limited", "LongPolicy", "Row", "limit_rows", "pack_rows"]

LongPolicy = Literal["cut", "split", "refuse"]


@dataclass(frozen=True)
class Row:
    """Token ids that the model runs as one sequence, and the sample or samples they are from."""

    ids: Sequence[int]
    origin: str
    sample: int  # index of the (first) sample


@dataclass(frozen=True)
class Limited:
    """Rows in the samples' order, the number of over-long samples, and of tokens cut from them."""

    rows: tuple[Row, ...]
    over_long: int
    tokens_cut: int


def limit_rows(
    sequences: Iterable[Sequence[int]], origins: Sequence[str], max_length: int, long: LongPolicy
) -> Limited:
    """Limits sequences to rows of at most `max_length` tokens.

    A longer sample is cut at its end, or split into several rows that begin where the one before
    ended, or refused: SampleError with the first one's length and how many there are.
    """
    rows: list[Row] = []
    over: list[tuple[str, int]] = []
    for sample, (ids, origin) in enumerate(zip(sequences, origins, strict=True)):
        if len(ids) <= max_length:
            rows.append(Row(ids, origin, sample))
            continue
        over.append((origin, len(ids)))
        if long == "cut":
            rows.append(Row(ids[:max_length], origin, sample))
        elif long == "split":
            starts = enumerate(range(0, len(ids), max_length), start=1)
            rows += [Row(ids[i : i + max_length], f"{origin}, part {n}", sample) for n, i in starts]
    if over and long == "refuse":
        origin, length = over[0]
        more = f" (as are {len(over) - 1} more)" if len(over) > 1 else ""
        raise SampleError(
            f"{origin} is {length} tokens long, {max_length} are allowed{more};"
            " shorten it, raise --max-length, or choose --long cut or --long split"
        )
    cut = sum(length - max_length for _, length in over) if long == "cut" else 0
    return Limited(tuple(rows), len(over), cut)


def pack_rows(rows: Sequence[Row], max_length: int, end: int) -> list[Row]:
    """Packs whole `rows` into fewer ones of at most `max_length` tokens, joined by the token `end`.

    First fit, longest first; ties keep their order. A row that already ends in `end` does not get
    another one. Within a packed row positions run on, and a sample attends to those before it.
    """
    bins: list[list[Row]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        for index, left in enumerate(room):
            extra = bins[index][-1].ids[-1] != end
            if len(row.ids) + extra <= left:
                bins[index].append(row)
                room[index] -= len(row.ids) + extra
                break
        else:
            bins.append([row])
            room.append(max_length - len(row.ids))
    return [_join(members, end) for members in bins]


def _join(members: Sequence[Row], end: int) -> Row:
    if len(members) == 1:
        return members[0]
    ids: list[int] = []
    for row in members:
        if ids and ids[-1] != end:
            ids.append(end)
        ids.extend(row.ids)
    return Row(ids, " + ".join(row.origin for row in members), members[0].sample)
