"""What is not simulated is judged by its mean divergence alone, against a bound of the format.

- Divergence is not negative, so that answers to a part of the golden records have at most the sum
  that the whole may have. Who exceeds `bound` times all of the records with fewer of them, or with
  all, is refused; no chance is in that.
- Who is above the bound by Student's t over prompts is refused too, at `level` a look.
- As expected is who has answered all of them, or whose 95 % interval (`octet.statistics`) is below
  the bound, of as many prompts as that needs to know their skewness.
- Anything else is inconclusive; nothing says what too small a divergence would be.
"""

from octet.proof.causes import ANOTHER_MODEL
from octet.proof.declared import Declared
from octet.proof.divergence import Measure
from octet.proof.verdict import Outcome, Verdict, sentence
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
    """Of answers to some of so many golden `records`; `bound` in nats, None: there is none."""
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
    return Verdict(outcome, measured, None, None, cause, (), (), reason)


def _refused(measured: Measure, bound: float, records: int, level: float) -> bool:
    if measured.kl_mean * measured.prompts > bound * records:
        return True
    degrees = measured.prompts - 1
    if degrees < 1:
        return False
    # The interval extends by Student's t at least.
    error = (measured.kl_high - measured.kl_mean) / t_quantile(0.975, degrees)
    return measured.kl_mean - error * t_quantile(1 - level, degrees) > bound
