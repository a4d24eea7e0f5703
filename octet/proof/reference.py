"""Loads what a proof needs from an artifact: golden records, scenarios and manifest."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from octet.artifacts.golden import GOLDEN_FILE, GoldenSet
from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.artifacts.scenarios import SCENARIOS_FILE, ScenarioSet
from octet.artifacts.serving_path import EXPECTED_FILE, ExpectedSet, Power
from octet.artifacts.signature import require_signature
from octet.errors import ArtifactError, CheckpointError
from octet.recipe import KvCacheDtype, Recipe

__all__ = ["Proofs", "load_proofs"]


@dataclass(frozen=True)
class Proofs:
    """The proof data of an export or a calibration."""

    golden: GoldenSet
    scenarios: ScenarioSet | None  # None: nothing was simulated; a divergence bound applies
    manifest: Manifest
    recipe: Recipe
    kv_cache: KvCacheDtype
    identity: str  # the manifest's
    power: tuple[Power, ...] = ()  # how small a fault passes; empty: not known

    @property
    def weights(self) -> Literal["quantized", "original"]:
        """The kind of weights that the artifact itself holds."""
        return "quantized" if self.manifest.details.get("quantized", True) else "original"


def load_proofs(directory: Path, key: Path | None = None) -> Proofs:
    """Loads the proof data in `directory`; reads no other file of it, such as its weights.

    With the public key `key`, a signature by it is required, and every file is hashed. Raises
    ArtifactError for damaged files, or golden records of another model than the manifest's.
    """
    if key is not None:
        require_signature(directory, key)
    manifest = Manifest.load(directory, verify=key is not None)
    golden = _golden(directory, manifest)
    scenarios = None
    if _listed(directory, SCENARIOS_FILE, manifest):
        try:
            scenarios = ScenarioSet.load(directory, golden)
        except CheckpointError as error:
            raise ArtifactError(f"{error}; {manifest.remedy}") from None
    power: tuple[Power, ...] = ()
    if scenarios is not None and _listed(directory, EXPECTED_FILE, manifest):
        power = ExpectedSet.load(directory).power
    recipe = manifest.recipe
    kv_cache = manifest.details.get("kv_cache", recipe.kv_cache)
    if isinstance(kv_cache, dict):  # an engine's manifest holds the cache's dtype and shape
        kv_cache = kv_cache.get("dtype")
    if kv_cache not in get_args(KvCacheDtype):
        raise ArtifactError(
            f"{directory / MANIFEST_FILE}: kv_cache {kv_cache!r} is no cache; {manifest.remedy}"
        )
    return Proofs(golden, scenarios, manifest, recipe, kv_cache, manifest.identity, power)


def _golden(directory: Path, manifest: Manifest) -> GoldenSet:
    path = directory / GOLDEN_FILE
    if not _listed(directory, GOLDEN_FILE, manifest):
        raise ArtifactError(f"{path}: missing: nothing to prove by; calibrate or export again")
    golden = GoldenSet.load(directory)
    model = json.dumps(manifest.model.files, sort_keys=True)
    if golden.weights_sha256 != hashlib.sha256(model.encode()).hexdigest():
        raise ArtifactError(
            f"{path}: golden records of another model than {MANIFEST_FILE} names"
            f" ({manifest.model.name}); export again"
        )
    if not golden.records:
        raise ArtifactError(f"{path}: holds no golden record; calibrate again")
    return golden


def _listed(directory: Path, name: str, manifest: Manifest) -> bool:
    """Returns whether the manifest lists the file `name`.

    Raises ArtifactError if a listed file is missing or altered.
    """
    if name not in manifest.files:
        return False
    manifest.verify_file(directory, name)
    return True
