"""The engine directory that an entry of a Triton model repository copies."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from export.source import require_space
from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import ArtifactError

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """An engine directory, verified."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, engine: Path, calibration: Path) -> "Plan":
        manifest = Manifest.load(engine, "engine")
        if manifest.calibration != Manifest.load(calibration, "calibration", verify=False).identity:
            raise ArtifactError(
                f"{engine}: was not built from {calibration}; build it with"
                f" `octet build-engine {calibration}`"
            )
        return cls(engine, manifest)

    def copy(self, destination: Path) -> Manifest:
        """Copies what the manifest lists; `destination` may exist."""
        require_space(destination, self.nbytes)
        for name in self._names:
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.path / name, destination / name)
        return self.manifest

    @property
    def _names(self) -> list[str]:
        return [*self.manifest.files, MANIFEST_FILE]

    @property
    def nbytes(self) -> int:
        return sum((self.path / name).stat().st_size for name in self._names)

    @property
    def limits(self) -> tuple[int, int]:
        """Sequences in one decoding step, and tokens of the longest."""
        return self.manifest.details["max_batch"], self.manifest.details["max_length"]
