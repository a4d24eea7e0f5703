"""Plans what a run computes: all its batches, made from the samples before anything is loaded.

A sample becomes a row; a long one is cut, split into several rows, or refused; short ones may be
packed into one. The batches depend only on the samples' lengths and their order. The facts record
what was done to the samples.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from calibrate.samples.batches import Batch, chunk_ends, make_batches
from calibrate.samples.sample import Sample
from calibrate.samples.source import LongPolicy
from calibrate.samples.tokens import encode
from octet.errors import CheckpointError, ConfigError, SampleError

__all__ = ["Limited", "LongPolicy", "Row", "SamplePlan", "limit_rows", "pack_rows", "plan_batches"]


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


@dataclass(frozen=True)
class SamplePlan:
    """All batches of a run, in order; chunks 0 to c hold the first `chunk_ends[c]` samples."""

    batches: tuple[Batch, ...]
    chunk_ends: tuple[int, ...]
    facts: dict[str, Any]  # for the manifest; JSON types only
    warnings: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Number of real tokens, which are those that are observed."""
        return sum(batch.tokens for batch in self.batches)

    def summary(self) -> str:
        """Returns a one-line summary for people."""
        facts, batches = self.facts, len(self.batches)
        parts = [
            f"{self.chunk_ends[-1]} samples, {self.tokens:,} tokens in {batches}"
            f" batch{'es' if batches > 1 else ''}",
            f"{facts['padding_share']:.1%} padding",
        ]
        if facts["packed"]:
            parts.append(f"packed into {facts['rows']} rows, where a sample sees those before it")
        if facts["over_long"]:
            done = "split into rows" if facts["long"] == "split" else "cut"
            left = f", {facts['tokens_cut']:,} tokens left out" if facts["tokens_cut"] else ""
            limit = facts["max_length"]
            parts.append(f"{facts['over_long']} longer than {limit} tokens {done}{left}")
        return "; ".join(parts)


def plan_batches(
    samples: Sequence[Sample],
    tokenizer: Any,
    *,
    max_length: int,
    vocab_size: int,
    batch_size: int,
    pack: bool = False,
    long: LongPolicy = "cut",
) -> SamplePlan:
    """Makes batches of at most `batch_size` rows of at most `max_length` tokens.

    `long` decides what becomes of a longer sample: its first `max_length` tokens, several rows, or
    an error. With `pack`, rows hold several samples, joined by the tokenizer's end token. Raises
    SampleError naming a sample that cannot be used, and ConfigError if there is no end token.
    """
    end = _end_token(tokenizer, vocab_size) if pack else None
    encoded = encode(samples, tokenizer, vocab_size=vocab_size)
    limited = limit_rows(encoded, [sample.origin for sample in samples], max_length, long)
    ends = chunk_ends(len(samples))
    batches: list[Batch] = []
    for chunk, unjoined in _by_chunk(limited.rows, ends):
        rows = unjoined if end is None else pack_rows(unjoined, max_length, end)
        ids, origins = [row.ids for row in rows], [row.origin for row in rows]
        batches += make_batches(ids, origins, batch_size=batch_size, chunk=chunk)
    tokens = sum(batch.tokens for batch in batches)
    slots = sum(batch.token_ids.numel() for batch in batches)
    template, warnings = _template(samples, tokenizer)
    facts = {
        "max_length": max_length,
        "long": long,
        "over_long": limited.over_long,
        "tokens_cut": limited.tokens_cut,
        "packed": pack,
        "tokens_joining": tokens - sum(len(row.ids) for row in limited.rows),
        "conversations": sum(bool(sample.messages) for sample in samples),
        "chat_template": template,
        "rows": sum(len(batch.lengths) for batch in batches),
        "padding_share": round(1 - tokens / slots, 6),
        "batch_shapes": _shapes(batches),
        "chunk_ends": list(ends),
    }
    return SamplePlan(tuple(batches), ends, facts, warnings)


def _end_token(tokenizer: Any, vocab_size: int) -> int:
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("--pack joins samples by the tokenizer's end token, and it has none")
    if end >= vocab_size:
        raise CheckpointError(
            f"{tokenizer.name_or_path}: the tokenizer's end token is {end}, the model has"
            f" {vocab_size}: they do not belong together; copy the model's own tokenizer"
        )
    return int(end)


def _by_chunk(rows: Sequence[Row], ends: Sequence[int]) -> Iterator[tuple[int, list[Row]]]:
    """Groups rows by the chunk of their sample; `rows` are in the order of the samples."""
    chunk_of = [chunk for chunk, (a, b) in enumerate(_spans(ends)) for _ in range(a, b)]
    for chunk, members in groupby(rows, key=lambda row: chunk_of[row.sample]):
        yield chunk, list(members)


def _spans(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip((0, *ends), ends, strict=False)


def _shapes(batches: Sequence[Batch]) -> list[list[int]]:
    """Returns [B, T, number in succession] of all batches.

    FP32 sums, and so the last bits, depend on them.
    """
    shapes = (tuple(batch.token_ids.shape) for batch in batches)
    return [[*shape, len(list(same))] for shape, same in groupby(shapes)]


def _template(samples: Sequence[Sample], tokenizer: Any) -> tuple[str | None, tuple[str, ...]]:
    """Returns the chat template that was used, if any, and warnings about it."""
    if not any(sample.messages for sample in samples):
        return None, ()
    own = getattr(tokenizer, "chat_template", None)
    if not own:
        return "plain default", (
            "the model brings no chat template: conversations were rendered by the plain default"
            " that octet serves such models with",
        )
    if "strftime_now" in str(own):
        return "the tokenizer's", (
            "the chat template writes today's date: the tokens, and so the histograms, are not"
            " those of another day",
        )
    return "the tokenizer's", ()
