"""Judges a server without a simulation, by its mean divergence against the format's bound.

- Divergence is not negative, so the sum over some golden records is at most the sum over all. A
  server whose sum exceeds `bound` times the number of all records is refused. This test is exact:
  it has no error probability.
- A server whose mean is above the bound by Student's t over prompts is also refused, at
  significance `level` per interim analysis.
- A server that is not refused is as expected if it answered all records, or if its 95 % interval
  (`octet.statistics`) is below the bound, over at least `FEW` prompts, which estimating their
  skewness needs.
- Anything else is inconclusive. No lower limit on the divergence is known.
"""

from octet.proof.causes import ANOTHER_MODEL
from octet.proof.declared import Declared
from octet.proof.divergence import Measure
from octet.proof.verdict import WEAK, Outcome, Verdict, sentence
from octet.statistics import FEW, t_quantile

__all__ = ["by_bound"]


def by_bound(
    measured: Measure,
    declared: Declared,
    bound: float | None,
    records: int,
    *,
    level: float,
) -> Verdict:
    """Returns the verdict on answers to some of `records` golden records.

    `bound` is in nats; None if there is none.
    """
    outcome: Outcome = "inconclusive"
    cause = None
    why = f"a bound of {bound} for {declared.label}, without a simulation"
    if bound is None:
        why = f"nothing was simulated of {declared.label}, and no bound is given"
    elif _refused(measured, bound, records, level):
        outcome, cause = "worse", ANOTHER_MODEL
    elif measured.prompts == records or (measured.prompts >= FEW and measured.kl_high <= bound):
        outcome = "as_expected"
    reason = sentence(outcome, measured, f"against {why}", cause)
    if outcome == "as_expected":
        reason += f"; {WEAK}"
    return Verdict(outcome, measured, None, None, cause, (), (), reason, bound)


def _refused(measured: Measure, bound: float, records: int, level: float) -> bool:
    if measured.kl_mean * measured.prompts > bound * records:
        return True
    degrees = measured.prompts - 1
    if degrees < 1:
        return False
    # The interval is at least as wide as Student's t: this error is an upper estimate.
    error = (measured.kl_high - measured.kl_mean) / t_quantile(0.975, degrees)
    return measured.kl_mean - error * t_quantile(1 - level, degrees) > bound
