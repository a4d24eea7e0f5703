"""Opens the inputs of an export: a calibration and the checkpoint it was made from, both verified.

Everything that can be refused is refused here, before the first byte is written.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from export.codes import weight_codes
from octet.artifacts.calibration import WEIGHTS_FILE, Calibration
from octet.artifacts.golden import GOLDEN_FILE
from octet.artifacts.manifest import Kind, Manifest, software
from octet.artifacts.scenarios import SCENARIOS_FILE
from octet.artifacts.serving_path import EXPECTED_FILE, ExpectedSet
from octet.errors import ArtifactError, ExportError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import Linear, ModelSpec
from octet.numerics import scaling
from octet.recipe import KvCacheDtype, Recipe, TensorScheme
from octet.storage.tensors import Tensor

__all__ = ["Source", "require_space"]

_SPARE_BYTES = 64 << 20  # reserve for the files beside the weights


@dataclass(frozen=True)
class Source:
    """A calibration, its checkpoint, and the type of KV cache that the export is for."""

    calibration: Calibration
    checkpoint: Checkpoint
    kv_cache: KvCacheDtype
    # Size, time and inode of each file that is read later, recorded before it was hashed.
    stamps: Mapping[Path, "_Stamp"] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        calibration: Path,
        model: Path | None = None,
        *,
        kv_cache: KvCacheDtype | None = None,
        shards: bool = True,
    ) -> Self:
        """Opens the calibration and its checkpoint, and verifies both.

        `model` overrides the checkpoint path that the calibration recorded, `kv_cache` the recipe's
        cache. Raises ArtifactError if either has changed since calibration, or if a scale is
        missing. With `shards=False` the shards are not hashed here: a caller that streams them
        hashes them on the way, see `require_shard`.
        """
        stamps = _stamps(calibration, (WEIGHTS_FILE, GOLDEN_FILE, EXPECTED_FILE, SCENARIOS_FILE))
        opened = Calibration.load(calibration)
        where = model or Path(str(opened.manifest.details.get("source", "(not recorded)")))
        if model is None and not where.is_dir():
            raise ArtifactError(
                f"{calibration}: its checkpoint {where} is not there; say where with --model"
            )
        identity = opened.manifest.model
        stamps |= _stamps(where, (*identity.files, *identity.tokenizer))
        checkpoint = Checkpoint.open(where)
        opened.manifest.model.require(checkpoint, shards=shards)
        source = cls(
            opened,
            opened.applied_to(checkpoint),
            kv_cache or opened.manifest.recipe.kv_cache,
            stamps,
        )
        source._check_scales()
        _ = opened.golden  # raises ArtifactError if they are invalid: every export copies them
        return source

    def require_unaltered(self) -> None:
        """Raises ArtifactError for a file that was written to since `open`.

        `open` hashes the files, but an export reads them until its end. Only size, time and inode
        are compared, which costs nothing.
        """
        for path, stamp in self.stamps.items():
            if _stamp(path) != stamp:
                raise ArtifactError(f"{path} was altered while it was read; export again")

    def require_shard(self, path: Path, digest: str) -> None:
        """Raises ArtifactError if `digest` is not the shard's hash at calibration."""
        self.calibration.manifest.model.require_file(path, digest)

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def recipe(self) -> Recipe:
        return self.calibration.manifest.recipe

    def schemes(self, linear: Linear) -> tuple[TensorScheme, TensorScheme] | None:
        """Returns the schemes of weights and activations; None if it stays in full precision."""
        return self.recipe.scheme_of(linear.name)

    def quantized_schemes(self, linear: Linear) -> tuple[TensorScheme, TensorScheme]:
        """Returns the schemes of weights and activations of a linear that the recipe quantizes.

        Raises ValueError for any other linear.
        """
        schemes = self.schemes(linear)
        if schemes is None:
            raise ValueError(f"recipe {self.recipe.name} does not quantize {linear.name}")
        return schemes

    def quantizes(self, linear: Linear) -> bool:
        return self.schemes(linear) is not None

    def quantized_linears(self) -> dict[str, Linear]:
        """Maps module name to linear, for the linears that the recipe quantizes."""
        return {item.name: item for item in self.spec.linears() if self.quantizes(item)}

    def weight_codes(self, linear: Linear) -> npt.NDArray[np.uint8]:
        """Returns E4M3 [N, K], or E2M1 [N, K/2]: two a byte, the even column in the low half."""
        name, schemes = f"{linear.name}.weight", self.quantized_schemes(linear)
        scale, shared = self.weight_scale(linear), self.weight_global_scale(linear)
        if (blocks := self.blocks_of(linear)) is not None:
            codes: npt.NDArray[np.uint8] = blocks[0].codes
            return codes
        return weight_codes(self.checkpoint.read(name), scale, shared, schemes[0], name=name)

    def blocks_of(self, linear: Linear) -> tuple[Tensor, Tensor] | None:
        """Returns the codes and scales that the checkpoint stores, if they are exported unchanged.

        That is so if the recipe and the checkpoint both have FP8 blocks, with equal scales. None if
        the weight has to be quantized.
        """
        schemes = self.schemes(linear)
        if schemes is None or not schemes[0].blocks:
            return None
        blocks = self.checkpoint.blocks_of(f"{linear.name}.weight")
        if blocks is None or not np.array_equal(blocks[1].float32(), self.weight_scale(linear)):
            return None
        return blocks

    def weight_scale(self, linear: Linear) -> npt.NDArray[np.float32]:
        """Returns the scale: [], [N, 1], [⌈N/128⌉, ⌈K/128⌉] or [N, ⌈K/g⌉]."""
        return self.calibration.scales[f"{linear.name}.weight_scale"]

    def weight_global_scale(self, linear: Linear) -> npt.NDArray[np.float32] | None:
        """Returns the global scale [] of a two-level scheme; None for other schemes."""
        return self.calibration.scales.get(f"{linear.name}.weight_global_scale")

    def input_scale(self, linear: Linear) -> npt.NDArray[np.float32]:
        """Returns the scale [] of static activations."""
        return self.calibration.scales[f"{linear.name}.input_scale"]

    def input_global_scale(self, linear: Linear) -> npt.NDArray[np.float32]:
        """Returns the global scale [] of dynamic activations in a two-level scheme."""
        return self.calibration.scales[f"{linear.name}.input_global_scale"]

    def cache_scales(self, layer: int) -> tuple[float, float]:
        """Returns the scales of K and V in a cache of type `kv_cache`."""
        attention = f"{self.spec.layer(layer)}.self_attn"
        k, v = (self.calibration.cache_scale(attention, x, self.kv_cache) for x in ("k", "v"))
        # A missing scale is 1: `open` has checked that the needed ones exist.
        return 1.0 if k is None else k, 1.0 if v is None else v

    def stored_nbytes(self) -> int:
        """Returns the bytes of all tensors, with codes and scales in place of quantized weights."""
        nbytes = self.checkpoint.nbytes
        total = sum(map(nbytes, self.checkpoint.tensor_names))
        for linear in self.quantized_linears().values():
            schemes = self.quantized_schemes(linear)
            size = linear.out_features * linear.in_features
            total -= nbytes(f"{linear.name}.weight")
            total += size // 2 if schemes[0].format == "e2m1" else size
            scales = self.weight_scale(linear)
            total += scales.size if schemes[0].scale_format != "float32" else scales.nbytes
        return total

    def query_scale(self, layer: int) -> float | None:
        """Returns the scale for queries that an engine rounds to E4M3; None if not observed."""
        attention = f"{self.spec.layer(layer)}.self_attn"
        return self.calibration.cache_scale(attention, "q", self.kv_cache)

    def copy_side_files(
        self, directory: Path, *, config: bool = True, quantized: bool = True
    ) -> None:
        """Copies the tokenizer, generation config, golden records and (`config`) config.json.

        Also copies the log-probabilities expected under each scenario (serving unquantized is one)
        and, if the export is `quantized`, the expected cost of the recipe.
        """
        shutil.copyfile(self.calibration.path / GOLDEN_FILE, directory / GOLDEN_FILE)
        files = [*self.checkpoint.side_files]
        files.append(self.calibration.path / SCENARIOS_FILE)
        files += [self.calibration.path / EXPECTED_FILE] if quantized else []
        if config and self.checkpoint.blocks is not None:  # the export is not in blocks
            text = json.dumps(self.checkpoint.config, indent=2) + "\n"
            (directory / "config.json").write_text(text, "utf-8")
        elif config:
            files.append(self.checkpoint.path / "config.json")
        for file in files:
            if file.is_file():
                shutil.copyfile(file, directory / file.name)

    def manifest(
        self, kind: Kind, details: dict[str, Any], *packages: str, quantized: bool = True
    ) -> Manifest:
        """Returns the manifest of an export of `kind`, to be completed with its files.

        `warnings` in `details` are added to those of the checkpoint. The recipe's expected cost is
        left out if the export is not `quantized`.
        """
        warnings = [*self.checkpoint.warnings, *details.get("warnings", ())]
        if kind != "checkpoint" and quantized:
            warnings += self._other_arithmetic()
        details = details | self._changes() | ({"warnings": warnings} if warnings else {})
        origin = self.calibration.manifest
        details["predicted"] = origin.predicted
        return Manifest(
            kind=kind,
            model=origin.model,
            recipe=origin.recipe,
            samples=origin.samples,
            calibration=origin.identity,
            details=details | self._expected() if quantized else details,
            software=software("numpy", *packages),
        )

    def _other_arithmetic(self) -> Iterator[str]:
        """Yields a warning if the export rounds inputs that the calibration left as they are."""
        origin = self.calibration.manifest
        if origin.runs_weight_only:
            trained = self._changes().get("algorithm") == "recover"
            done, command = ("trained", "recover") if trained else ("measured", "calibrate")
            yield (
                f"{self.calibration.path} was {done} for GPUs that do not round the inputs of"
                f" {' and '.join(origin.runs_weight_only)} linears; this export rounds them, so it"
                f" may be less exact: run octet {command} again for GPUs that do (--for b200)"
            )

    def _changes(self) -> dict[str, Any]:
        """Names what changed weights before quantization: an algorithm, and folded cache scales.

        The exported weights are then not the original model's. Also names the schemes that were
        measured, and trained, as the GPUs of `--for` run them: weight-only.
        """
        origin = self.calibration.manifest
        found, changes = origin.details.get("algorithm"), dict[str, Any]()
        if isinstance(found, dict) and "name" in found:
            changes["algorithm"] = found["name"]
        if origin.runs_weight_only:
            changes["runs_weight_only"] = list(origin.runs_weight_only)
        return changes | ({"folded": origin.folds} if origin.folds else {})

    def _expected(self) -> dict[str, Any]:
        """Returns the expected cost in nats, by serving path with this cache; {} if unpredicted."""
        if not (self.calibration.path / EXPECTED_FILE).is_file():
            return {}
        ranges = {
            item.path.label: {"low": item.low, "mean": item.mean, "high": item.high}
            for item in ExpectedSet.load(self.calibration.path).expectations
            if item.path.kv_cache == self.kv_cache
        }
        return {"expected_divergence": ranges}

    def _check_scales(self) -> None:
        """Raises ArtifactError if a scale that the recipe needs is missing or invalid."""
        for linear in self.quantized_linears().values():
            weights, inputs = self.quantized_schemes(linear)
            shape = (linear.out_features, linear.in_features)
            self._check_scale(f"{linear.name}.weight_scale", granularity_of(weights), shape)
            if weights.two_level:
                self._check_scale(f"{linear.name}.weight_global_scale")
            if not inputs.dynamic:
                self._check_scale(f"{linear.name}.input_scale")
            elif inputs.two_level:
                self._check_scale(f"{linear.name}.input_global_scale")
        for index in range(self.spec.layers):
            attention = f"{self.spec.layer(index)}.self_attn"
            for which in ("k", "v"):
                self._check_cache_scale(attention, which)

    def _check_cache_scale(self, attention: str, which: Literal["k", "v"]) -> None:
        scale = self.calibration.cache_scale(attention, which, self.kv_cache)
        where = f"{self.calibration.path}: {attention}.{which}_scale"
        if scale is None and self.kv_cache == self.recipe.kv_cache:
            raise ArtifactError(f"{where} is missing; calibrate again")
        if scale is None:
            raise ArtifactError(
                f"{where} of an {self.kv_cache} cache is missing: derive it with `octet rescale"
                f" {self.calibration.path} --kv-cache {self.kv_cache}`"
            )
        if not (math.isfinite(scale) and scale > 0):
            raise ArtifactError(f"{where} is not positive and finite; calibrate again")

    def _check_scale(
        self,
        name: str,
        granularity: scaling.Granularity = scaling.TENSOR,
        shape: tuple[int, ...] = (1, 1),
    ) -> None:
        expected = granularity.scale_shape(shape)
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


# Size, time of the last write in ns, inode; None for a file that does not exist.
_Stamp: TypeAlias = tuple[int, int, int] | None


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:  # the code that reads the file reports the error
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _stamps(directory: Path, names: Iterable[str]) -> dict[Path, _Stamp]:
    return {directory / name: _stamp(directory / name) for name in names}


def granularity_of(scheme: TensorScheme) -> scaling.Granularity:
    """Returns the tiles whose elements share a scale in this scheme."""
    return scaling.Granularity.of(scheme.granularity, scheme.group_size)


def require_space(destination: Path, nbytes: int) -> None:
    """Raises ExportError unless `nbytes` and a reserve are free on `destination`'s file system."""
    parent = destination.absolute()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < nbytes + _SPARE_BYTES:
        raise ExportError(
            f"{destination}: the export needs {(nbytes + _SPARE_BYTES) / 1e9:.1f} GB,"
            f" {free / 1e9:.1f} GB are free there"
        )
