"""Answers what an engine does with a recipe and a cache on a device, from support.yaml.

`support` returns the answer for one combination: whether weights and cache run natively, how
matmuls and the cache round, the engine's message if it refuses, and where that was seen. What the
table does not hold is "unknown". `numerics` returns every way of rounding that conforms where the
engine's version or attention backend is not known.
"""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from octet.hardware.devices import Device, read_table
from octet.recipe import PRESETS, KvCacheDtype, Recipe, TensorScheme

__all__ = [
    "ENGINES",
    "OUTCOMES",
    "EngineName",
    "Numerics",
    "Outcome",
    "Pair",
    "Support",
    "attention_of",
    "attentions",
    "known_versions",
    "numerics",
    "pattern_of",
    "support",
    "used_of",
    "version_known",
    "weight_only",
]

EngineName = Literal["vllm", "tensorrt", "tensorrt-rtx", "onnxruntime", "sglang", "tensorrt-llm"]
ENGINES: tuple[EngineName, ...] = (
    *("vllm", "tensorrt", "tensorrt-rtx"),
    *("onnxruntime", "sglang", "tensorrt-llm"),
)
Outcome = Literal["native", "weight-only", "emulated", "unknown", "corrupt", "refused"]
OUTCOMES: tuple[Outcome, ...] = (  # the better one first
    *("native", "weight-only", "emulated"),
    *("unknown", "corrupt", "refused"),
)
Pair = tuple[TensorScheme, TensorScheme]  # of weights and of activations
Wanted = Recipe | Pair | str | None
Rounding = Literal["nearest", "truncate"]


class _Conditions(BaseModel):
    """Conditions of a rule; one that is None always holds. Patterns are shell patterns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineName | None = None
    versions: str | None = None  # one, "0.24", or a range, "0.24..0.30", with open ends "..0.23"
    device: str | None = None  # a pattern of capabilities, or a range such as "8.0..8.9"
    recipe: str | None = None  # a pattern of `pattern_of`
    format: str | None = None
    cache: str | None = None  # a pattern of cache dtypes
    attention: str | None = None
    without: str | None = None  # a package that is not installed
    priority: bool = False  # decides whatever other rules hold
    source: str  # a key of the table's `sources`, then ": " and a place in it, if any

    @property
    def rank(self) -> tuple[bool, int]:
        """The rule of the highest rank decides: by priority, then by number of conditions."""
        named = (self.engine, self.versions, self.device, self.recipe, self.format, self.cache)
        given = (*named, self.attention, self.without)
        return self.priority, sum(x is not None for x in given)

    def holds(self, query: "_Query") -> bool:
        return (
            self.engine in (None, query.engine)
            and (self.versions is None or _version_in(query.version, self.versions))
            and (self.device is None or _device_in(query.capability, self.device))
            and (self.recipe is None or fnmatch.fnmatchcase(query.recipe, self.recipe))
            and self.format in (None, query.format)
            and (self.cache is None or fnmatch.fnmatchcase(query.cache, self.cache))
            and self.attention in (None, query.attention)
            and (self.without is None or self.without in query.missing)
        )


class _Choice(_Conditions):
    use: str  # the attention backend


class _Rule(_Conditions):
    outcome: Outcome
    activations: bool | None = None
    rounding: Rounding | None = None
    queries: bool | None = None
    message: str = ""
    remedy: str = ""


class _Source(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    measured: str | None = None  # the version that was run


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    engines: dict[EngineName, tuple[str, ...]]
    sources: dict[str, _Source]
    attention: tuple[_Choice, ...]
    weights: tuple[_Rule, ...]
    caches: tuple[_Rule, ...]


@dataclass(frozen=True, kw_only=True)
class _Query:
    """A combination that rules are checked against."""

    engine: EngineName
    version: tuple[int, int] = (-1, -1)  # such as (0, 24); (-1, -1) is before all versions
    capability: str
    recipe: str = ""  # a pair of schemes, see `pattern_of`
    cache: KvCacheDtype
    format: str = ""
    attention: str | None = None  # None: the backend that the engine selects
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Support:
    """An answer: the outcomes, how matmuls and the cache round, the remedy, and the sources."""

    outcome: Outcome  # the worse one of the next two
    weights: Outcome
    cache: Outcome
    activations: bool | None = None  # whether linears round their activations; None: not known
    rounding: Rounding | None = None  # of the cache's writer
    queries: bool | None = None  # whether attention rounds queries to E4M3; None: either
    attention: str | None = None  # the attention backend
    message: str = ""  # with which the engine refuses
    remedy: str = ""
    sources: tuple[str, ...] = ()
    measured: bool = False  # with this version; otherwise read in the engine's source or documents

    @property
    def runs(self) -> bool:
        """Returns whether it is known to run."""
        return self.outcome in ("native", "weight-only", "emulated")


@dataclass(frozen=True)
class Numerics:
    """A way of rounding."""

    activations: bool  # whether linears round their activations
    rounding: Rounding  # of the cache, when it is written
    queries: bool  # whether attention rounds queries to E4M3


def support(
    device: Device,
    engine: EngineName,
    version: str | None,
    recipe: Wanted,
    cache: KvCacheDtype,
    attention: str | None = None,
    *,
    format: str = "compressed-tensors",
    missing: Iterable[str] = (),
) -> Support:
    """Returns what `engine` does with `recipe` and `cache` on `device`.

    `version` such as "0.24.0"; None stands for any, and what differs between versions is unknown.
    `recipe` is a Recipe, its pair of schemes, a preset's name, or None for unquantized weights.
    `attention` None takes the backend that the engine selects. `format` is the checkpoint's;
    `missing` names packages that are not installed, such as "flashinfer".
    """
    if version is not None and not version_known(engine, version):
        known = known_versions(engine)
        message = f"{engine} {version} is not known; {known[0]} to {known[-1]} are"
        return Support("unknown", "unknown", "unknown", message=message)
    versions = known_versions(engine) if version is None else (version,)
    query = _Query(
        engine=engine,
        capability=device.capability,
        cache=cache,
        format=format,
        attention=attention,
        missing=frozenset(missing),
    )
    found = {_support(replace(query, version=_numbers(each)), recipe) for each in versions}
    return found.pop() if len(found) == 1 else _agreed(found)


@cache
def numerics(
    device: Device,
    engine: EngineName,
    version: str | None,
    recipe: Wanted,
    cache: KvCacheDtype,
    attention: str | None = None,
) -> tuple[Numerics, ...]:
    """Returns the ways of rounding that `engine` takes on `device`, each once.

    Without a version, those of all versions; without an attention backend, those of all that serve
    the cache. Empty if nothing is known to run.
    """
    ways: dict[Numerics, None] = {}
    versions = known_versions(engine) if version is None else (version,)
    backends = attentions(device, engine) if attention is None else (attention,)
    for each, backend in product(versions, backends or (None,)):
        found = support(device, engine, each, recipe, cache, backend)
        if not found.runs or found.activations is None or found.rounding is None:
            continue
        for queries in (True, False) if found.queries is None else (found.queries,):
            ways[Numerics(found.activations, found.rounding, queries and cache == "e4m3")] = None
    return tuple(ways)


def attention_of(
    device: Device,
    engine: EngineName,
    version: str,
    cache: KvCacheDtype,
    missing: Iterable[str] = (),
) -> str | None:
    """Returns the attention backend that an engine selects for a cache; None if not known."""
    query = _Query(
        engine=engine,
        version=_numbers(version),
        capability=device.capability,
        cache=cache,
        missing=frozenset(missing),
    )
    chosen = _decide(_table().attention, query)
    return None if chosen is None else chosen.use


def attentions(device: Device, engine: EngineName) -> tuple[str, ...]:
    """Returns the attention backends that the table names for a device."""
    named = (
        rule.attention
        for rule in _table().caches
        if rule.attention is not None
        and rule.engine == engine
        and (rule.device is None or _device_in(device.capability, rule.device))
    )
    return tuple(dict.fromkeys(named))


def known_versions(engine: EngineName) -> tuple[str, ...]:
    """Returns the versions of the table, such as "0.24", the oldest first."""
    return _table().engines[engine]


def version_known(engine: EngineName, version: str) -> bool:
    """Returns whether the table holds `version`, by its first two numbers."""
    return _numbers(version) in map(_numbers, known_versions(engine))


def pattern_of(pair: Pair | None) -> str:
    """Returns how the table writes a pair of schemes: "fp8:channel/token", "nvfp4", "none"."""
    if pair is None:
        return "none"
    weights, activations = pair
    if weights.kind != "fp8":
        return weights.kind
    return f"fp8:{weights.granularity}/{activations.granularity}"


def weight_only(pairs: Iterable[Pair], devices: Sequence[Device]) -> tuple[str, ...]:
    """Returns those of `pairs`, by `pattern_of`, that vLLM runs weight-only on all `devices`.

    That is, in all of its versions that are known. Empty without devices.
    """

    def runs(pair: Pair, device: Device) -> bool:
        ways = numerics(device, "vllm", None, pair, "float16")
        return {way.activations for way in ways} == {False}

    named = {pattern_of(pair): pair for pair in pairs} if devices else {}
    return tuple(
        pattern for pattern, pair in named.items() if all(runs(pair, device) for device in devices)
    )


def used_of(patterns: Iterable[str], recipe: Recipe) -> tuple[str, ...]:
    """Returns those of `patterns`, see `pattern_of`, that `recipe` uses."""
    used = set(_patterns(recipe))
    return tuple(pattern for pattern in patterns if pattern in used)


def _support(query: _Query, recipe: Wanted) -> Support:
    """Returns the answer for one version; with several schemes, for the worst of them."""
    named = query.attention
    if named is None:
        chosen = _decide(_table().attention, query)
        named = None if chosen is None else chosen.use
    query = replace(query, attention=named)
    cache = _decide(_table().caches, query)
    linears = [_decide(_table().weights, replace(query, recipe=x)) for x in _patterns(recipe)]
    weights = max(linears, key=lambda rule: OUTCOMES.index(_outcome(rule)))
    rules = [rule for rule in (weights, cache) if rule is not None]
    worst = max(rules, key=lambda rule: OUTCOMES.index(rule.outcome), default=None)
    return Support(
        outcome=max(_outcome(weights), _outcome(cache), key=OUTCOMES.index),
        weights=_outcome(weights),
        cache=_outcome(cache),
        activations=_rounds(weights),
        rounding=None if cache is None else cache.rounding,
        queries=None if cache is None else cache.queries,
        attention=named,
        message="" if worst is None else worst.message,
        remedy="" if worst is None else worst.remedy,
        sources=tuple(dict.fromkeys(map(_source, rules))),
        measured=None not in (weights, cache) and all(_measured(x, query) for x in rules),
    )


def _rounds(rule: _Rule | None) -> bool | None:
    """Returns whether linears round their activations; native GEMMs do unless the rule says so."""
    if rule is None:
        return None
    if rule.activations is not None:
        return rule.activations
    return {"native": True, "weight-only": False}.get(rule.outcome)


def _outcome(rule: _Rule | None) -> Outcome:
    return "unknown" if rule is None else rule.outcome


def _agreed(found: set[Support]) -> Support:
    """Returns what several versions have in common."""

    def same(name: str, otherwise: Any) -> Any:
        values = {getattr(each, name) for each in found}
        return values.pop() if len(values) == 1 else otherwise

    outcome = same("outcome", "unknown")
    return Support(
        outcome=outcome,
        weights=same("weights", "unknown"),
        cache=same("cache", "unknown"),
        activations=same("activations", None),
        rounding=same("rounding", None),
        queries=same("queries", None),
        attention=same("attention", None),
        message=same("message", "" if outcome != "unknown" else "it depends on the version"),
        remedy=same("remedy", ""),
        sources=tuple(sorted({source for each in found for source in each.sources})),
        measured=same("measured", False),
    )


def _patterns(recipe: Wanted) -> Sequence[str]:
    """Returns the pairs of schemes that a recipe uses, as the table writes them."""
    if isinstance(recipe, str):
        recipe = PRESETS[recipe]
    if isinstance(recipe, Recipe):
        return [pattern_of(pair) for pair in recipe.pairs]
    return [pattern_of(recipe)]


_R = TypeVar("_R", bound=_Conditions)


def _decide(rules: Sequence[_R], query: _Query) -> _R | None:
    """Returns the rule with the most conditions among those that hold, and of these the last."""
    best: _R | None = None
    for rule in rules:
        if rule.holds(query) and (best is None or rule.rank >= best.rank):
            best = rule
    return best


def _source(rule: _Conditions) -> str:
    key, _, where = rule.source.partition(": ")
    text = _table().sources[key].text
    return f"{text}: {where}" if where else text


def _measured(rule: _Conditions, query: _Query) -> bool:
    """Returns whether the rule was seen with the given version.

    Always True for the source `plain`, which needs no measurement.
    """
    key = rule.source.partition(": ")[0]
    version = _table().sources[key].measured
    return key == "plain" or (version is not None and _numbers(version) == query.version)


def _numbers(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version; (-1, -1) if it does not begin with them."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


def _version_in(version: tuple[int, int], wanted: str) -> bool:
    low, dots, high = wanted.partition("..")
    if not dots:
        return version == _numbers(low)
    return (not low or version >= _numbers(low)) and (not high or version <= _numbers(high))


def _device_in(capability: str, wanted: str) -> bool:
    low, _, high = wanted.partition("..")
    if not low[0].isdigit():
        return fnmatch.fnmatchcase(capability, wanted)
    if not capability[0].isdigit():
        return False
    return _numbers(low) <= _numbers(capability) <= _numbers(high or low)


@cache
def _table() -> _Table:
    return TypeAdapter(_Table).validate_python(read_table("support.yaml"))
