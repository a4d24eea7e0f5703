"""Makes the gateway's settings from what `octet serve` was given; loads no web server."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from octet.artifacts.golden import GOLDEN_FILE
from octet.artifacts.manifest import MANIFEST_FILE, Kind, Manifest
from octet.errors import ArtifactError, ConfigError
from octet.hardware.machine import local_devices
from octet.hardware.support import support, weight_only
from octet.recipe import KvCacheDtype, Recipe
from serve.config import (
    EmbeddedConfig,
    GatewayConfig,
    Health,
    ManagedConfig,
    ModelConfig,
    PoolConfig,
)
from serve.config.checks import load_config
from serve.config.proof import Proof
from serve.vllm.command import find_vllm, gpus, machine_flags

__all__ = ["KEPT", "WAYS", "Options", "Way", "cache_for", "settings_of", "takes_vllm"]

_log = logging.getLogger(__name__)

# Ways of serving an exported checkpoint, from the fastest to the one that runs anywhere:
# activations rounded as in the recipe; 16-bit activations; the model before quantization; an ONNX
# export on the CPU.
Way = Literal["native", "weight-only", "original", "onnx"]
WAYS: tuple[Way, ...] = ("native", "weight-only", "original", "onnx")
KEPT = ("calibration", "checkpoint", "onnx")  # directories that `octet serve MODEL` makes and keeps

_SLOW_S = 600.0  # for a proof on a CPU


@dataclass(frozen=True, kw_only=True)
class Options:
    """How `octet serve CHECKPOINT` serves it."""

    python: Path | None = None  # of the environment that has vLLM
    options: tuple[str, ...] = ()  # of vLLM
    environment: Mapping[str, str] = field(default_factory=dict)  # of vLLM
    fallback: bool = False  # goes on to the next way if one does not start, or is not proven
    way: Way | None = None  # the first


def settings_of(
    target: Path | None, config: Path | None, options: Options | None = None
) -> GatewayConfig:
    """Returns the settings in file `config`, or those that serve the export `target`.

    `target` may also be a directory that holds exports under the names of `KEPT`. The export gets
    its model's name. Raises an OctetError for a file or a directory that cannot be served.
    """
    options = options or Options()
    if config is not None:
        return load_config(config)
    if target is None:
        raise ConfigError("nothing to serve: give an export or a configuration file")
    target = _kept_in(target, options)
    # Fails early for a directory of another kind; the runner verifies its hashes.
    manifest = Manifest.load(target, verify=False)
    if manifest.kind == "checkpoint":
        return _Checkpoint(target, manifest, options).settings()
    if manifest.kind not in ("onnx", "engine"):
        raise ConfigError(
            f"{target}: is a {manifest.kind}; what is served here is a checkpoint, an ONNX export"
            " or an engine: make one with octet export"
        )
    if options.way not in (None, "onnx") or options.options:
        raise ConfigError(f"{target}: is an {manifest.kind} export, which vLLM does not serve")
    embedded = EmbeddedConfig(type="embedded", path=target)
    quantized = manifest.details.get("quantized", True)
    precision = manifest.recipe.name if quantized else "original"
    pool = PoolConfig(backends=(embedded,), precision=precision)
    return GatewayConfig(models={manifest.model.name: ModelConfig(pool=pool)})


def takes_vllm(options: Options) -> bool:
    """Decides whether vLLM serves what the embedded engine could serve, too.

    It does where it is installed beside a GPU, or where `options` are about it: on a CPU the
    embedded engine is faster. Raises ConfigError if `options` need a vLLM that is not there.
    """
    named = options.python is not None or bool(options.options)
    if options.way == "onnx" or not (named or options.way is not None or gpus()):
        return False
    try:
        find_vllm(python=options.python)
    except ConfigError:
        if named or options.way is not None:
            raise
        return False
    return True


def cache_for(recipe: Recipe, options: Options) -> KvCacheDtype:
    """Returns the recipe's cache format, or E4M3 if vLLM serves only that one here.

    vLLM has E5M2 on some GPUs and in some releases only.
    """
    try:
        version = find_vllm(python=options.python).version
    except ConfigError:
        return recipe.kv_cache
    for device in local_devices():
        own, other = (
            support(device, "vllm", version, recipe, cache) for cache in (recipe.kv_cache, "e4m3")
        )
        if own.cache in ("refused", "corrupt") and other.cache == "native":
            line = "the KV cache is E4M3: vLLM %s has no %s cache on %s"
            _log.warning(line, version or "", recipe.kv_cache.upper(), device.name)
            return "e4m3"
    return recipe.kv_cache


def _kept_in(target: Path, options: Options) -> Path:
    """Returns the export in a directory of exports, or `target` itself."""
    checkpoint, onnx = target / "checkpoint", target / "onnx"
    found = [path for path in (checkpoint, onnx) if (path / MANIFEST_FILE).exists()]
    if not found or (target / MANIFEST_FILE).exists():
        return target
    if onnx not in found or (checkpoint in found and takes_vllm(options)):
        return found[0]
    _log.warning("serving %s in this process, on the CPU", onnx)
    return onnx


@dataclass(frozen=True)
class _Checkpoint:
    """An exported checkpoint, and the ways in which it can be served."""

    path: Path
    manifest: Manifest
    options: Options

    def settings(self) -> GatewayConfig:
        machine_flags(self.path, gpus(), self.options.options)  # refuses what cannot start
        self._warn_of_arithmetic()
        name, options = self.manifest.model.name, self.options
        if options.way is None and not options.fallback:
            pool = self._vllm(self.path, self.manifest.recipe.name, Proof())
            return GatewayConfig(models={name: ModelConfig(pool=pool)})
        first = options.way or self._expected()
        wanted = WAYS[WAYS.index(first) :] if options.fallback else (first,)
        pools: dict[str, PoolConfig] = {}
        for way in wanted:
            try:
                pools[way] = self._pool(way)
            except ConfigError as error:
                if way == options.way:
                    raise
                _log.warning("%s is left out: %s", way, error)
        main, *others = pools
        model = ModelConfig(pool=main, fallback=tuple(others), one_at_a_time=bool(others))
        return GatewayConfig(models={name: model}, pools=pools)

    def _pool(self, way: Way) -> PoolConfig:
        """Raises ConfigError if it cannot be served that way."""
        recipe = self.manifest.recipe.name
        if way == "native":
            return self._vllm(self.path, recipe, Proof(activations="quantized"))
        if way == "weight-only":
            proof = Proof(activations="original")
            return self._vllm(self.path, f"{recipe}-weight-only", proof, weight_only=True)
        if way == "original":
            golden = self.path if (self.path / GOLDEN_FILE).exists() else None
            proof = Proof(golden=golden, weights="original", kv_cache="float16")
            return self._vllm(self._original(), "original", proof)
        embedded = EmbeddedConfig(type="embedded", path=self._onnx(), name=way)
        return PoolConfig(backends=(embedded,), precision=f"{recipe}-onnx")

    def _vllm(
        self, artifact: Path, precision: str, proof: Proof, *, weight_only: bool = False
    ) -> PoolConfig:
        backend = ManagedConfig(
            type="vllm",
            name=precision,
            artifact=artifact,
            model=self.manifest.model.name,
            python=self.options.python,
            options=self.options.options,
            environment=dict(self.options.environment),
            weight_only=weight_only,
        )
        if gpus():
            return PoolConfig(backends=(backend,), precision=precision, proof=proof)
        # Without FP8 units, vLLM's CPU build multiplies a few million numbers per second.
        health, slow = Health(probe_timeout_s=_SLOW_S), {"timeout_s": _SLOW_S}
        return PoolConfig(
            backends=(backend,),
            precision=precision,
            proof=proof.model_copy(update=slow),
            health=health,
        )

    def _expected(self) -> Way:
        """Returns the first way that is worth a start on this machine, as far as that is known."""
        recipe, kv_cache = self.manifest.recipe, self.manifest.details.get("kv_cache", "float16")
        try:
            version = find_vllm(python=self.options.python).version
        except ConfigError:  # it is reported when it should start
            version = None
        for device in local_devices():
            found = support(device, "vllm", version, recipe, kv_cache)
            if found.runs and found.activations is False:
                line = (
                    "%s is served weight-only: vLLM has no %s kernel that rounds activations on %s"
                )
                _log.warning(line, self.path, recipe.name, device.name)
                return "weight-only"
        return "native"  # tried, and measured by the proof

    def _warn_of_arithmetic(self) -> None:
        """Warns if it was trained or measured for another arithmetic than that of these GPUs.

        Unrounded activations harm only what was trained for rounded ones.
        """
        recipe, exact = self.manifest.recipe, set(self.manifest.runs_weight_only)
        trained = self.manifest.details.get("algorithm") == "recover"
        for device in local_devices():
            here = set(weight_only(recipe.pairs, [device]))
            other = exact ^ here if trained else exact - here
            if device.vendor != "cpu" and other:
                _log.warning(
                    "%s was %s for another arithmetic of %s than vLLM's on %s, which %s its"
                    " activations: it may be less exact than was measured; octet %s --for '%s' is"
                    " for this GPU",
                    self.path,
                    "trained" if trained else "measured",
                    " and ".join(sorted(other)),
                    device.name,
                    "does not round" if here - exact else "rounds",
                    "recover" if trained else "calibrate",
                    device.name,
                )

    def _original(self) -> Path:
        for path, manifest in self._beside("calibration"):
            if manifest.identity == self.manifest.calibration:
                source = Path(str(manifest.details.get("source")))
                if (source / "config.json").is_file():
                    return source
                raise ConfigError(f"{path}: the model that it calibrated, {source}, is not there")
        raise ConfigError(
            f"the original model is not known: the calibration of {self.path} is not beside it"
        )

    def _onnx(self) -> Path:
        for path, manifest in self._beside("onnx"):
            own = manifest.calibration == self.manifest.calibration
            if own and manifest.details.get("target") == "onnxruntime":
                return path
        raise ConfigError(
            f"there is no ONNX export beside {self.path}: make one with octet export onnx"
        )

    def _beside(self, kind: Kind) -> Iterator[tuple[Path, Manifest]]:
        """Yields the artifacts of a kind in the same directory; none for an unknown calibration."""
        if self.manifest.calibration is None:
            return
        for path in sorted(self.path.resolve().parent.iterdir()):
            if (path / MANIFEST_FILE).is_file():
                with suppress(ArtifactError):
                    manifest = Manifest.load(path, verify=False)
                    if manifest.kind == kind:
                        yield path, manifest
