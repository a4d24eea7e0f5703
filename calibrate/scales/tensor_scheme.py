"""Determines the scheme that a recipe applies to an observed tensor."""

from dataclasses import dataclass

from calibrate.observe.histogram import Histogram
from calibrate.scales.activations import find_scale
from calibrate.scales.derive import kv_scale
from octet.artifacts.calibration import Observation
from octet.numerics import formats
from octet.numerics.formats import Format
from octet.recipe import KvCacheDtype, Recipe, TensorScheme

__all__ = ["ObservedScheme", "scheme_of"]

_PER = {"tensor": "per tensor", "channel": "per channel", "token": "per token"}
_SCALES = {"float32": "", "e8m0": ", power-of-two scales", "e4m3": ", E4M3 scales"}


@dataclass(frozen=True)
class ObservedScheme:
    """The quantization of some linears' activations (`scheme`) or of the KV cache (`kv_cache`).

    Neither is set for activations that stay in full precision. `query` marks queries, which are
    rounded like the cache that they attend to.
    """

    scheme: TensorScheme | None = None
    kv_cache: KvCacheDtype | None = None
    query: bool = False

    @property
    def format(self) -> Format | None:
        """Format of the elements; None in full precision or float16."""
        if self.scheme is not None:
            return formats.format_named(self.scheme.format)
        return formats.FORMATS.get(self.kv_cache or "")

    @property
    def static(self) -> bool:
        """True if one stored scale determines the error, so that a histogram gives it exactly."""
        if self.scheme is not None:
            return not self.scheme.dynamic
        return self.format is not None

    @property
    def stores_scale(self) -> bool:
        """True if the samples determine a stored scale: a static one, or a global one."""
        return self.static or (self.scheme is not None and self.scheme.two_level)

    @property
    def method(self) -> str:
        """Name of the method that chooses the stored scale."""
        if self.scheme is not None:
            return self.scheme.method
        return "range" if self.kv_cache == "e5m2" else "max"

    def scale(self, histogram: Histogram) -> float | None:
        """Returns the scale from these samples (of two levels, the global one); None if none."""
        fmt = self.format
        if fmt is None or not self.stores_scale:
            return None
        if self.kv_cache is not None:
            return kv_scale(histogram, self.kv_cache)
        assert self.scheme is not None
        if self.scheme.two_level:
            return find_scale(histogram, fmt, "max") / formats.E4M3.max
        return find_scale(
            histogram,
            fmt,
            self.scheme.method,
            percentile=self.scheme.percentile,
            margin=self.scheme.margin,
        )

    def __str__(self) -> str:
        if self.query:
            return f"{self.kv_cache} where attention rounds queries, one scale a layer"
        if self.kv_cache is not None:
            known = self.format is not None
            return (
                f"{self.kv_cache} cache, one scale a layer" if known else f"{self.kv_cache} cache"
            )
        if self.scheme is None:
            return "full precision"
        scheme = self.scheme
        per = _PER.get(scheme.granularity, f"per {scheme.group_size}")
        room = f", margin {scheme.margin}" if scheme.margin else ""
        when = "at run time" if scheme.dynamic else f"static ({scheme.method}{room})"
        whole = " under one static global scale" if scheme.two_level else ""
        return f"{scheme.format} {per}, {when}{_SCALES[scheme.scale_format]}{whole}"


def scheme_of(recipe: Recipe, observation: Observation) -> ObservedScheme:
    """Returns the scheme of an observed tensor; if its linears differ, that of a quantized one."""
    if observation.kind == "query":
        e4m3 = recipe.kv_cache == "e4m3"
        return ObservedScheme(kv_cache="e4m3", query=True) if e4m3 else ObservedScheme()
    if observation.kind != "input":
        return ObservedScheme(kv_cache=recipe.kv_cache)
    for consumer in observation.consumers:
        schemes = recipe.scheme_of(consumer)
        if schemes is not None:
            return ObservedScheme(scheme=schemes[1])
    return ObservedScheme()
