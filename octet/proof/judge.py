"""Decides whether a server's answers match its declared configuration, and if not, why.

A server is refused if some simulated faulty scenario explains its answers better than the best
conforming path does (likelihood-ratio test), if the answers are farther from that path than its own
repeats are (fit), or if too many prompts are far off (outlier test). It is as expected if it is not
refused and every fault that these prompts can show is excluded. Otherwise the verdict is
inconclusive, and more prompts should be sent.

docs/explanation/judge.md has the formulas, their sources, the error rates and the limits.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from octet.artifacts.golden import GoldenSet
from octet.artifacts.scenarios import Scenario, ScenarioSet
from octet.proof.causes import (
    ANOTHER_MODEL,
    CLOSER,
    Cause,
    cause_of,
    no_distribution,
    partly_wrong,
    undecided,
)
from octet.proof.declared import Declared
from octet.proof.divergence import Measure, measure
from octet.proof.divergence_bound import by_bound
from octet.proof.expected_range import expectations
from octet.proof.likelihood_ratio import BETA, Comparison
from octet.proof.responses import Response, complete, improper
from octet.proof.verdict import Outcome, Range, Score, Verdict, range_text, sentence
from octet.statistics import t_quantile

__all__ = ["ALPHA", "BETA", "judge", "unprovable"]

ALPHA = 1e-5  # probability of refusing a conforming server, over all interim analyses of a probe
# ln of the factor, of squared distances, by which answers must be nearer to a cause than to the
# best conforming path and, with the confidence below it, than to a model that predicts nothing.
_EXPLAINED = math.log(4)
_EXPLAINED_AT = 0.99
_FEWEST_PROMPTS = 3  # that show a cause: two may be alike by chance
_FLAT = 0.5  # share of a distribution that its likeliest tokens hold, below which it is flat
_POWER_SCALES = (
    " (scales of blocks and of activations rounded up to powers of two, as by vLLM's DeepGEMM)"
)
_INCOMPLETE = 1 / 24  # share of incomplete answers that "as expected" allows


def judge(
    golden: GoldenSet,
    scenarios: ScenarioSet | None,
    declared: Declared,
    responses: Sequence[Response],
    *,
    looks: int = 1,
    bound: float | None = None,
) -> Verdict:
    """Judges whether `responses` are those of a server as `declared`.

    The last response to each golden record counts. `looks` is the number of interim analyses that a
    probe may make in all, while its answers arrive. `bound` is the mean divergence in nats that is
    accepted where no conforming path was simulated (`octet.artifacts.serving_path.bound_of`).
    """
    last = {response.record: response for response in responses}
    count = len(golden.records)
    responses = [x for x in last.values() if 0 <= x.record < count]
    measured = measure(golden, responses)
    defects = [defect for defect in map(improper, responses) if defect]
    if defects:
        return _with_invalid(measured, defects, len(responses))
    if not measured.prompts:
        reason = "inconclusive: no answer can be compared with the golden records"
        return Verdict("inconclusive", measured, None, None, None, (), (), reason)
    comparison = None
    if scenarios is not None:
        comparison = Comparison.of(golden, scenarios, declared.paths, responses)
    if scenarios is None or comparison is None or not comparison.conforming:
        verdict = by_bound(measured, declared, bound, count, level=ALPHA / looks)
    else:
        whole = Comparison.shown(golden, scenarios, declared.paths)
        verdict = _Judgement(scenarios, comparison, whole, declared, measured, looks).verdict()
    partial = sum(not complete(golden.records[x.record], x) for x in responses)
    if verdict.outcome == "as_expected" and partial > len(responses) * _INCOMPLETE:
        why = f"{partial} of {len(responses)} answers end early or leave out log-probabilities"
        return replace(verdict, outcome="inconclusive", reason=f"inconclusive: {why}")
    return verdict


def unprovable(
    golden: GoldenSet, scenarios: ScenarioSet, declared: Declared, *, looks: int = 1
) -> str | None:
    """Returns why no server as `declared` can be proven, whatever it answers; None if one can.

    Other arguments are as for `judge`.
    """
    whole = Comparison.shown(golden, scenarios, declared.paths)
    if not whole.conforming:  # a bound decides
        return None
    return _Judgement(scenarios, whole, whole, declared, measure(golden, ()), looks).unprovable


def _with_invalid(measured: Measure, defects: Sequence[str], count: int) -> Verdict:
    """Returns the verdict when some of `count` answers hold values that are not log-probabilities.

    `defects` says for each of these answers what is wrong.
    """
    cause = no_distribution(defects[0])
    reason = (
        f"worse than expected: the log-probabilities of {len(defects)} of {count} answers"
        f" {cause.sentence}: {cause.remedy}"
    )
    return Verdict("worse", measured, None, None, cause, (), (), reason)


class _Judgement:
    """One decision. `whole` covers all golden records, `comparison` those that were answered."""

    def __init__(
        self,
        scenarios: ScenarioSet,
        comparison: Comparison,
        whole: Comparison,
        declared: Declared,
        measured: Measure,
        looks: int,
    ) -> None:
        self._scenarios, self._comparison, self._whole = scenarios, comparison, whole
        self._declared, self._measured = declared, measured
        self._level = ALPHA / 3 / looks  # of each of the three tests in one interim analysis
        self._best = comparison.best
        self._separations = {h: whole.separation(self._best, h) for h in whole.others}
        visible = [h for h in whole.others if self._is_visible(h)]
        self._visible = [h for h in visible if h in comparison.candidates]
        self._absent = [h for h in visible if h not in comparison.candidates]

    def verdict(self) -> Verdict:
        expected = self._expected()
        cause, doubt = None, self.unprovable
        outcome: Outcome = "inconclusive"
        if doubt is None:
            cause, outcome = self._refusal()
            doubt = None if cause is not None else self._doubt(expected)
        if doubt is not None:
            outcome = "inconclusive"
        against = f"where {range_text(expected)} is expected of {self._declared.label}"
        if self._has_power_scales():
            against += _POWER_SCALES
        reason = sentence(outcome, self._measured, against, cause, expected)
        if doubt is not None:
            reason += f"; {doubt}"
        return Verdict(
            outcome=outcome,
            measure=self._measured,
            expected=expected,
            path=self._best.path,
            cause=cause,
            ranking=self._ranking(),
            hidden=tuple(h.label for h in self._comparison.others if h not in self._visible),
            reason=reason,
        )

    @property
    def unprovable(self) -> str | None:
        """Returns why the answers can prove nothing; None if they can.

        They cannot where the distribution is flat and most faults are not visible. No server is
        refused there either, because the tests' error rates were not measured there.
        """
        answers = self._whole.answers
        held = float(answers.p.sum(-1)[answers.compared].mean())
        faults = [h for h in self._whole.others if h.fault is not None]
        hidden = len(faults) - sum(h.fault is not None for h in self._visible + self._absent)
        if held >= _FLAT or 2 * hidden <= len(faults):
            return None
        return (
            "the model's next-token distribution is nearly uniform, as with random weights: its"
            f" likeliest {answers.p.shape[-1]} tokens hold {held:.1%}, so a server's"
            f" log-probabilities cannot tell {hidden} of {len(faults)} simulated faults from"
            " rounding; use a trained model, or serve with --no-proof"
        )

    def _has_power_scales(self) -> bool:
        """Returns whether the answers show that the engine rounds the scales of blocks."""
        path = self._best.path
        stored = Scenario(path=path.model_copy(update={"power_scales": False}))
        if not path.power_scales or stored not in self._comparison.candidates:
            return path.power_scales
        z, prompts = self._comparison.against(self._best, stored)
        return z > t_quantile(_EXPLAINED_AT, prompts - 1)

    def _is_visible(self, other: Scenario) -> bool:
        """Returns whether all prompts suffice to tell `other` from a conforming server."""
        prompts = self._whole.against(other, self._best)[1]
        return self._excludable(other, prompts) or self._refusable(self._whole, other, prompts)

    def _excludable(self, other: Scenario, prompts: int) -> bool:
        """Returns whether a conforming server excludes `other` with probability 1 - BETA.

        That is on all prompts, if all are sent.
        """
        least = t_quantile(1 - BETA, prompts - 1)
        return self._separations[other] >= self._exclusion(self._whole, other, prompts) + least

    def _refusable(self, comparison: Comparison, other: Scenario, prompts: int) -> bool:
        """Returns whether a server of `other` is refused with probability 1 - BETA."""
        least = t_quantile(1 - BETA, prompts - 1)
        return (
            comparison.separation(other, self._best)
            >= self._threshold(comparison, other, prompts) + least
        )

    def _threshold(self, comparison: Comparison, other: Scenario, prompts: int) -> float:
        """Returns the z of `other` over the best path above which the server is refused."""
        level = self._level / len(comparison.others)
        least, most = (t_quantile(1 - x, prompts - 1) for x in (BETA, level))
        return max(least, most - comparison.separation(self._best, other))

    def _exclusion(self, comparison: Comparison, other: Scenario, prompts: int) -> float:
        """Returns the z of the best path over `other` above which `other` is excluded."""
        return max(
            0.0, t_quantile(1 - BETA, prompts - 1) - comparison.separation(other, self._best)
        )

    def _refusal(self) -> tuple[Cause | None, Outcome]:
        """Returns the cause and outcome of a refusal; None, "as_expected" if no test refuses."""
        comparison = self._comparison
        scores = {h: comparison.against(h, self._best) for h in self._visible}
        beaten = any(
            z > self._threshold(comparison, h, prompts) for h, (z, prompts) in scores.items()
        )
        misfit, prompts = comparison.misfit(self._best)
        mostly_fits = not beaten and misfit <= t_quantile(1 - self._level, prompts - 1)
        outliers = comparison.outliers(self._best)
        if mostly_fits and outliers.chance >= self._level:
            return None, "as_expected"
        # The server is refused. The cause may also be a scenario that is not visible.
        ahead = [h for h in comparison.others if comparison.against(h, self._best)[0] > 0]
        likeliest = self._likeliest(ahead)
        if likeliest is not None and self._explains(likeliest, all_prompts=mostly_fits):
            farther = self._whole.farther(likeliest, self._best)
            return self._cause(likeliest, ahead), "worse" if farther else "better"
        if mostly_fits and len(outliers.prompts) * 2 <= prompts:
            lengths = [comparison.lengths[n] for n in outliers.prompts]
            shorter, longer = comparison.by_length(self._best, outliers.prompts)
            return partly_wrong(lengths, prompts, shorter=shorter, longer=longer), "worse"
        if comparison.answers_farther:
            return ANOTHER_MODEL, "worse"
        return CLOSER, "better"

    def _likeliest(self, among: Sequence[Scenario]) -> Scenario | None:
        """Returns the likeliest of `among`; None if there is none.

        Prefers a fault of the best conforming path that is as likely at 95 %.
        """
        ranked = sorted(among, key=self._lead, reverse=True)
        for other in ranked:
            z, prompts = self._comparison.against(ranked[0], other)
            if other.path == self._best.path and z < t_quantile(0.95, prompts - 1):
                return other
        return ranked[0] if ranked else None

    def _cause(self, likeliest: Scenario, ahead: Sequence[Scenario]) -> Cause:
        """Returns the cause of `likeliest`, unless scenarios of others are as likely at 95 %."""
        cause = cause_of(likeliest, self._best.path)

        def as_likely(other: Scenario) -> bool:
            z, prompts = self._comparison.against(likeliest, other)
            return z < t_quantile(0.975, prompts - 1)  # two-sided: either may be ahead

        rivals = sorted(filter(as_likely, ahead), key=self._lead, reverse=True)
        if all(cause_of(other, self._best.path).name == cause.name for other in rivals):
            return cause
        excluded = [h for h in self._comparison.others if not as_likely(h)]
        return undecided(rivals, excluded, self._best.path)

    def _explains(self, other: Scenario, *, all_prompts: bool) -> bool:
        """Returns whether `other` explains the answers.

        With `all_prompts` it also has to explain the outliers.
        """
        comparison = self._comparison
        misfit, prompts = comparison.misfit(other)
        fits = misfit <= t_quantile(1 - self._level, prompts - 1)
        if all_prompts and comparison.outliers(other).chance < self._level:
            return False
        nearer = fits or comparison.nearer(other, self._best) >= _EXPLAINED
        z, prompts = comparison.nearer_than_nothing(other, _EXPLAINED)
        return nearer and prompts >= _FEWEST_PROMPTS and z > t_quantile(_EXPLAINED_AT, prompts - 1)

    def _doubt(self, expected: Range) -> str | None:
        """Returns why a server that is not refused is not yet as expected; None if it is."""
        waiting = [other for other in self._visible if not self._is_excluded(other)] + self._absent
        if waiting:
            names = waiting[0].label + (f" and {len(waiting) - 1} more" if waiting[1:] else "")
            return f"these prompts do not yet exclude {names}"
        misfit, prompts = self._comparison.misfit(self._best)
        outliers = self._comparison.outliers(self._best)
        if outliers.chance < BETA:
            return (
                f"{len(outliers.prompts)} of {prompts} prompts are farther off than they should be"
            )
        if misfit > t_quantile(1 - BETA, prompts - 1) or self._measured.kl_low > 2 * expected.high:
            return "the answers are farther off than they should be"
        return None

    def _is_excluded(self, other: Scenario) -> bool:
        """Returns whether the answers so far rule out that the server is of `other`."""
        comparison = self._comparison
        z, prompts = comparison.against(other, self._best)
        if self._excludable(other, self._whole.against(other, self._best)[1]):
            return -z > self._exclusion(comparison, other, prompts)
        usual = t_quantile(1 - BETA, prompts - 1) - comparison.separation(self._best, other)
        return z < usual and self._refusable(comparison, other, prompts)

    def _lead(self, scenario: Scenario) -> float:
        """Returns the mean log-likelihood minus that of the best path, on the prompts of both."""
        scores = self._comparison.scores
        return float(np.nanmean(scores[scenario] - scores[self._best]))

    def _ranking(self) -> tuple[Score, ...]:
        found = []
        base = float(np.nanmean(self._comparison.scores[self._best]))
        for h in self._comparison.candidates:
            z, prompts = self._comparison.against(h, self._best)
            separation = self._separations.get(h, 0.0)
            found.append(Score(h.label, base + self._lead(h), z, separation, prompts))
        return tuple(sorted(found, key=lambda score: -score.log_likelihood))

    def _expected(self) -> Range:
        """Returns the range of the best conforming path, from the scatter of all paths.

        Real kernels lie between a path's float32 and its bfloat16, so the range spans both. An
        unquantized model in float32 is the reference itself. See `octet.proof.expected_range`.
        """
        found = {
            h.path: self._comparison.answers.divergences(self._scenarios.logprobs[h])
            for h, candidate in self._comparison.candidates.items()
            if h.fault is None and candidate.repeats > 1
        }
        best = self._best.path
        twins = {
            item.path: item
            for item in expectations(found)
            if item.path.model_copy(update={"compute": best.compute}) == best
        }
        low, high = min(t.low for t in twins.values()), max(t.high for t in twins.values())
        return Range(twins[best].mean, low, high)
