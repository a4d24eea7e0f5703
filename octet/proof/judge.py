"""Whether answers come from what a server is said to be, and if not, from what.

An answer that has what is no log-probability (NaN, above 0, probabilities that exceed 1 together)
is not one of an honest server, which is refused for it. Otherwise the server is refused if one of
three tests says so, each at a third of `ALPHA` over the looks that a probe may take at its answers:

1. **Contest.** Some simulated hypothesis that is not honest explains them better than the best
   honest path: Vuong's z over prompts (the clusters; positions in one prompt are not independent)
   is above Student's t quantile, Bonferroni over the hypotheses. Under honesty the mean of these
   differences is not 0 but below it, the more so the farther a hypothesis is, so that the level is
   a bound: for a server that is one more repeat. Of kernels that take it to where both explain it
   alike, it is `BETA` for each hypothesis. It does not depend on how noisy the kernels are.
2. **Fit.** The answers are farther from the best honest path than its own repeats are from each
   other, prompt by prompt: mean of ln(|x - m|²/S), less that of the repeats', against a margin. An
   implementation may round in up to twice as many places as the simulation does; independent
   roundings add, so that |x - m|² may be (2 + 1/R) for (1 + 1/R). That is the margin.
3. **Tail.** More prompts are far off than chance allows, among all or among those of a quarter by
   length, whatever the others are: `octet.proof.outliers`, with the same margin. The first two
   compare means with their own scatter, which rubbish in a part of the answers makes as large as
   itself.

Which hypotheses take part is decided by their own repeats and those of the best honest path, on all
golden prompts, each repeat as if it were a server. Let z_h be what an honest repeat scores against
a hypothesis, z_a what a repeat of the hypothesis scores against honesty (0 if there is but one
repeat), t Student's quantile of `BETA`.

- It is refused from max(t, t' - z_h) on, t' being the quantile of the contest's level: z is
  expected at -z_h, and kernels of its own are allowed to take an honest server to where both
  explain it alike. Its own server is refused with 1 - `BETA` if z_a is above that by t.
- It is excluded from -z above max(0, t - z_a) on, which its own server passes with `BETA` at most.
  An honest server passes with 1 - `BETA` if z_h is above that by t.
- If z_h is not, for a hypothesis that is near but quiet, z below t - z_h excludes it: an honest
  server has that with 1 - `BETA`, and if its own is refused so surely, that has not.

What can be excluded or refused so is *visible*. What is neither decides nothing, and is listed as
hidden. The server is as expected if it is not refused, everything visible is excluded, neither fit
nor tail says otherwise at `BETA`, the 95 % interval of its mean divergence begins below twice what
is expected at most, and 23 of 24 answers tell all positions. Until then it is inconclusive, and
more prompts are to be asked.

What is wrong with a few prompts alone, by less than some times the noise there, is not seen.

The cause is the likeliest hypothesis, visible or not, or a fault of the honest path that is as
likely at 95 %: if several may be, it is what differs least from what was declared. It has to
explain the answers: they pass its own test of fit, or are nearer to it than to the honest path by a
factor of 4 in squared distance, half in distance; and so much nearer than to a model that has
nothing in common with the reference. If only the tail says that the server is to be refused, it
has to explain that, or the answers are wrong in part. Else it is another model.

Each probe of a server that serves is one more at `ALPHA`: 2,016 a week make an honest one suspected
with 2 % at most, and it is refused only if a whole probe says so, at an `ALPHA` of its own.
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

ALPHA = 1e-5  # of refusing an honest server, in all looks of one probe
BETA = 1e-3  # of not excluding a visible hypothesis, and of excluding honesty no better than it
_EXPLAINED = math.log(4)
_INCOMPLETE = 1 / 24  # of the answers, of a server that is as expected


def judge(
    golden: GoldenSet,
    hypotheses: HypothesisSet | None,
    declared: Declared,
    responses: Sequence[Response],
    *,
    looks: int = 1,
    bound: float | None = None,
) -> Verdict:
    """Whether `responses`, the last to each golden record, are those of a `declared` server.

    `looks` is how often a probe may be judged in all, while its answers come in. `bound` is the
    mean divergence in nats that is accepted where no honest path was simulated
    (`octet.artifacts.serving_path.bound_of`).
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
    """One decision. `whole` is on all golden records; `contest` on those that were answered."""

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
        """Whether an honest server excludes `other` with 1 - BETA, on all golden prompts."""
        least = t_quantile(1 - BETA, prompts - 1)
        return self._separation[other] >= self._exclusion(self._whole, other, prompts) + least

    def _refusable(self, contest: Contest, other: Hypothesis, prompts: int) -> bool:
        """Whether a server of `other` is refused with 1 - BETA."""
        least = t_quantile(1 - BETA, prompts - 1)
        return contest.told(other, self._best) >= self._threshold(contest, other, prompts) + least

    def _threshold(self, contest: Contest, other: Hypothesis, prompts: int) -> float:
        """The z of `other` over the best honest path from which on that is refused."""
        level = self._level / len(contest.others)
        least, most = (t_quantile(1 - x, prompts - 1) for x in (BETA, level))
        return max(least, most - contest.told(self._best, other))

    def _exclusion(self, contest: Contest, other: Hypothesis, prompts: int) -> float:
        """The z of the best honest path over `other` from which on that is excluded."""
        return max(0.0, t_quantile(1 - BETA, prompts - 1) - contest.told(other, self._best))

    def _refusal(self) -> tuple[Cause | None, Outcome]:
        """Why, and on which side; None, "as_expected" if neither test says so."""
        contest = self._contest
        scores = {h: contest.against(h, self._best) for h in self._visible}
        beaten = any(z > self._threshold(contest, h, prompts) for h, (z, prompts) in scores.items())
        misfit, prompts = contest.misfit(self._best)
        mostly = not beaten and misfit <= t_quantile(1 - self._level, prompts - 1)
        tail = contest.tail(self._best)
        if mostly and tail.chance >= self._level:
            return None, "as_expected"
        # What is wrong is known by now, and may well be what could not be relied on to show.
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
        """Of those that are as likely at 95 %, one of the honest path's own faults if there is."""
        ranked = sorted(among, key=self._mean, reverse=True)
        for other in ranked:
            z, prompts = self._contest.against(ranked[0], other)
            if other.path == self._best.path and z < t_quantile(0.95, prompts - 1):
                return other
        return ranked[0] if ranked else None

    def _explains(self, other: Hypothesis, *, all_prompts: bool) -> bool:
        """`all_prompts`: also those that are far off, for they are what is to be explained."""
        contest = self._contest
        misfit, prompts = contest.misfit(other)
        fits = misfit <= t_quantile(1 - self._level, prompts - 1)
        if all_prompts and contest.tail(other).chance < self._level:
            return False
        nearer = fits or contest.nearer(other, self._best) >= _EXPLAINED
        return nearer and contest.nearer(other, None) >= _EXPLAINED

    def _doubt(self, expected: Range) -> str | None:
        """Why what is not refused is not as expected either."""
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
        """Its log-likelihood beside that of the best honest path, on the prompts of both."""
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
        """Returns the range of the best honest path, from the scatter of all paths.

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
