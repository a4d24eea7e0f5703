"""What every export starts from: a calibration and the checkpoint it was made from, both verified.

Everything that can be refused is refused here, before the first byte is written.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from octet import scaling
from octet.artifact import Kind, Manifest, software
from octet.calibration import WEIGHTS_FILE, Calibration
from octet.checkpoint import Checkpoint
from octet.errors import ArtifactError, ExportError, UnsupportedError
from octet.formats import E4M3
from octet.golden import GOLDEN_FILE
from octet.model import Linear, ModelSpec
from octet.recipe import Recipe, TensorScheme

__all__ = ["Source", "require_space"]

GENERATION_CONFIG = "generation_config.json"
_SPARE_BYTES = 64 << 20  # for what is written beside the weights


@dataclass(frozen=True)
class Source:
    """A calibration with its checkpoint."""

    calibration: Calibration
    checkpoint: Checkpoint

    @classmethod
    def open(cls, calibration: Path, model: Path | None = None) -> Self:
        """Opens both; `model` overrides where the calibration says that the checkpoint was.

        Raises ArtifactError if either has changed since calibration, or if a scale is missing.
        """
        opened = Calibration.load(calibration)
        where = model or Path(opened.manifest.details.get("source", "(not recorded)"))
        if model is None and not where.is_dir():
            raise ArtifactError(
                f"{calibration}: its checkpoint {where} is not there; say where with --model"
            )
        checkpoint = Checkpoint.open(where)
        opened.manifest.model.require(checkpoint)
        if (calibration / WEIGHTS_FILE).exists():
            checkpoint = checkpoint.with_changes(calibration / WEIGHTS_FILE)
        source = cls(opened, checkpoint)
        source._check_supported()
        source._check_scales()
        return source

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def recipe(self) -> Recipe:
        return self.calibration.manifest.recipe

    def quantizes(self, linear: Linear) -> bool:
        return not self.recipe.excludes(linear.name)

    def quantized_linears(self) -> dict[str, Linear]:
        """Module name to linear, those that the recipe quantizes."""
        return {item.name: item for item in self.spec.linears() if self.quantizes(item)}

    def weight_codes(self, linear: Linear) -> npt.NDArray[np.uint8]:
        """E4M3 codes of the linear's weight, [N, K]."""
        name = f"{linear.name}.weight"
        weight = self.checkpoint.read(name).float32()
        granularity = granularity_of(self.recipe.weights)
        return scaling.quantize(weight, self.weight_scale(linear), E4M3, granularity, name=name)

    def weight_scale(self, linear: Linear) -> npt.NDArray[np.float32]:
        """[], [N, 1] or [⌈N/128⌉, ⌈K/128⌉]."""
        return self.calibration.scales[f"{linear.name}.weight_scale"]

    def input_scale(self, linear: Linear) -> npt.NDArray[np.float32]:
        """[], of a recipe with static activations."""
        return self.calibration.scales[f"{linear.name}.input_scale"]

    def cache_scales(self, layer: int) -> tuple[float, float]:
        """Scales of K and V at the cache; 1 where the calibration gives none."""
        attention = f"{self.spec.layer(layer)}.self_attn"
        one = np.float32(1)
        k, v = (self.calibration.scales.get(f"{attention}.{x}_scale", one) for x in "kv")
        return float(k), float(v)

    def copy_side_files(self, directory: Path, *, config: bool = True) -> None:
        """Copies the tokenizer, generation config, golden records and (`config`) config.json."""
        shutil.copyfile(self.calibration.path / GOLDEN_FILE, directory / GOLDEN_FILE)
        files = [*self.checkpoint.tokenizer_files, self.checkpoint.path / GENERATION_CONFIG]
        files += [self.checkpoint.path / "config.json"] if config else []
        for file in files:
            if file.is_file():
                shutil.copyfile(file, directory / file.name)

    def manifest(self, kind: Kind, details: dict[str, Any], *packages: str) -> Manifest:
        """The manifest of an export of `kind`, to be completed with its files."""
        origin = self.calibration.manifest
        return Manifest(
            kind=kind,
            model=origin.model,
            recipe=origin.recipe,
            samples=origin.samples,
            calibration=origin.identity,
            details=details,
            software=software("numpy", *packages),
        )

    def _check_supported(self) -> None:
        """Raises UnsupportedError for what no export writes yet."""
        reason = self.spec.unexportable()
        if reason is not None:
            raise UnsupportedError(f"{self.checkpoint.path}: {reason}")
        reason = self.recipe.unexportable(cache=False)  # each export has caches of its own
        if reason is not None:
            kept = ", with those layers in full precision by `exclude`"
            raise UnsupportedError(
                f"{self.calibration.path}: {reason}; derive fp8, fp8-static or fp8-block with"
                f" `octet rescale`{kept if self.recipe.overrides else ''}"
            )

    def _check_scales(self) -> None:
        weights = granularity_of(self.recipe.weights)
        for linear in self.quantized_linears().values():
            shape = (linear.out_features, linear.in_features)
            wanted = {f"{linear.name}.weight_scale": weights.scale_shape(shape)}
            if not self.recipe.activations.dynamic:
                wanted[f"{linear.name}.input_scale"] = ()
            for name, expected in wanted.items():
                self._check_scale(name, expected)

    def _check_scale(self, name: str, expected: tuple[int, ...]) -> None:
        scale = self.calibration.scales.get(name)
        where = f"{self.calibration.path / 'scales.safetensors'}: {name}"
        if scale is None:
            raise ArtifactError(f"{where} is missing; calibrate again")
        if scale.shape != expected:
            raise ArtifactError(
                f"{where} has shape {list(scale.shape)}, recipe {self.recipe.name} needs"
                f" {list(expected)}; calibrate again"
            )
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise ArtifactError(f"{where} is not positive and finite; calibrate again")


def granularity_of(scheme: TensorScheme) -> scaling.Granularity:
    return scaling.Granularity.of(scheme.granularity, scheme.group_size)


def require_space(destination: Path, nbytes: int) -> None:
    """Raises ExportError unless the file system of `destination` has room for `nbytes`."""
    parent = destination.absolute()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < nbytes + _SPARE_BYTES:
        raise ExportError(
            f"{destination}: the export needs {(nbytes + _SPARE_BYTES) / 1e9:.1f} GB,"
            f" {free / 1e9:.1f} GB are free there"
        )
