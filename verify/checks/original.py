"""Finds the checkpoint that an artifact was made from, and checks its hashes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError, CheckpointError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.numerics.bits import float32_to_bf16
from octet.storage.tensors import Tensor
from verify.reader.checkpoint import Written

__all__ = ["Original", "find_original"]


@dataclass(frozen=True)
class Original:
    """The checkpoint before quantization, with the changes of its calibration if it is known."""

    checkpoint: Checkpoint
    calibration: Calibration | None = None

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.checkpoint.shape(name) for name in self.checkpoint.tensor_names}

    @cached_property
    def _reader(self) -> Written:
        return Written.open(self.checkpoint.path)

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(name)

    def weight(self, module: str) -> Tensor:
        """Returns a linear's weight; FP8 blocks are decoded by verify's own reader."""
        name = f"{module}.weight"
        if not self.checkpoint.decodes(name) or name in self.checkpoint.powers:
            return self.read(name)
        real = self._reader.dequantized(module)
        if real is None:
            raise CheckpointError(f"{self.checkpoint.path}: {name} cannot be decoded by verify")
        as_bf16 = self.checkpoint.dtype(name) == "BF16"
        return Tensor("BF16", float32_to_bf16(real)) if as_bf16 else Tensor("F32", real)

    def release(self) -> None:
        self.checkpoint.release()

    def others(self, module: str, spec: ModelSpec) -> Mapping[str, Callable[[], Tensor]]:
        """Returns weights of equal shape in the same layer, which may have been written instead."""
        return dict(self._others(module, spec))

    def _others(self, module: str, spec: ModelSpec) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        layer = module.partition(".self_attn")[0].partition(".mlp")[0]
        shape = self.shapes.get(f"{module}.weight")
        for linear in spec.linears():
            name = f"{linear.name}.weight"
            if (
                linear.name != module
                and linear.name.startswith(f"{layer}.")
                and self.shapes.get(name) == shape
            ):
                yield linear.name, partial(self.read, name)


def find_original(
    manifest: Manifest | None, model: Path | None, calibration: Path | None
) -> Original | None:
    """Finds the original by `--model`, `--calibration` or a calibration's manifest; else None.

    Raises ArtifactError or CheckpointError if the artifact was not made from it.
    """
    opened = None if calibration is None else Calibration.load(calibration)
    if opened is not None and manifest is not None:
        made_from = manifest.identity if manifest.kind == "calibration" else manifest.calibration
        if made_from != opened.manifest.identity:
            raise ArtifactError(
                f"{calibration}: not the calibration that this was made from"
                f" (identity {opened.manifest.identity[:12]}…, not {str(made_from)[:12]}…)"
            )
    if model is None:
        recorded = opened.manifest if opened is not None else manifest
        named = recorded.details.get("source") if recorded is not None else None
        if not isinstance(named, str) or not Path(named).is_dir():
            if opened is not None:
                raise ArtifactError(
                    f"{calibration}: its checkpoint {named} is not there; say where with --model"
                )
            return None
        model = Path(named)
    checkpoint = Checkpoint.open(model)
    if manifest is not None:
        _require(manifest, checkpoint)
    if opened is not None:
        opened.manifest.model.require(checkpoint)
        checkpoint = opened.applied_to(checkpoint)
    elif manifest is not None:
        checkpoint = checkpoint.with_folds(manifest.folds)
    return Original(checkpoint, opened)


def _require(manifest: Manifest, checkpoint: Checkpoint) -> None:
    current = checkpoint.weight_hashes
    for file, digest in manifest.model.files.items():
        if current.get(file) != digest:
            what = "is another file" if file in current else "is missing"
            raise CheckpointError(
                f"{checkpoint.path / file} {what}: this was made from {manifest.model.name} with"
                f" {file} of SHA-256 {digest[:12]}…; give that checkpoint with --model"
            )
