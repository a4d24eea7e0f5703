"""Measures KL divergence and perplexity of next-token distributions on held-out text.

Keeps the reference's last hidden states, [tokens, H] in the model's dtype, instead of its logits,
which would be V/H times as large. The head is applied to a few rows at a time, always in float32:
bfloat16 logits would add about 1e-4 nats of their own.

Samples are independent, tokens of one sample are not. So standard errors are those of a mean over
clusters, sqrt(S/(S-1) · Σ (sum of sample - tokens of sample · mean)²) / tokens. Upper bounds come
from `octet.statistics`, which documents how often the true value exceeds one.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrate.decoder.arithmetic import linear
from calibrate.decoder.experts import experts_one_by_one
from calibrate.samples.batches import Batch, real
from octet.errors import NumericsError
from octet.limit import LEAST_SAMPLES
from octet.model.spec import ModelSpec
from octet.statistics import moments, upper_bound

__all__ = [
    "Advance",
    "Divergence",
    "Reference",
    "Sums",
    "Tally",
    "evaluation_batches",
]

_ELEMENTS = 1 << 22  # logits at a time: 16 MB in float32, and briefly three times that

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Divergence:
    """Comparison of a model with its reference on the same tokens.

    `kl` is KL(reference ‖ model) in nats, the mean over `tokens` positions with its standard error;
    `kl_p90` and `kl_max` are of single positions. Perplexities are over the tokens that follow
    another in their sample. `log_ratio` is the mean difference of their log-likelihoods: the
    model's perplexity is exp(log_ratio) times the reference's. `samples_predicted` counts samples
    of two tokens or more; only those have a perplexity.

    The bounds are one-sided, with 95 % confidence, for text like this. They hold only for a model
    that was not chosen on the same text.
    """

    kl: float
    kl_error: float
    kl_bound: float
    kl_p90: float
    kl_max: float
    perplexity: float
    reference_perplexity: float
    log_ratio: float
    log_ratio_error: float
    log_ratio_bound: float
    tokens: int
    samples: int
    samples_predicted: int

    @property
    def change(self) -> float:
        """Relative change of the perplexity: 0.01 is 1 % worse."""
        return math.expm1(self.log_ratio)

    @property
    def change_bound(self) -> float:
        """Upper bound of the relative change of the perplexity."""
        return math.expm1(self.log_ratio_bound)


@dataclass(frozen=True)
class Sums:
    """Sums over the tokens of each sample, float64 [samples].

    `kl` is over all tokens, of which there are `tokens`. `change` is the model's -log likelihood
    minus the reference's, over the `predicted` tokens that follow another.
    """

    kl: NDArray[np.float64]
    tokens: NDArray[np.float64]
    change: NDArray[np.float64]
    predicted: NDArray[np.float64]

    def figures(self) -> dict[str, float]:
        """Returns means with their standard errors and bounds, as fields of a `Divergence`."""
        found: dict[str, float] = {}
        for name, sums, sizes in (
            ("kl", self.kl, self.tokens),
            ("log_ratio", self.change, self.predicted),
        ):
            used = sizes > 0
            mean, error, bound = _clustered(sums[used], sizes[used])
            found |= {name: mean, f"{name}_error": error, f"{name}_bound": bound}
        return found


class Reference:
    """A model's present output on some batches; `compare` measures later changes against it.

    `hidden` are the last hidden states [tokens, H] of each batch, padding left out.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        batches: Sequence[Batch],
        *,
        advance: Advance = lambda tokens: None,
    ) -> None:
        """Runs one forward pass over `batches`."""
        self.batches = tuple(batches)
        self._model, self._spec = model, spec
        self.head: Tensor = model.get_output_embeddings().weight.float()  # [V, H]
        self.rows_at_once = max(1, _ELEMENTS // self.head.shape[0])
        self.hidden: list[Tensor] = []
        with experts_one_by_one(model, spec):
            for batch in self.batches:
                self.hidden.append(real(self.states(batch), batch))
                advance(batch.tokens)

    def states(self, batch: Batch) -> Tensor:
        """Computes the last hidden states [B, T, H]."""
        decoder = self._model.base_model
        ids = batch.token_ids.to(self._model.device)
        states: Tensor = decoder(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def compare(
        self,
        *,
        advance: Advance = lambda tokens: None,
        states: Callable[[int], Tensor] | None = None,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> Divergence:
        """Runs one forward pass and compares it with the reference's output, as `tally` does.

        Raises NumericsError if a logit is NaN or Inf.
        """
        return self.tally(advance=advance, states=states, head=head).divergence()

    @torch.inference_mode()
    def tally(
        self,
        *,
        advance: Advance = lambda tokens: None,
        states: Callable[[int], Tensor] | None = None,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> "Tally":
        """Runs one forward pass and compares each token with the reference's output.

        If given, `states(i)` supplies the last hidden states [tokens, H] of batch i instead, and
        `head` maps hidden states [n, H] to logits [n, V], both in float32.
        """
        found = Tally()
        for index, batch in enumerate(self.batches):
            now = real(self.states(batch), batch) if states is None else states(index)
            rows = self._rows(self.hidden[index], now, head or self._logits)
            found.add(batch, rows)
            advance(batch.tokens)
        return found

    def _logits(self, rows: Tensor) -> Tensor:
        return linear(rows, self.head)

    def _rows(
        self, before: Tensor, now: Tensor, head: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(now), self.rows_at_once):
            part = slice(start, start + self.rows_at_once)
            yield self._logits(before[part].float()), head(now[part].float())


class Tally:
    """Accumulates KL divergences and likelihoods of tokens, batch by batch."""

    def __init__(self) -> None:
        self._divergences: list[Tensor] = []  # float64 on the CPU, as all are
        self._likelihoods: list[Tensor] = []
        self._samples: list[int] = []

    def add(self, batch: Batch, logits: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Adds a batch.

        `logits` yields float32 [n, V] of the reference and of the model, in chunks, for the
        batch's real tokens in order.
        """
        ids = real(batch.token_ids, batch)
        predicts = torch.ones(len(ids), dtype=torch.bool)
        predicts[torch.tensor(batch.lengths).cumsum(0) - 1] = False
        following = ids.roll(-1)[:, None]
        kl, likelihoods = [], []
        done = 0
        for before, now in logits:
            target = following[done : done + len(now)].to(now.device)
            p, q = before.log_softmax(-1), now.log_softmax(-1)
            likelihoods.append(torch.stack((p.gather(1, target)[:, 0], q.gather(1, target)[:, 0])))
            kl.append(q.neg_().add_(p).mul_(p.exp_()).sum(-1))
            done += len(now)
        self._divergences.append(torch.cat(kl).double().cpu())
        self._likelihoods.append(torch.cat(likelihoods, dim=1).double().cpu()[:, predicts])
        self._samples += batch.lengths

    def sums(self) -> Sums:
        """Returns the sums over each sample. Raises NumericsError if a logit was NaN or Inf."""
        kl, nll = self._found()
        predicted = [max(0, length - 1) for length in self._samples]
        return Sums(
            _by_sample(kl, self._samples),
            np.array(self._samples, np.float64),
            _by_sample(nll[1] - nll[0], predicted),
            np.array(predicted, np.float64),
        )

    def divergence(self) -> Divergence:
        """Returns the result over all tokens. Raises NumericsError if a logit was NaN or Inf."""
        kl, nll = self._found()
        both = nll.mean(dim=1).exp() if nll.shape[1] else torch.full((2,), math.nan)
        return Divergence(
            **self.sums().figures(),
            kl_p90=float(kl.kthvalue(math.ceil(0.9 * len(kl))).values),
            kl_max=float(kl.max()),
            perplexity=float(both[1]),
            reference_perplexity=float(both[0]),
            tokens=len(kl),
            samples=len(self._samples),
            samples_predicted=sum(length > 1 for length in self._samples),
        )

    def _found(self) -> tuple[Tensor, Tensor]:
        """Returns KL [tokens], and -log likelihoods [2, n] of the tokens that follow another."""
        kl, nll = torch.cat(self._divergences), -torch.cat(self._likelihoods, dim=1)
        if not (kl.isfinite().all() and nll.isfinite().all()):
            raise NumericsError("the quantized model's logits hold NaN or Inf on held-out text")
        return kl, nll


def evaluation_batches(batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """Chooses batches evenly spread over `batches`, because those are sorted by length.

    Together they have at least `tokens` tokens and `LEAST_SAMPLES` samples, or are all of them.
    """
    total = sum(batch.tokens for batch in batches)
    if total <= tokens:
        return list(batches)
    count = max(1, math.ceil(len(batches) * tokens / total))
    while True:
        at = sorted({round((i + 0.5) * len(batches) / count - 0.5) for i in range(count)})
        chosen = [batches[index] for index in at]
        enough = sum(len(batch.lengths) for batch in chosen) >= LEAST_SAMPLES
        if len(chosen) == len(batches) or (
            enough and sum(batch.tokens for batch in chosen) >= tokens
        ):
            return chosen
        count += 1


def _by_sample(values: Tensor, sizes: Sequence[int]) -> NDArray[np.float64]:
    """Sums float64 `values` [n] over consecutive samples of `sizes`."""
    parts = torch.split(values, list(sizes))
    return np.array([float(part.sum()) for part in parts], np.float64)


def _clustered(sums: NDArray[np.float64], sizes: NDArray[np.float64]) -> tuple[float, float, float]:
    """Returns the mean, its standard error and its upper bound."""
    if not len(sums):
        return math.nan, math.nan, math.nan
    if len(sums) == 1:
        return float(sums[0] / sizes[0]), math.inf, math.inf
    found = moments(sums, sizes)
    return float(found.mean), float(found.error), upper_bound(sums, sizes)
