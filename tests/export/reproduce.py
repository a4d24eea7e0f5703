"""Writes every export of some calibrations; a process of its own runs this.

python -m tests.export.reproduce CALIBRATIONS OUT
"""

import sys
from pathlib import Path

from export.checkpoint.write import CheckpointFormat, export_checkpoint
from export.onnx.write import Target, export_onnx
from export.triton.write import Backend, export_triton
from octet.recipe import KvCacheDtype

CHECKPOINTS: dict[CheckpointFormat, tuple[str, ...]] = {
    "compressed-tensors": ("fp8", "fp8-static", "fp8-block", "mxfp8", "mxfp4", "nvfp4"),
    "modelopt": ("fp8-static", "nvfp4"),
    "fp8": ("fp8-static", "fp8-block"),
}
GRAPHS: dict[Target, tuple[str, ...]] = {
    "onnxruntime": ("fp8", "fp8-static", "fp8-block", "mxfp8", "mxfp4", "nvfp4"),
    "tensorrt": ("fp8", "fp8-static", "fp8-block", "mxfp8", "nvfp4"),
}
# By what writes the model.
BACKENDS: dict[Backend, str] = {"python": "onnx", "vllm": "numba", "onnxruntime": "onnx"}


def write_all(calibrations: Path, out: Path) -> None:
    for form, recipes in CHECKPOINTS.items():
        for recipe in recipes:
            cache: KvCacheDtype = "e5m2" if form == "compressed-tensors" else "e4m3"
            export_checkpoint(
                calibrations / recipe,
                out / f"checkpoint-{form}-{recipe}",
                format=form,
                kv_cache=cache,
            )
    for target, recipes in GRAPHS.items():
        for recipe in recipes:
            name = out / f"onnx-{target}-{recipe}"
            export_onnx(calibrations / recipe, name, target=target)
    for backend in BACKENDS:
        entry = out / f"triton-{backend}"
        export_triton(calibrations / "fp8", entry, backend=backend)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), Path(sys.argv[2]))
