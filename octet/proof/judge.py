"""Decides whether a server's answers match its declared configuration, and if not, why.

A server is refused at once if an answer contains what is no log-probability: NaN, a value above 0,
or probabilities that exceed 1 together. Otherwise it is refused if one of three tests rejects it,
each at a third of `ALPHA` over the interim analyses that a probe may make of its answers:

1. **Likelihood-ratio test** (`Contest`). Some simulated non-conforming scenario explains the
   answers better than the best conforming path: Vuong's z over prompts (the clusters; positions in
   one prompt are not independent) is above Student's t quantile, Bonferroni over the scenarios. For
   a conforming server the mean of these differences is below 0, the more so the farther a scenario
   is, so the level is an upper bound if the server is one more repeat. If its kernels take it to
   where both explain it alike, the level is `BETA` per scenario. The test does not depend on how
   noisy the kernels are.
2. **Fit** (`misfit`). The answers are farther from the best conforming path than its own repeats
   are from each other, prompt by prompt: mean of ln(|x - m|²/S), less that of the repeats', against
   a margin. An implementation may round in up to twice as many places as the simulation does.
   Independent roundings add, so |x - m|² may be (2 + 1/R) for (1 + 1/R). That ratio is the margin.
3. **Outlier test** (`tail`). More prompts are far off than chance allows, among all prompts or
   among a quarter of them by length, however close the others are: `octet.proof.outliers`, with
   the same margin. The first two tests compare means with their own scatter, which garbage in some
   of the answers makes as large as the mean itself.

The repeats of each scenario and of the best conforming path decide which scenarios take part, on
all golden prompts, with each repeat in turn acting as the server. Let z_h be the score of a
conforming repeat against a scenario, z_a the score of a repeat of the scenario against the
conforming path (0 if there is only one repeat), and t Student's quantile of `BETA`.

- The server is refused for a scenario if z is above max(t, t' - z_h), t' being the quantile of the
  likelihood-ratio test's level: z is expected at -z_h, and a conforming server's own kernels may
  take it to where both explain it alike. A server of the scenario is refused with 1 - `BETA` if z_a
  is above that threshold by t.
- The scenario is excluded if -z is above max(0, t - z_a). A server of the scenario exceeds this
  with probability `BETA` at most. A conforming server exceeds it with 1 - `BETA` if z_h is above it
  by t.
- If z_h is not, for a scenario that is near but quiet, z below t - z_h excludes it: a conforming
  server has such a z with 1 - `BETA`, and a server of the scenario does not, if it is refused with
  1 - `BETA`.

A scenario that can be excluded or refused in this way is *visible*. Any other has no influence on
the outcome, and is listed as hidden. The server is as expected if it is not refused, every visible
scenario is excluded, neither fit nor outlier test rejects at `BETA`, the 95 % interval of its mean
divergence begins below twice the upper end of the expected range, and at least 23 of 24
answers have all positions. Until then the verdict is inconclusive, and more prompts should be sent.

A fault that affects only a few prompts, by less than a few times their noise, is not detected.

The cause is the likeliest scenario, visible or not, or a fault of the conforming path that is as
likely at 95 %: if several are possible, the one that differs least from the declared configuration.
It has to explain the answers: they pass its own test of fit, or they are nearer to it than to the
conforming path by a factor of 4 in squared distance (half the distance); and they are nearer to it
by the same factor than to a model that has nothing in common with the reference. If only the
outlier test refuses the server, the cause has to explain the outliers, or else the verdict is that
the answers are wrong in part. Otherwise the cause is another model.

Each probe of a serving backend is one more test at `ALPHA`: with 2,016 probes a week, a conforming
one is suspected with a probability of 2 % at most. It is refused only if a whole probe confirms
this, at an `ALPHA` of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from octet.artifacts.golden import GoldenSet
from octet.artifacts.scenarios import Hypothesis, HypothesisSet
from octet.proof.causes import (
    ANOTHER_MODEL,
    CLOSER,
    NO_DISTRIBUTION,
    Cause,
    cause_of,
    partly_wrong,
)
from octet.proof.declared import Declared
from octet.proof.divergence import Measure, measure
from octet.proof.divergence_bound import by_bound
from octet.proof.expected_range import expectations
from octet.proof.likelihood_ratio import Contest
from octet.proof.responses import Response, complete, improper
from octet.proof.verdict import Outcome, Range, Score, Verdict, range_text, sentence
from octet.statistics import t_quantile

__all__ = ["ALPHA", "BETA", "judge"]

ALPHA = 1e-5  # of refusing a conforming server, over all interim analyses of a probe
BETA = 1e-3  # of not excluding a visible scenario, and of refusing where it explains no better
_EXPLAINED = math.log(4)
_INCOMPLETE = 1 / 24  # share of incomplete answers that "as expected" allows


def judge(
    golden: GoldenSet,
    hypotheses: HypothesisSet | None,
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
    broken = sum(map(improper, responses))
    if broken:
        return _without_distribution(measured, broken, len(responses))
    if not measured.prompts:
        reason = "inconclusive: no answer can be compared with the golden records"
        return Verdict("inconclusive", measured, None, None, None, (), (), reason)
    contest = None
    if hypotheses is not None:
        contest = Contest.of(golden, hypotheses, declared.paths, responses)
    if hypotheses is None or contest is None or not contest.honest:
        verdict = by_bound(measured, declared, bound, count, level=ALPHA / looks)
    else:
        whole = Contest.whole(golden, hypotheses, declared.paths)
        verdict = _Judgement(hypotheses, contest, whole, declared, measured, looks).verdict()
    partial = sum(not complete(golden.records[x.record], x) for x in responses)
    if verdict.outcome == "as_expected" and partial > len(responses) * _INCOMPLETE:
        why = f"{partial} of {len(responses)} answers end early or leave out log-probabilities"
        return replace(verdict, outcome="inconclusive", reason=f"inconclusive: {why}")
    return verdict


def _without_distribution(measured: Measure, broken: int, count: int) -> Verdict:
    cause = NO_DISTRIBUTION
    reason = f"worse than expected: of {broken} of {count} answers its numbers {cause.sentence}"
    reason += f": {cause.remedy}"
    return Verdict("worse", measured, None, None, cause, (), (), reason)


class _Judgement:
    """One decision. `whole` covers all golden records, `contest` those that were answered."""

    def __init__(
        self,
        hypotheses: HypothesisSet,
        contest: Contest,
        whole: Contest,
        declared: Declared,
        measured: Measure,
        looks: int,
    ) -> None:
        self._hypotheses, self._contest, self._whole = hypotheses, contest, whole
        self._declared, self._measured = declared, measured
        self._level = ALPHA / 3 / looks
        self._best = contest.best
        self._separation = {h: whole.told(self._best, h) for h in whole.others}
        visible = [h for h in whole.others if self._is_visible(h)]
        self._visible = [h for h in visible if h in contest.candidates]
        self._absent = [h for h in visible if h not in contest.candidates]

    def verdict(self) -> Verdict:
        cause, outcome = self._refusal()
        expected = self._expected()
        doubt = None if cause is not None else self._doubt(expected)
        if doubt is not None:
            outcome = "inconclusive"
        told = f"where {range_text(expected)} is expected of {self._declared.label}"
        reason = sentence(outcome, self._measured, told, cause, expected)
        if doubt is not None:
            reason += f"; {doubt}"
        return Verdict(
            outcome=outcome,
            measure=self._measured,
            expected=expected,
            path=self._best.path,
            cause=cause,
            ranking=self._ranking(),
            hidden=tuple(h.label for h in self._contest.others if h not in self._visible),
            reason=reason,
        )

    def _is_visible(self, other: Hypothesis) -> bool:
        prompts = self._whole.against(other, self._best)[1]
        return self._excludable(other, prompts) or self._refusable(self._whole, other, prompts)

    def _excludable(self, other: Hypothesis, prompts: int) -> bool:
        """Returns whether a conforming server excludes `other` with 1 - BETA on all prompts."""
        least = t_quantile(1 - BETA, prompts - 1)
        return self._separation[other] >= self._exclusion(self._whole, other, prompts) + least

    def _refusable(self, contest: Contest, other: Hypothesis, prompts: int) -> bool:
        """Returns whether a server of `other` is refused with 1 - BETA."""
        least = t_quantile(1 - BETA, prompts - 1)
        return contest.told(other, self._best) >= self._threshold(contest, other, prompts) + least

    def _threshold(self, contest: Contest, other: Hypothesis, prompts: int) -> float:
        """Returns the z of `other` over the best path above which the server is refused."""
        level = self._level / len(contest.others)
        least, most = (t_quantile(1 - x, prompts - 1) for x in (BETA, level))
        return max(least, most - contest.told(self._best, other))

    def _exclusion(self, contest: Contest, other: Hypothesis, prompts: int) -> float:
        """Returns the z of the best path over `other` above which `other` is excluded."""
        return max(0.0, t_quantile(1 - BETA, prompts - 1) - contest.told(other, self._best))

    def _refusal(self) -> tuple[Cause | None, Outcome]:
        """Returns the cause and outcome of a refusal; None, "as_expected" if no test refuses."""
        contest = self._contest
        scores = {h: contest.against(h, self._best) for h in self._visible}
        beaten = any(z > self._threshold(contest, h, prompts) for h, (z, prompts) in scores.items())
        misfit, prompts = contest.misfit(self._best)
        mostly = not beaten and misfit <= t_quantile(1 - self._level, prompts - 1)
        tail = contest.tail(self._best)
        if mostly and tail.chance >= self._level:
            return None, "as_expected"
        # The server is refused. The cause may also be a scenario that is not visible.
        ahead = [h for h in contest.others if contest.against(h, self._best)[0] > 0]
        likeliest = self._likeliest(ahead)
        if likeliest is not None and self._explains(likeliest, all_prompts=mostly):
            farther = self._whole.farther(likeliest, self._best)
            return cause_of(likeliest, self._best.path), "worse" if farther else "better"
        if mostly and len(tail.prompts) * 2 <= prompts:
            lengths = [contest.lengths[n] for n in tail.prompts]
            return partly_wrong(len(lengths), prompts, min(lengths), max(lengths)), "worse"
        if contest.answers_farther:
            return ANOTHER_MODEL, "worse"
        return CLOSER, "better"

    def _likeliest(self, among: Sequence[Hypothesis]) -> Hypothesis | None:
        """Returns the likeliest of `among`; None if there is none.

        Prefers a fault of the best conforming path that is as likely at 95 %.
        """
        ranked = sorted(among, key=self._mean, reverse=True)
        for other in ranked:
            z, prompts = self._contest.against(ranked[0], other)
            if other.path == self._best.path and z < t_quantile(0.95, prompts - 1):
                return other
        return ranked[0] if ranked else None

    def _explains(self, other: Hypothesis, *, all_prompts: bool) -> bool:
        """Returns whether `other` explains the answers.

        With `all_prompts` it also has to explain the outliers.
        """
        contest = self._contest
        misfit, prompts = contest.misfit(other)
        fits = misfit <= t_quantile(1 - self._level, prompts - 1)
        if all_prompts and contest.tail(other).chance < self._level:
            return False
        nearer = fits or contest.nearer(other, self._best) >= _EXPLAINED
        return nearer and contest.nearer(other, None) >= _EXPLAINED

    def _doubt(self, expected: Range) -> str | None:
        """Returns why a server that is not refused is not yet as expected; None if it is."""
        waiting = [other for other in self._visible if not self._is_excluded(other)] + self._absent
        if waiting:
            names = waiting[0].label + (f" and {len(waiting) - 1} more" if waiting[1:] else "")
            return f"these prompts do not yet exclude {names}"
        misfit, prompts = self._contest.misfit(self._best)
        tail = self._contest.tail(self._best)
        if tail.chance < BETA:
            return f"{len(tail.prompts)} of {prompts} prompts are farther off than they should be"
        if misfit > t_quantile(1 - BETA, prompts - 1) or self._measured.kl_low > 2 * expected.high:
            return "the answers are farther off than they should be"
        return None

    def _is_excluded(self, other: Hypothesis) -> bool:
        contest = self._contest
        z, prompts = contest.against(other, self._best)
        if self._excludable(other, self._whole.against(other, self._best)[1]):
            return -z > self._exclusion(contest, other, prompts)
        usual = t_quantile(1 - BETA, prompts - 1) - contest.told(self._best, other)
        return z < usual and self._refusable(contest, other, prompts)

    def _mean(self, hypothesis: Hypothesis) -> float:
        """Returns the mean log-likelihood over that of the best path, on the prompts of both."""
        scores = self._contest.scores
        return float(np.nanmean(scores[hypothesis] - scores[self._best]))

    def _ranking(self) -> tuple[Score, ...]:
        found = []
        base = float(np.nanmean(self._contest.scores[self._best]))
        for h in self._contest.candidates:
            z, prompts = self._contest.against(h, self._best)
            separation = self._separation.get(h, 0.0)
            found.append(Score(h.label, base + self._mean(h), z, separation, prompts))
        return tuple(sorted(found, key=lambda score: -score.log_likelihood))

    def _expected(self) -> Range:
        """Returns the range of the best conforming path, from the scatter of all paths.

        See `octet.proof.expected_range`.
        """
        found = {
            h.path: self._contest.answers.divergences(self._hypotheses.logprobs[h])
            for h, candidate in self._contest.candidates.items()
            if h.fault is None and candidate.repeats > 1
        }
        for item in expectations(found):
            if item.path == self._best.path:
                return Range(item.mean, item.low, item.high)
        raise AssertionError("an honest path is simulated at least twice")
