"""The divergence over the likeliest tokens, written plainly: what the vectorised one must equal."""

import math
from collections.abc import Mapping


def plain_divergence(reference: Mapping[int, float], served: Mapping[int, float]) -> float:
    """KL(reference ‖ served) in nats, of token id -> log-probability."""
    shared = reference.keys() & served.keys()
    divergence = sum(math.exp(reference[t]) * (reference[t] - served[t]) for t in shared)
    p_rest = 1.0 - sum(map(math.exp, reference.values()))
    p_rest = p_rest if p_rest > 1e-6 else 0.0
    q_left = max(1.0 - sum(math.exp(served[t]) for t in shared), 0.0)
    missing = reference.keys() - shared
    p_missing = sum(math.exp(reference[t]) for t in missing)
    q_missing = 0.0
    if missing:
        most = len(missing) * math.exp(min(served.values(), default=0.0))
        q_missing = min(most, q_left * p_missing / (p_missing + p_rest))
    divergence += _term(p_missing, q_missing) + _term(p_rest, q_left - q_missing)
    return max(divergence, 0.0)


def _term(p: float, q: float) -> float:
    if p == 0:
        return 0.0
    return p * math.log(p / q) if q > 0 else math.inf
