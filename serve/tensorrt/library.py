"""Loads TensorRT's run-time library, and checks that a plan fits it and the present GPU.

A plan holds machine code for one compute capability, laid out by one version of one builder. The
manifest beside it names them, so a plan that cannot run is refused before it is read.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError, UnsupportedError
from octet.hardware.tensorrt_log import logger
from serve.tensorrt.gpu import Gpu

__all__ = ["load_engine", "load_library", "require_gpu"]

# Builder → the modules that may hold its library, and the requirement that installs it.
_LIBRARIES = {
    "TensorRT": (("tensorrt", "tensorrt_bindings"), "tensorrt=={}"),
    "TensorRT-RTX": (("tensorrt_rtx", "tensorrt_rtx_bindings"), "tensorrt_rtx=={}"),
}


def load_library(directory: Path, manifest: Manifest) -> ModuleType:
    """Imports the module that runs the engine of `directory`.

    Raises UnsupportedError if it is not installed, or in another version than built the engine.
    """
    name, version = _builder(directory, manifest)
    modules, requirement = _LIBRARIES[name]
    requirement = requirement.format(version)
    trt = next((found for module in modules if (found := _imported(module, name))), None)
    if trt is None:
        raise UnsupportedError(
            f"{directory}: built by {name} {version}, which is not installed here:"
            f" pip install '{requirement}'"
        )
    if trt.__version__ != version:
        raise UnsupportedError(
            f"{directory}: built by {name} {version}, and here is {trt.__version__}, which does not"
            f" run it: pip install '{requirement}', or octet build-engine with this one"
        )
    return trt


def require_gpu(directory: Path, manifest: Manifest, gpu: Gpu) -> None:
    """Raises UnsupportedError unless the engine of `directory` was built for `gpu`."""
    targets = manifest.details.get("targets", [])
    if gpu.target not in targets:
        raise UnsupportedError(
            f"{directory}: built for {', '.join(targets)}, and this GPU is {gpu.target}:"
            f" octet build-engine --target {gpu.target}"
        )


def load_engine(trt: Any, plan: Path) -> tuple[Any, Any]:
    """Loads `plan`; returns the runtime, and the ICudaEngine, which the runtime must outlive.

    Raises ArtifactError with TensorRT's first message if TensorRT does not load it.
    """
    log = logger(trt)
    log.clear()
    runtime = trt.Runtime(log)
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        raise ArtifactError(f"{plan}: TensorRT {trt.__version__} does not load it: {log.reason}")
    return runtime, engine


def _builder(directory: Path, manifest: Manifest) -> tuple[str, str]:
    made_by = manifest.details.get("builder", {})
    name, version = made_by.get("name"), made_by.get("version")
    if name not in _LIBRARIES or not version:
        raise ArtifactError(
            f"{directory}: its manifest names no builder that this release knows"
            f" ({', '.join(_LIBRARIES)}); build the engine again"
        )
    return name, version


def _imported(module: str, name: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError) as error:
        why = " ".join(str(error).split())
        raise UnsupportedError(f"{name} is installed but cannot be loaded: {why}") from None
