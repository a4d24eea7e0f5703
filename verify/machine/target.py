"""Decides whether an artifact, or the backends of a configuration, run on a machine, and how."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import UnsupportedError
from octet.hardware.devices import Device, find_device
from octet.hardware.machine import Gpu, Machine
from octet.hardware.support import EngineName, Support, support
from octet.model.checkpoint import Checkpoint
from octet.model.gpt_oss import Mxfp4Weights
from octet.recipe import PRESETS, KvCacheDtype, Recipe
from serve.vllm.command import scale_variables
from verify.machine.diagnose import Serving, missing_packages, servings
from verify.machine.diagnosis import Finding, Target

__all__ = ["judge_artifact", "judge_configuration", "ports_of"]

_USED = 0.9  # part of a GPU's memory that vLLM takes by default
_CACHES: tuple[KvCacheDtype, ...] = ("e5m2", "e4m3", "float16")
_SAID = {
    "native": "runs as exported: matmuls in the recipe's format",
    "weight-only": "runs, but weight-only: activations are not rounded, and prompts are no faster"
    " than in BF16",
    "emulated": "runs, and computes in 16 or 32 bits from decoded weights",
    "refused": "does not start",
    "corrupt": "would answer garbage",
    "unknown": "may run: nobody has looked",
}


@dataclass(frozen=True)
class _Artifact:
    """An artifact as far as a machine matters: its engine, formats, and bytes of weights."""

    path: Path
    engine: EngineName
    recipe: Recipe | None  # None: unquantized
    cache: KvCacheDtype
    format: str = "compressed-tensors"
    weights: int = 0  # bytes
    gpus: int = 1
    targets: tuple[str, ...] = ()  # the compute capabilities that an engine was built for
    command: str = ""


def judge_artifact(
    path: Path, machine: Machine, *, elsewhere: bool = False
) -> tuple[list[Target], list[Finding]]:
    """Judges an artifact, or an unquantized checkpoint; raises OctetError if it cannot be read.

    `elsewhere`: another machine serves it, so that nothing needs to be installed here.
    """
    artifact = _read(path)
    found = [
        (device, _support(artifact, device, serving, machine), serving)
        for serving in servings(machine)
        if serving.engine == artifact.engine
        for device in _devices_of(artifact, machine)
    ]
    if not found:
        remedy = f"install {artifact.engine}, or name the Python that has it with --python"
        text = f"{path}: {artifact.engine} is not installed in {machine.environment.executable}"
        return [], [Finding(level="error", text=text, remedy=remedy)]
    targets = [_target(artifact, device, answer, each) for device, answer, each in found]
    findings = [finding for target in targets for finding in _of_target(target)]
    if found[0][2].assumed and not elsewhere:
        text = (
            f"{path}: vLLM, which serves it, is not installed in {machine.environment.executable}"
        )
        remedy = "name the Python that has it with --python PATH"
        findings.insert(0, Finding(level="error", text=text, remedy=remedy))
    return targets, [*findings, *_of_memory(artifact, machine)]


def judge_configuration(path: Path, machine: Machine) -> tuple[list[Target], list[Finding]]:
    """Judges the backends of a gateway's configuration that this machine, or a named GPU, runs.

    Raises OctetError for a configuration that `octet serve` would refuse.
    """
    from serve.config.backends import EmbeddedConfig
    from serve.config.checks import load_config, pools_of

    targets: list[Target] = []
    findings: list[Finding] = []
    for _name, _loc, pool in pools_of(load_config(path)):
        directories: list[tuple[Path, Device | None]] = [
            (backend.path, None) for backend in pool.backends if isinstance(backend, EmbeddedConfig)
        ]
        proof = pool.proof
        if proof is not None and proof.golden is not None and proof.device is not None:
            directories.append((proof.golden, find_device(proof.device)))
        for directory, device in directories:
            there = machine if device is None else _machine_with(machine, device)
            more = judge_artifact(directory, there, elsewhere=device is not None)
            targets += more[0]
            findings += more[1]
    return targets, findings


def ports_of(path: Path) -> list[int]:
    """Returns the port that a configuration listens on, unless the system is to choose it."""
    from serve.config.checks import load_config

    port = load_config(path).listen.port
    return [port] if port else []


def _machine_with(machine: Machine, device: Device) -> Machine:
    """Returns `machine` with one GPU of that kind in place of its own: a backend elsewhere."""
    if device.vendor == "cpu":
        return machine.model_copy(update={"gpus": (), "cpu_capability": device.capability})
    gpu = Gpu(
        index=0,
        name=device.name,
        vendor=device.vendor,
        capability=device.capability,
        memory=device.memory,
    )
    return machine.model_copy(update={"gpus": (gpu,)})


def _read(path: Path) -> _Artifact:
    if not (path / MANIFEST_FILE).exists() and (path / "config.json").exists():
        checkpoint = Checkpoint.open(path)
        if isinstance(checkpoint.blocks, Mxfp4Weights):
            raise UnsupportedError(
                f"{path}: which engines run gpt-oss's MXFP4 on which GPU is not in Octet's table;"
                " start vLLM on it, and prove it with a pack of `octet golden`"
            )
        return _Artifact(
            checkpoint.path,
            "vllm",
            None if checkpoint.blocks is None else PRESETS["fp8-block"],
            "float16",
            weights=_bytes(path),
            command=_vllm(path, {}),
        )
    manifest = Manifest.load(path, verify=False)
    details = manifest.details
    cache = _cache_of(manifest)
    recipe = manifest.recipe if details.get("quantized", True) else None
    if manifest.kind == "checkpoint":
        return _Artifact(
            path,
            "vllm",
            recipe,
            cache,
            format=str(details.get("format", "compressed-tensors")).partition(" ")[0],
            weights=_bytes(path),
            gpus=details.get("tensor_parallel") or 1,
            command=_vllm(path, details),
        )
    if manifest.kind == "calibration":
        command = f"octet export checkpoint {path} --out DIR"
        return _Artifact(path, "vllm", recipe, cache, command=command)
    if manifest.kind == "onnx" and details.get("target") != "tensorrt":
        return _Artifact(path, "onnxruntime", recipe, cache, command=f"octet serve {path}")
    if manifest.kind == "engine":
        builder = details.get("builder", {}).get("name", "tensorrt")
        engine: EngineName = "tensorrt-rtx" if builder == "tensorrt-rtx" else "tensorrt"
        targets = tuple(map(str, details.get("targets") or ()))
        return _Artifact(
            path, engine, recipe, cache, targets=targets, command=f"octet serve {path}"
        )
    raise UnsupportedError(
        f"{path}: a {manifest.kind} is not served by itself: give a checkpoint, a calibration, an"
        " ONNX export or an engine"
    )


def _cache_of(manifest: Manifest) -> KvCacheDtype:
    found: Any = manifest.details.get("kv_cache") or manifest.recipe.kv_cache
    found = found.get("dtype") if isinstance(found, dict) else found
    return next((cache for cache in _CACHES if cache == found), manifest.recipe.kv_cache)


def _vllm(path: Path, details: Any) -> str:
    return " ".join(["vllm serve", str(path), str(details.get("serve_with") or "")]).strip()


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _devices_of(artifact: _Artifact, machine: Machine) -> tuple[Device, ...]:
    if artifact.engine == "onnxruntime":
        return (find_device(machine.cpu_capability),)
    return machine.devices


def _support(artifact: _Artifact, device: Device, serving: Serving, machine: Machine) -> Support:
    compute = device.compute
    name = None if compute is None else f"sm{compute[0]}{compute[1]}"
    if artifact.targets and name not in artifact.targets:
        return Support(
            "refused",
            "refused",
            "unknown",
            message=f"built for {', '.join(artifact.targets)}",
            remedy=f"build it on this GPU: octet build-engine CALIBRATION --out {artifact.path}",
        )
    return support(
        device,
        serving.engine,
        serving.version,
        artifact.recipe,
        artifact.cache,
        format=artifact.format,
        missing=missing_packages(machine),
    )


def _target(artifact: _Artifact, device: Device, found: Support, serving: Serving) -> Target:
    weights = artifact.recipe.name if artifact.recipe is not None else "unquantized"
    cache = "16-bit" if artifact.cache == "float16" else artifact.cache.upper()
    worst = found.outcome if found.outcome in ("refused", "corrupt", "unknown") else found.weights
    sentence = f"{weights} weights, {cache} cache on {device.name}: {_SAID[worst]}"
    if found.runs and found.attention:
        sentence += f"; attention by {found.attention}"
    command = artifact.command if found.runs else ""
    if command.startswith("vllm "):
        variables = scale_variables(artifact.path, [device.compute] if device.compute else [])
        command = " ".join([*(f"{name}={value}" for name, value in variables.items()), command])
    return Target(
        path=str(artifact.path),
        device=device.name,
        engine=serving.label,
        weights=found.weights,
        cache=found.cache,
        sentence=sentence,
        command=command,
        message=found.message,
        remedy=found.remedy,
    )


def _of_target(target: Target) -> Iterator[Finding]:
    said = f" ({target.message})" if target.message else ""
    text = f"{target.path}: {target.sentence}{said}"
    if not target.runs:
        level = "warning" if "unknown" in (target.weights, target.cache) else "error"
        if {target.weights, target.cache} & {"refused", "corrupt"}:
            level = "error"
        yield Finding.model_validate({"level": level, "text": text, "remedy": target.remedy})
    elif target.weights == "weight-only":
        yield Finding(level="error", text=text, remedy=target.remedy)


def _of_memory(artifact: _Artifact, machine: Machine) -> Iterator[Finding]:
    if artifact.engine != "vllm" or not machine.gpus:
        return
    if artifact.gpus > len(machine.gpus):
        yield Finding(
            level="error",
            text=f"{artifact.path}: exported for {artifact.gpus} GPUs, and there are"
            f" {len(machine.gpus)}",
            remedy="export it again with --tp of this machine's GPUs",
        )
    sizes = [gpu.memory for gpu in machine.gpus if gpu.memory is not None]
    each = artifact.weights / artifact.gpus
    if sizes and each > _USED * min(sizes):
        yield Finding(
            level="error",
            text=f"{artifact.path}: {each / 2**30:.1f} GiB of weights do not fit the"
            f" {_USED * min(sizes) / 2**30:.1f} GiB that vLLM takes of a GPU by default",
            remedy="serve it over more GPUs (--tensor-parallel-size), or with fewer bits",
        )
