"""What to quantize, to which format, with which granularity; and the few named presets."""

import fnmatch
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from octet.errors import ConfigError, nearest

__all__ = ["PRESETS", "Granularity", "Recipe", "TensorScheme"]

Granularity = Literal["tensor", "channel", "token", "block", "group"]
ScaleMethod = Literal["max", "mse", "percentile", "kl"]
KvCacheDtype = Literal["e5m2", "e4m3", "float16"]

# Granularities of weights and of activations that some engine multiplies.
_SERVED = (
    ("channel", "token"),
    ("channel", "tensor"),
    ("tensor", "tensor"),
    ("block", "group"),
    ("block", "tensor"),
)
BLOCK = 128  # the block edge of `block` weights and the group of their activations, in elements


class TensorScheme(BaseModel):
    """How one kind of tensor (weights, or the inputs of the linears) is quantized.

    `dynamic` means that the scale is computed at run time from the tensor itself. `group_size` is
    in elements along the contracted dimension K.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["e4m3"] = "e4m3"
    granularity: Granularity
    dynamic: bool = False
    group_size: int | None = None
    method: ScaleMethod = "max"
    percentile: float = 99.99

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        grouped = self.granularity in ("block", "group")
        if grouped and self.group_size is None:
            raise ValueError(f"granularity '{self.granularity}' needs group_size")
        if self.group_size is not None and (not grouped or self.group_size != BLOCK):
            raise ValueError(f"group_size is {BLOCK}, for granularity block and group alone")
        if self.granularity == "token" and not self.dynamic:
            raise ValueError("per-token scales exist only at run time: set dynamic: true")
        if not 50.0 < self.percentile <= 100.0:
            raise ValueError("percentile must be above 50 and at most 100")
        return self


class Recipe(BaseModel):
    """A complete description of a quantized model, apart from the numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    weights: TensorScheme
    activations: TensorScheme
    kv_cache: KvCacheDtype = "e5m2"
    # Linears whose full module name matches one of these shell patterns stay in full precision.
    exclude: tuple[str, ...] = ("lm_head", "*embed_tokens", "*.gate", "*.router")

    @model_validator(mode="after")
    def _expressible(self) -> Self:
        if self.weights.dynamic or self.weights.granularity == "token":
            raise ValueError("weights are quantized once, at export: dynamic must be false")
        pair = (self.weights.granularity, self.activations.granularity)
        if pair not in _SERVED:
            known = ", ".join(f"{w} with {a}" for w, a in _SERVED)
            raise ValueError(
                f"{pair[0]} weights with {pair[1]} activations is served by nothing; known: {known}"
            )
        if self.activations.dynamic != (self.activations.granularity != "tensor"):
            raise ValueError("activation scales are static per tensor, and dynamic otherwise")
        return self

    def excludes(self, module_name: str) -> bool:
        """Whether the linear of that full module name stays in full precision."""
        return any(fnmatch.fnmatchcase(module_name, pattern) for pattern in self.exclude)

    @classmethod
    def load(cls, name_or_path: str) -> Self:
        """A preset by name, or a recipe from a YAML file.

        Raises ConfigError for an unknown name (with the nearest one) and for a file that does not
        validate.
        """
        if name_or_path in PRESETS:
            return cls.model_validate(PRESETS[name_or_path].model_dump())
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"unknown recipe '{name_or_path}'{nearest(name_or_path, PRESETS)}")
        try:
            data = yaml.safe_load(path.read_text())
            return cls.model_validate(data)
        except OSError as error:
            raise ConfigError(f"recipe {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"recipe {path}: not UTF-8 text") from None
        except (yaml.YAMLError, ValidationError) as error:
            detail = _first_problem(error)
            raise ConfigError(f"recipe {path}: {detail}") from None


def _first_problem(error: yaml.YAMLError | ValidationError) -> str:
    if isinstance(error, ValidationError):
        problems = error.errors()
        # A misspelt key shows as one missing and one unknown: the unknown one says more.
        unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
        first = (unknown or problems)[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        if first["type"] == "extra_forbidden":
            key = str(first["loc"][-1])
            fields = {*Recipe.model_fields, *TensorScheme.model_fields}
            return f"{where}: unknown key{nearest(key, fields)}"
        return f"{where}: {first['msg']}"
    return " ".join(str(error).split())


_CHANNEL = TensorScheme(granularity="channel")
_TENSOR = TensorScheme(granularity="tensor")
_BLOCK = TensorScheme(granularity="block", group_size=BLOCK)

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
}
