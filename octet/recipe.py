"""Defines recipes: the tensors to quantize, their formats and granularities; and named presets."""

import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from octet.errors import ConfigError, nearest

__all__ = [
    "MOST_MARGIN",
    "PRESETS",
    "Granularity",
    "Override",
    "Recipe",
    "TensorScheme",
    "patterns_of",
]

Granularity = Literal["tensor", "channel", "token", "block", "group"]
ScaleMethod = Literal["max", "mse", "four_six", "percentile", "kl"]
KvCacheDtype = Literal["e5m2", "e4m3", "float16"]
SchemeKind = Literal["fp8", "mxfp8", "mxfp4", "nvfp4"]

# Granularities of weights and of activations for which some engine has a GEMM.
_SERVED = (
    ("channel", "token"),
    ("channel", "tensor"),
    ("tensor", "token"),
    ("tensor", "tensor"),
    ("block", "group"),
    ("block", "tensor"),
    ("group", "group"),
)
MOST_MARGIN = 8  # powers of two: more would leave E4M3 less than half of its 18 octaves
BLOCK = 128  # elements: the edge of `block` weights, and the group of their activations

# Element format and scale format -> the group size that hardware supports.
_GROUP_SIZES = {
    ("e4m3", "float32"): BLOCK,
    ("e4m3", "e8m0"): 32,  # MXFP8
    ("e2m1", "e8m0"): 32,  # MXFP4
    ("e2m1", "e4m3"): 16,  # NVFP4
}


class TensorScheme(BaseModel):
    """The quantization of one kind of tensor: weights, or activations of the linear layers.

    `dynamic` means that the scale is computed at run time from the tensor itself. `group_size` is
    in elements along the contracted dimension K. `scale_format` is the format in which scales are
    stored: float32; e8m0, powers of two (MX formats); or e4m3 (NVFP4). With e4m3 there are two
    levels, `real = stored * scale * global_scale`, with one float32 global scale per tensor, which
    is static even if the group scales are dynamic. Method `max` gives FP8 blocks of weights powers
    of two, stored as float32.

    `margin` is head-room of a static activation scale, in powers of two, as Transformer Engine
    defines it: values up to 2^margin times the largest of the samples do not saturate.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["e4m3", "e2m1"] = "e4m3"
    granularity: Granularity
    dynamic: bool = False
    group_size: int | None = None
    scale_format: Literal["float32", "e8m0", "e4m3"] = "float32"
    method: ScaleMethod = "max"
    percentile: float = 99.99
    margin: int = Field(default=0, ge=0, le=MOST_MARGIN)

    @property
    def kind(self) -> SchemeKind:
        """The format's common name, whatever the granularity of its scales."""
        if self.scale_format == "float32":
            return "fp8"
        if self.scale_format == "e4m3":
            return "nvfp4"
        return "mxfp8" if self.format == "e4m3" else "mxfp4"

    @property
    def two_level(self) -> bool:
        """True if one global scale per tensor scales the group scales."""
        return self.scale_format == "e4m3"

    @property
    def blocks(self) -> bool:
        """True for E4M3 with a float32 scale for each block of 128 by 128: DeepSeek's weights."""
        return self.granularity == "block"  # which allows nothing else

    @property
    def weighs_inputs(self) -> bool:
        """True if the error of 4-bit weights is to be weighted by the squares of their inputs."""
        return self.format == "e2m1" and self.method == "mse"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        grouped = self.granularity in ("block", "group")
        if grouped and self.group_size is None:
            raise ValueError(f"granularity '{self.granularity}' needs group_size")
        if self.group_size is not None and not grouped:
            raise ValueError("group_size is for granularity block and group alone")
        size = _GROUP_SIZES.get((self.format, self.scale_format))
        if size is None:
            known = ", ".join(f"{fmt} with {scale}" for fmt, scale in _GROUP_SIZES)
            raise ValueError(
                f"{self.format} with {self.scale_format} scales is no known format; known: {known}"
            )
        if self.scale_format != "float32" and self.granularity != "group":
            raise ValueError(f"{self.scale_format} scales are for granularity group alone")
        if grouped and self.group_size != size:
            raise ValueError(
                f"group_size of {self.format} with {self.scale_format} scales is {size},"
                f" not {self.group_size}"
            )
        if self.granularity == "token" and not self.dynamic:
            raise ValueError("per-token scales exist only at run time: set dynamic: true")
        if self.dynamic and self.method != "max":
            raise ValueError(f"method '{self.method}' is for static scales; dynamic ones are max")
        if self.method == "four_six" and not self.two_level:
            raise ValueError("method four_six is for e2m1 with e4m3 scales (NVFP4) alone")
        if self.margin and (self.dynamic or self.method != "max"):
            raise ValueError("margin is for static activation scales of method max")
        if not 50.0 < self.percentile <= 100.0:
            raise ValueError("percentile must be above 50 and at most 100")
        return self


class Override(BaseModel):
    """Another scheme for the linears whose full module name matches the shell pattern `match`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str
    weights: TensorScheme
    activations: TensorScheme

    @model_validator(mode="after")
    def _expressible(self) -> Self:
        _check_pair(self.weights, self.activations)
        return self


class Recipe(BaseModel):
    """A complete description of a quantized model, apart from the numbers.

    A linear is in full precision if `exclude` matches it; otherwise it takes the scheme of the
    first of `overrides` that matches it, or else `weights` and `activations`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    weights: TensorScheme
    activations: TensorScheme
    kv_cache: KvCacheDtype = "e5m2"
    # Linears whose full module name matches one of these shell patterns stay in full precision.
    exclude: tuple[str, ...] = ("lm_head", "*embed_tokens", "*.gate", "*.router")
    overrides: tuple[Override, ...] = ()

    @model_validator(mode="after")
    def _expressible(self) -> Self:
        _check_pair(self.weights, self.activations)
        return self

    @property
    def takes_from_samples(self) -> bool:
        """True if any scale depends on the samples: of static inputs, 4-bit weights, an E4M3 cache.

        An E5M2 cache has one only where it could not be folded into the weights.
        """
        two_level = any(scheme.two_level for scheme in self._inputs)
        return self.has_static_scales or two_level or self.weighs_inputs

    @property
    def has_static_scales(self) -> bool:
        """True if static scales of activations, or of an E4M3 cache, come from the samples."""
        return self.kv_cache == "e4m3" or any(not scheme.dynamic for scheme in self._inputs)

    @property
    def pairs(self) -> tuple[tuple[TensorScheme, TensorScheme], ...]:
        """Every pair of schemes, of weights and of activations; that of the recipe itself first."""
        others = ((override.weights, override.activations) for override in self.overrides)
        return ((self.weights, self.activations), *others)

    @property
    def _inputs(self) -> tuple[TensorScheme, ...]:
        return tuple(inputs for _, inputs in self.pairs)

    @property
    def weighs_inputs(self) -> bool:
        """True if the scales of some weights depend on the mean squares of their inputs."""
        return any(weights.weighs_inputs for weights, _ in self.pairs)

    def excludes(self, module_name: str) -> bool:
        """Returns whether the linear of that full module name stays in full precision."""
        return any(fnmatch.fnmatchcase(module_name, pattern) for pattern in self.exclude)

    def scheme_of(self, module_name: str) -> tuple[TensorScheme, TensorScheme] | None:
        """Returns the schemes of a linear's weights and activations; None if in full precision."""
        if self.excludes(module_name):
            return None
        for override in self.overrides:
            if fnmatch.fnmatchcase(module_name, override.match):
                return override.weights, override.activations
        return self.weights, self.activations

    def check_patterns(self, linears: Sequence[str]) -> None:
        """Raises ConfigError for a pattern of `exclude` or `overrides` that matches none of them.

        Patterns that every recipe excludes by default may match nothing.
        """
        everywhere = Recipe.model_fields["exclude"].default
        named = [*linears, "lm_head", "model.embed_tokens"]  # the last two are never quantized
        for pattern in self.exclude:
            if pattern not in everywhere and not fnmatch.filter(named, pattern):
                raise ConfigError(self._no_match("exclude", pattern, linears))
        for index, override in enumerate(self.overrides):
            if not fnmatch.filter(linears, override.match):
                raise ConfigError(
                    self._no_match(f"overrides.{index}.match", override.match, linears)
                )

    def check_quantizes(self, linears: Sequence[str]) -> None:
        """Raises ConfigError if none of them is quantized (a budget may end with such a recipe)."""
        if not any(map(self.scheme_of, linears)):
            raise ConfigError(
                f"recipe {self.name} excludes every linear: nothing is left to quantize"
            )

    def _no_match(self, where: str, pattern: str, linears: Sequence[str]) -> str:
        kinds = {f"*.{name.rpartition('.')[2]}" for name in linears}  # *.q_proj and so on
        hint = nearest(pattern, [*linears, *kinds])
        if "did you mean" not in hint:  # the list of all names could be very long
            hint = nearest("", kinds)
        return f"recipe {self.name}: {where}: no linear of the model matches '{pattern}'{hint}"

    @classmethod
    def load(cls, name_or_path: str) -> Self:
        """Loads a preset by name, or a recipe from a YAML file.

        Raises ConfigError for an unknown name (with the nearest one) and for a file that does not
        validate.
        """
        if name_or_path in PRESETS:
            return cls.model_validate(PRESETS[name_or_path].model_dump())
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"unknown recipe '{name_or_path}'{nearest(name_or_path, PRESETS)}")
        try:
            data = yaml.safe_load(path.read_text("utf-8"))
            return cls.model_validate(data)
        except OSError as error:
            raise ConfigError(f"recipe {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"recipe {path}: not UTF-8 text") from None
        except (yaml.YAMLError, ValidationError) as error:
            detail = _first_problem(error)
            raise ConfigError(f"recipe {path}: {detail}") from None


def patterns_of(linears: Iterable[str]) -> list[str]:
    """Returns the shell patterns of these linears: one for all experts of a layer, as engines do.

    One kernel computes a layer's experts, so it takes one format for all of them.
    """
    parts = (name.partition(".experts.") for name in linears)
    return list(dict.fromkeys(f"{a}{b}*" if b else a for a, b, _ in parts))


def _check_pair(weights: TensorScheme, activations: TensorScheme) -> None:
    if weights.dynamic or weights.granularity == "token":
        raise ValueError("weights are quantized once, at export: dynamic must be false")
    if weights.margin:
        raise ValueError("margin is for activations: weights do not change, and need no head-room")
    pair = (weights.granularity, activations.granularity)
    if pair not in _SERVED:
        known = ", ".join(f"{w} with {a}" for w, a in _SERVED)
        raise ValueError(
            f"{pair[0]} weights with {pair[1]} activations is served by nothing; known: {known}"
        )
    if activations.dynamic != (activations.granularity != "tensor"):
        raise ValueError("activation scales are static per tensor, and dynamic otherwise")
    if weights.method not in ("max", "mse", "four_six"):
        raise ValueError(
            f"weights.method '{weights.method}' is for activations; weights take max, mse or"
            " four_six"
        )


def _first_problem(error: yaml.YAMLError | ValidationError) -> str:
    if isinstance(error, ValidationError):
        problems = error.errors()
        # A misspelt key causes two errors, a missing and an unknown key: the unknown one says more.
        unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
        first = (unknown or problems)[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        if first["type"] == "extra_forbidden":
            key = str(first["loc"][-1])
            fields = {*Recipe.model_fields, *TensorScheme.model_fields}
            return f"{where}: unknown key{nearest(key, fields)}"
        plain = {"missing": "missing", "model_type": "should be a section of keys and values"}
        message = first["msg"].removeprefix("Value error, ")
        return f"{where}: {plain.get(first['type'], message)}"
    return " ".join(str(error).split())


_CHANNEL = TensorScheme(granularity="channel")
_TENSOR = TensorScheme(granularity="tensor")
_BLOCK = TensorScheme(granularity="block", group_size=BLOCK)


def _groups(format: Literal["e4m3", "e2m1"], scale_format: Literal["e8m0", "e4m3"]) -> Recipe:
    """Returns a grouped recipe: weights by least squared error, activations at run time."""
    size = _GROUP_SIZES[format, scale_format]
    name = f"mxfp{'8' if format == 'e4m3' else '4'}" if scale_format == "e8m0" else "nvfp4"
    scheme = TensorScheme(
        format=format, granularity="group", group_size=size, scale_format=scale_format, method="mse"
    )
    dynamic = scheme.model_copy(update={"dynamic": True, "method": "max"})
    return Recipe(name=name, weights=scheme, activations=dynamic)


PRESETS: dict[str, Recipe] = {
    "fp8": Recipe(
        name="fp8",
        weights=_CHANNEL,
        activations=TensorScheme(granularity="token", dynamic=True),
    ),
    "fp8-static": Recipe(name="fp8-static", weights=_TENSOR, activations=_TENSOR),
    "fp8-block": Recipe(
        name="fp8-block",
        weights=_BLOCK,
        activations=TensorScheme(granularity="group", dynamic=True, group_size=BLOCK),
    ),
    "mxfp8": _groups("e4m3", "e8m0"),
    "mxfp4": _groups("e2m1", "e8m0"),
    "nvfp4": _groups("e2m1", "e4m3"),
}
