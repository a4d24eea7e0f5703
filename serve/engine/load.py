"""Chooses the runner for an export or an engine."""

from pathlib import Path

from octet.artifacts.live import Counting
from octet.artifacts.manifest import Manifest
from octet.errors import UnsupportedError
from serve.runner.protocol import Runner

__all__ = ["load_runner"]


def load_runner(
    path: Path, threads: int = 0, device: int = 0, count: Counting | None = None
) -> Runner:
    """Loads an ONNX export on `threads` of the CPU (0: all), or an engine on GPU `device`.

    With `count`, the runner counts activations. Raises ArtifactError for an incomplete or altered
    artifact, and UnsupportedError for an engine that is not for this machine, or that should count.
    """
    if Manifest.load(path, verify=False).kind == "engine":
        if count is not None:
            raise UnsupportedError(
                f"{path}: a TensorRT engine cannot count activations: remove `count`, or serve an"
                " ONNX export or a vLLM"
            )
        from serve.tensorrt.runner import TensorRTRunner

        return TensorRTRunner(path, device=device)
    from serve.runner.onnx import OnnxRunner  # loads ONNX Runtime

    return OnnxRunner(path, threads=threads, count=count)
