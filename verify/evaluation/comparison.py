"""Compares several artifacts on the same held-out tokens: a row each, and their differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octet.statistics import FEW, Interval, interval
from verify.evaluation.scores import Evaluation, Scores
from verify.evaluation.worst import WorstToken, worst_tokens

__all__ = ["Comparison", "Row", "compare", "plain"]


@dataclass(frozen=True)
class Row:
    """Results of one artifact. Intervals hold with 95 %; changes are relative, 0.01 is 1 % worse.

    `change` is the change of the perplexity from the reference's, or from the first row's if there
    is no reference. `kl` is KL(reference ‖ artifact) in nats, the mean over the tokens; `kl_p90`
    and `kl_max` are over single tokens. `kl_from_first` and `change_from_first` are differences
    from the first row, paired by sample; None for the first row itself. `tasks` are
    lm-evaluation-harness' results. `worst` are the tokens that differ most from the reference, or
    from the first row if there is no reference. `proof` says what proves a server, if it was
    compared with golden records.
    """

    name: str
    perplexity: Interval
    change: Interval | None
    kl: Interval | None
    kl_p90: float | None
    kl_max: float | None
    kl_from_first: Interval | None
    change_from_first: Interval | None
    tokens: int
    samples: int
    tasks: dict[str, Interval] = field(default_factory=dict)
    worst: tuple[WorstToken, ...] = ()
    proof: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Results of all artifacts.

    `k` tokens of each distribution are compared; `warnings` are lines for the user.
    """

    samples_path: str
    samples: int
    tokens: int
    max_length: int
    k: int
    reference: str | None
    reference_perplexity: Interval | None
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns plain data; a missing bound is null.

        The first row's figures come first, for scripts that evaluate one artifact.
        """
        first = {"perplexity": self.rows[0].perplexity.mean, "tokens": self.tokens}
        data: dict[str, Any] = plain(first | asdict(self) | {"confidence": 0.95})
        return data


def compare(evaluation: Evaluation, tasks: Sequence[Mapping[str, Interval]] = ()) -> Comparison:
    """Computes every artifact's row; `tasks` are lm-evaluation-harness' results for each row."""
    found, reference, sequences = evaluation.targets, evaluation.reference, evaluation.sequences
    tokens = np.array([len(nll) for nll in found[0].nll], np.float64)
    base = reference or (found[0] if len(found) > 1 else None)
    worst = [
        () if base is None or one is base else worst_tokens(one, base, sequences, evaluation.decode)
        for one in found
    ]
    rows = [_row(one, base, found[0] if index else None, tokens) for index, one in enumerate(found)]
    return Comparison(
        samples_path=str(sequences.path),
        samples=len(tokens),
        tokens=int(tokens.sum()),
        max_length=sequences.max_length,
        k=evaluation.k,
        reference=None if reference is None else reference.name,
        reference_perplexity=None if reference is None else _perplexity(reference, tokens),
        rows=tuple(
            replace(
                row,
                tasks=dict(tasks[index]) if tasks else {},
                worst=worst[index],
                proof=evaluation.proofs.get(row.name),
            )
            for index, row in enumerate(rows)
        ),
        warnings=_warnings_of_size(len(tokens)),
    )


def _row(
    one: Scores, base: Scores | None, first: Scores | None, tokens: NDArray[np.float64]
) -> Row:
    positions = None if one.kl is None else np.sort(np.concatenate(one.kl))
    kl_from_first = None
    if one.kl is not None and first is not None and first.kl is not None:
        kl_from_first = interval(_sums(one.kl) - _sums(first.kl), tokens)
    return Row(
        name=one.name,
        perplexity=_perplexity(one, tokens),
        change=None if base is None else _change(one, base, tokens),
        kl=None if one.kl is None else interval(_sums(one.kl), tokens),
        kl_p90=None if positions is None else float(positions[math.ceil(0.9 * len(positions)) - 1]),
        kl_max=None if positions is None else float(positions[-1]),
        kl_from_first=kl_from_first,
        change_from_first=None if first is None else _change(one, first, tokens),
        tokens=int(tokens.sum()),
        samples=len(tokens),
    )


def _perplexity(one: Scores, tokens: NDArray[np.float64]) -> Interval:
    return interval(_sums(one.nll), tokens).map(math.exp)


def _change(one: Scores, base: Scores, tokens: NDArray[np.float64]) -> Interval:
    """Returns the relative change of the perplexity, from paired log-likelihoods.

    On the same tokens, most of what makes a text hard cancels.
    """
    return interval(_sums(one.nll) - _sums(base.nll), tokens).map(math.expm1)


def _sums(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.array([value.sum() for value in values])


def _warnings_of_size(samples: int) -> tuple[str, ...]:
    if samples < 2:
        return ("one sample has no confidence interval: samples are what varies independently",)
    if samples < FEW:
        return (
            f"{samples} samples make Student's intervals, which may be far too narrow: give {FEW}"
            " or more, better 64",
        )
    return ()


def plain(data: Any) -> Any:
    """Replaces NaN and Inf by None, because JSON has neither."""
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
