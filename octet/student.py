"""Student's t distribution, for the mean of a few samples whose spread is estimated from them.

For n degrees of freedom, and with θ = atan(t / √n), the probability of |T| < t is (Abramowitz and
Stegun, 26.7.3 and 26.7.4)

    n = 1       2θ/π
    n odd       2/π · (θ + sinθ · (cosθ + 2/3 cos³θ + ... + 2·4···(n-3) / (3·5···(n-2)) cosⁿ⁻²θ))
    n even      sinθ · (1 + 1/2 cos²θ + 1·3/(2·4) cos⁴θ + ... + 1·3···(n-3) / (2·4···(n-2)) cosⁿ⁻²θ)
"""

import math
from functools import cache

__all__ = ["t_quantile"]

_HALVINGS = 60  # of an interval of angles, to its last bit


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The t that T exceeds with 1 - `probability`, which is at least 1/2; inf without freedom."""
    if degrees < 1:
        return math.inf
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        angle = (low + high) / 2
        if (1 + _between(angle, degrees)) / 2 < probability:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan(low)


def _between(angle: float, degrees: int) -> float:
    """P(|T| < √n · tan `angle`)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
