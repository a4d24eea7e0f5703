"""Likelihood-ratio tests between scenarios, and how well they can be told apart.

A scenario is a `Scenario`; `octet.proof.judge` turns the scores into a verdict.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.golden import GoldenSet, Top
from octet.artifacts.scenarios import Scenario, ScenarioSet
from octet.artifacts.serving_path import ServingPath
from octet.proof.hellinger import Answers, Points
from octet.proof.noise import Candidate, Noise, Values, distance, z_score
from octet.proof.outliers import Outliers, find_outliers, heaviness, rank_tails
from octet.proof.responses import Response
from octet.statistics import t_quantile

__all__ = ["BETA", "Comparison"]

# Probability of not excluding a visible scenario, and of a refusal by one that explains no better.
BETA = 1e-3

# Unquantized and in float32: this path is the reference itself.
_REFERENCE = Scenario(
    path=ServingPath(weights=False, activations=False, kv_cache="float16", compute="float32")
)


@dataclass(frozen=True)
class Comparison:
    """Scenarios and answers, on the comparable prompts."""

    answers: Answers
    candidates: dict[Scenario, Candidate]
    conforming: tuple[Scenario, ...]
    lengths: tuple[int, ...]  # [n]: tokens of each prompt
    _separations: dict[tuple[Scenario, Scenario], float] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        golden: GoldenSet,
        scenarios: ScenarioSet,
        conforming: Sequence[ServingPath],
        responses: Sequence[Response],
    ) -> Self:
        """Takes all scenarios except those that were simulated on none of these prompts."""
        answers = Answers.of(golden, responses)
        points = {h: answers.points(x) for h, x in scenarios.logprobs.items()}
        if _REFERENCE not in points and not any(_is_unquantized(path) for path in conforming):
            points[_REFERENCE] = answers.reference[None]
        candidates = {
            h: Candidate(h, x) for h, x in points.items() if len(x) and not np.isnan(x).all()
        }
        paths = tuple(h for h in candidates if h.fault is None and h.path in conforming)
        lengths = tuple(len(golden.records[n].prompt_token_ids) for n in answers.records)
        return cls(answers, candidates, paths, lengths)

    @classmethod
    def whole(
        cls, golden: GoldenSet, scenarios: ScenarioSet, conforming: Sequence[ServingPath]
    ) -> Self:
        """Builds the comparison on all golden records, with the reference's own answers."""
        perfect = [
            Response(n, record.continuation_token_ids, tuple(top.mapping for top in record.tops))
            for n, record in enumerate(golden.records)
        ]
        return cls.of(golden, scenarios, conforming, perfect)

    @classmethod
    def shown(
        cls, golden: GoldenSet, scenarios: ScenarioSet, conforming: Sequence[ServingPath]
    ) -> Self:
        """Builds the comparison on what a conforming server shows of all golden records.

        Its answers have the reference's log-probabilities, but only for the tokens and positions
        that a simulated server returns.
        """
        shown = [
            Response(n, record.continuation_token_ids, tuple(_shown(record.tops, returned)))
            for n, (record, returned) in enumerate(
                zip(golden.records, _returned(golden, scenarios, conforming), strict=True)
            )
        ]
        return cls.of(golden, scenarios, conforming, shown)

    @cached_property
    def noise(self) -> Noise:
        return Noise(list(self.candidates.values()), self.answers.compared.sum(1))

    @cached_property
    def scores(self) -> dict[Scenario, Values]:
        """[n] by scenario: log-likelihoods of the answers; NaN where it was not simulated."""
        served = self.answers.served
        return {h: self.noise.likelihood(x, served) for h, x in self.candidates.items()}

    @cached_property
    def best(self) -> Scenario:
        """The conforming path that explains the answers best."""
        return max(self.conforming, key=lambda h: float(np.nanmean(self.scores[h])))

    @cached_property
    def others(self) -> list[Scenario]:
        return [h for h in self.candidates if h not in self.conforming]

    def against(self, other: Scenario, conforming: Scenario) -> tuple[float, int]:
        """Returns Vuong's z of `other` over `conforming`, and the number of prompts."""
        return z_score(self.scores[other] - self.scores[conforming])

    def separation(self, truth: Scenario, other: Scenario) -> float:
        """Returns the mean z of `truth` over `other` when repeats of `truth` act as the server.

        Each repeat is left out of its own mean. So that both means are over as many, one repeat of
        `other` is left out too. 0 if `truth` was simulated only once.
        """
        key = truth, other
        if key not in self._separations:
            self._separations[key] = self._measure_separation(
                self.candidates[truth], self.candidates[other]
            )
        return self._separations[key]

    def _measure_separation(self, mine: Candidate, others: Candidate) -> float:
        if mine.repeats < 2:
            return 0.0
        found = []
        for number, served in enumerate(mine.points):
            own = self.noise.likelihood(mine, served, without=number)
            without = number % others.repeats if others.repeats > 1 else None
            theirs = self.noise.likelihood(others, served, without=without)
            found.append(z_score(own - theirs)[0])
        return float(np.mean(found))

    def misfit(self, scenario: Scenario) -> tuple[float, int]:
        """Returns z of the answers' distance in excess of a repeat's, above the margin.

        Also returns the number of prompts.
        """
        candidate = self.candidates[scenario]
        excess = self._log_ratios(candidate, self.answers.served, None) - self._usual
        return z_score(excess, _margin(candidate))

    def outliers(self, scenario: Scenario) -> Outliers:
        """Returns the prompts least likely under the scenario, and their probability.

        The margin is subtracted from all distances first.
        """
        candidate = self.candidates[scenario]
        excess = self._log_ratios(candidate, self.answers.served, None) - _margin(candidate)
        known = np.flatnonzero(~np.isnan(excess))
        found = find_outliers(excess[known], [self.lengths[n] for n in known], self._heaviness)
        return replace(found, prompts=tuple(int(known[n]) for n in found.prompts))

    def passes(
        self,
        scenario: Scenario,
        served: Points,
        without: int,
        among: NDArray[np.bool_],
        prompts: int,
        level: float,
    ) -> bool:
        """Returns whether neither the fit nor the outlier test rejects points `served` at `level`.

        Repeat `without` of the scenario is left out. Only the prompts `among` [n] count; the fit is
        scaled to `prompts` of them.
        """
        candidate = self.candidates[scenario]
        logs, margin = self._log_ratios(candidate, served, without)[among], _margin(candidate)
        z, count = z_score(logs - self._usual[among], margin)
        if z * math.sqrt(prompts / count) > t_quantile(1 - level, prompts - 1):
            return False
        lengths = [self.lengths[n] for n in np.flatnonzero(among)]
        return find_outliers(logs - margin, lengths, self._heaviness, level).chance >= level

    def by_length(self, scenario: Scenario, prompts: Sequence[int]) -> tuple[float, float]:
        """Returns how likely prompts as far off as `prompts` are as short, and as long, by chance.

        All that are as far off count: outliers are also sought among the longest alone.
        """
        logs = self._log_ratios(self.candidates[scenario], self.answers.served, None)
        far = np.flatnonzero(logs >= min(logs[n] for n in prompts))
        return rank_tails(self.lengths, far.tolist())

    def nearer(self, scenario: Scenario, than: Scenario) -> float:
        """Returns ln of the factor by which the answers are nearer to `scenario` than to `than`.

        The factor is of squared distances; the ln is averaged over prompts.
        """
        served = self.answers.served
        mine, other = (self.candidates[h].squared(served) for h in (scenario, than))
        return float(np.nanmean(np.log(self._floored(other) / self._floored(mine))))

    def nearer_than_nothing(self, scenario: Scenario, margin: float) -> tuple[float, int]:
        """Returns z of the ln of `nearer`, above `margin`, against a model that predicts nothing.

        That model gives the reference's likeliest tokens no probability. Where neither the answers
        nor the scenario give them any either, both distances are 0 and show nothing: only the other
        prompts count, whose number is also returned.
        """
        served = self.answers.served
        nothing = np.zeros_like(served)
        nothing[..., -1] = 2.0 * self.answers.compared
        mine, other = self.candidates[scenario].squared(served), distance(served, nothing)
        shown = np.maximum(mine, other) > self.noise.least
        return z_score(np.log(self._floored(other) / self._floored(mine))[shown], margin)

    def farther(self, scenario: Scenario, conforming: Scenario) -> bool:
        """Returns whether `scenario` is farther from the reference than `conforming` is."""
        mine, other = (self._from_reference(h) for h in (scenario, conforming))
        return float(np.nanmean(mine - other)) > 0

    @property
    def answers_farther(self) -> bool:
        """Returns whether the answers are farther from the reference than `best` is."""
        mine = distance(self.answers.served, self.answers.reference)
        return float(np.mean(mine - self._from_reference(self.best))) > 0

    def _from_reference(self, scenario: Scenario) -> Values:
        """Returns [n]: squared distances of the scenario from the reference, mean over repeats."""
        points = self.candidates[scenario].points
        return np.asarray(distance(points, self.answers.reference).mean(0))

    @cached_property
    def _usual(self) -> Values:
        """[n]: mean ln(|x - m|²/S) over the repeats that the noise was fitted to."""
        found = [
            self._log_ratios(candidate, served, number)
            for h in self.noise.fitted
            for candidate in (self.candidates[h],)
            for number, served in enumerate(candidate.points)
        ]
        return np.asarray(np.mean(found, 0))

    @cached_property
    def _heaviness(self) -> int:
        """The heaviness of the repeats' ln(|x - m|²/S), with S from the other scenarios only."""
        found = [
            self._log_ratios(candidate, served, number)
            + np.log(self.noise.prompts / self.noise.others(h))
            for h in self.noise.fitted
            if len(self.noise.fitted) > 1
            for candidate in (self.candidates[h],)
            for number, served in enumerate(candidate.points)
        ]
        return heaviness(np.concatenate(found) if found else np.empty(0))

    def _log_ratios(self, candidate: Candidate, served: Values, without: int | None) -> Values:
        """Returns [n]: ln(|x - m|²/S) of `served`, with repeat `without` left out of m."""
        kept = candidate.repeats - (without is not None)
        squared = self._floored(candidate.squared(served, without=without))
        return np.asarray(np.log(squared / self.noise.expected(candidate, kept)))

    def _floored(self, squared: Values) -> Values:
        """Raises squared distances to the error of float32 log-probabilities."""
        return np.asarray(np.maximum(squared, self.noise.least))


def _returned(
    golden: GoldenSet, scenarios: ScenarioSet, conforming: Sequence[ServingPath]
) -> Sequence[Sequence[Sequence[float]]]:
    """Returns log-probabilities [records][positions][tokens] of a conforming server.

    They are the reference's own if none was simulated.
    """
    found = [x for h, x in scenarios.logprobs.items() if h.fault is None and h.path in conforming]
    if not found:
        return [[top.logprobs for top in record.tops] for record in golden.records]
    answers: list[list[list[float]]] = found[0][0].tolist()
    return answers


def _shown(tops: Sequence[Top], returned: Sequence[Sequence[float]]) -> Iterator[dict[int, float]]:
    """Yields, for each position, the part of `tops` that a server shows.

    `returned` [positions][tokens] are the server's log-probabilities of the tokens of `tops`. It is
    taken to return a token if it finds it as likely as the reference finds the last of `tops`. The
    positions end where the server leaves the golden continuation.
    """
    for top, mine in zip(tops, returned, strict=False):
        values = [x if x == x else -math.inf for x in mine[: len(top.logprobs)]]
        greedy = values.index(max(values))
        kept = [x >= min(top.logprobs) or n == greedy for n, x in enumerate(values)]
        pairs = zip(top.token_ids, top.logprobs, kept, strict=True)
        yield {token: logprob for token, logprob, keep in pairs if keep}
        if greedy:
            return


def _margin(candidate: Candidate) -> float:
    """Returns the margin in ln |x - m|²: that of twice as many roundings as were simulated."""
    one = 1 / candidate.repeats
    return math.log((2 + one) / (1 + one))


def _is_unquantized(path: ServingPath) -> bool:
    """Returns whether `path` quantizes nothing."""
    return not path.weights and path.kv_cache == "float16"
