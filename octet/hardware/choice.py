"""Chooses a recipe and a cache that vLLM runs on all of some devices, for `--recipe auto`.

Candidates are ranked by what the hardware model knows: first by the worst outcome over the devices
(native, weight-only, emulated), then by how many devices run them natively, then by exactness; with
an accuracy budget, which promotes layers until it is met, by size instead. A candidate that is
refused, corrupt or unknown on any device is out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octet.errors import UnsupportedError
from octet.hardware.devices import Device
from octet.hardware.support import OUTCOMES, Outcome, known_versions, support
from octet.recipe import PRESETS, KvCacheDtype, Recipe

__all__ = ["Candidate", "Choice", "choose"]

# The most exact first. Measured changes of perplexity (docs/benchmarks.md): 0.1 % for the FP8
# recipes, of which `fp8` scales each token by itself and needs no samples; 2 to 5 % for nvfp4; 7 to
# 13 % for mxfp4.
_EXACT = ("fp8", "fp8-block", "fp8-static", "mxfp8", "nvfp4", "mxfp4")
_SMALL = ("nvfp4", "mxfp4", "fp8", "fp8-block", "fp8-static", "mxfp8")
_ABOUT = {
    "fp8": "0.1 % of perplexity; scales per channel and token, none from samples",
    "fp8-block": "0.1 % of perplexity; scales per block",
    "fp8-static": "0.1 % of perplexity; static scales, from samples",
    "mxfp8": "8 bits, not measured; scales are powers of two",
    "nvfp4": "4 bits: 2 to 5 % of perplexity",
    "mxfp4": "4 bits: 7 to 13 % of perplexity",
    "e4m3": "8 bits, the more exact: 3 bits of mantissa, up to 448",
    "e5m2": "8 bits, the wider: 2 bits of mantissa, up to 57,344",
    "float16": "16 bits: exact, and half the tokens",
}
_LABELS: dict[KvCacheDtype, str] = {"e4m3": "E4M3", "e5m2": "E5M2", "float16": "16-bit"}
_CACHES: tuple[KvCacheDtype, ...] = ("e4m3", "e5m2", "float16")


@dataclass(frozen=True)
class Candidate:
    """A recipe or a cache, and what each device does with it."""

    name: str
    about: str
    outcomes: tuple[Outcome, ...]  # in the order of the devices, the worst of vLLM's versions
    varies: tuple[bool, ...]  # whether the versions differ

    @property
    def runs(self) -> bool:
        return all(outcome in ("native", "weight-only", "emulated") for outcome in self.outcomes)

    @property
    def cells(self) -> tuple[str, ...]:
        """Returns a text for each device."""
        return tuple(
            f"{outcome} in some versions" if varies else outcome
            for outcome, varies in zip(self.outcomes, self.varies, strict=True)
        )

    @property
    def rank(self) -> tuple[int, int]:
        worst = max(OUTCOMES.index(outcome) for outcome in self.outcomes)
        return worst, -self.outcomes.count("native")


@dataclass(frozen=True)
class Choice:
    """The chosen recipe with its cache, all candidates, and the reason in a sentence."""

    devices: tuple[str, ...]
    recipe: Recipe
    weights: tuple[Candidate, ...]
    caches: tuple[Candidate, ...]
    reason: str

    def details(self) -> dict[str, Any]:
        """Returns the facts that an artifact records."""
        return {"for": list(self.devices), "reason": self.reason}


def choose(
    devices: Sequence[Device],
    *,
    small: bool = False,
    cache: KvCacheDtype | None = None,
    version: str | None = None,
) -> Choice:
    """Chooses for `devices`; `small` prefers the fewest bits, for a budget to promote layers.

    `cache` is chosen whether it runs or not, if given. `version` is vLLM's; by default, the worst
    outcome of all known versions counts.
    Raises UnsupportedError if nothing is known to run on all of them.
    """
    versions = known_versions("vllm") if version is None else (version,)
    weights = [_candidate(name, devices, versions) for name in (_SMALL if small else _EXACT)]
    caches = [_candidate(name, devices, versions) for name in _CACHES]
    recipe, best = _best(weights, devices, "recipe"), _best(caches, devices, "cache")
    names = tuple(dict.fromkeys(device.name for device in devices))
    worst = max(recipe.outcomes, key=OUTCOMES.index)
    how = {"native": "natively"}.get(worst, worst if len(names) == 1 else f"at worst {worst}")
    wanted = "the fewest bits" if small else "the most exact"
    best_cache = next(each for each in _CACHES if each == best.name)
    kv_cache = best_cache if cache is None else cache
    why: dict[KvCacheDtype, str] = {
        "e4m3": "holds as many tokens as E5M2 and is more exact",
        "e5m2": "E4M3 does not run on all of them; E5M2 holds as many tokens and is less exact",
        "float16": "no 8-bit cache is known to run on all of them",
    }
    reason = f"{recipe.name}: {wanted} that vLLM runs {how} on {', '.join(names)}"
    reason += f"; {_LABELS[kv_cache]} cache: {why[kv_cache] if cache is None else 'as asked'}"
    chosen = PRESETS[recipe.name].model_copy(update={"kv_cache": kv_cache})
    return Choice(names, chosen, tuple(weights), tuple(caches), reason)


def _candidate(name: str, devices: Sequence[Device], versions: Sequence[str]) -> Candidate:
    found = [_outcomes(name, device, versions) for device in devices]
    worst = tuple(max(outcomes, key=OUTCOMES.index) for outcomes in found)
    varies = tuple(len(outcomes) > 1 for outcomes in found)
    return Candidate(name, _ABOUT[name], worst, varies)


def _outcomes(name: str, device: Device, versions: Sequence[str]) -> set[Outcome]:
    cache: KvCacheDtype = next((each for each in _CACHES if each == name), "float16")
    recipe = name if name in PRESETS else None
    return {support(device, "vllm", each, recipe, cache).outcome for each in versions}


def _best(candidates: Sequence[Candidate], devices: Sequence[Device], what: str) -> Candidate:
    running = [candidate for candidate in candidates if candidate.runs]
    if not running:
        names = ", ".join(device.name for device in devices)
        raise UnsupportedError(
            f"--for {names}: no {what} is known to run on all of them in vLLM; calibrate for one of"
            " them, or name the recipe"
        )
    return min(running, key=lambda candidate: candidate.rank)  # the first of equals
