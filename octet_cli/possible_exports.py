"""Says which exports a calibration allows, before one is tried."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from octet.errors import OctetError

if TYPE_CHECKING:
    from export.source import Source

__all__ = ["possible_exports"]


def possible_exports(calibration: Path, model: Path | None = None) -> dict[str, str | None]:
    """Returns the arguments of each `octet export`, and why it would be refused; None if it works.

    `model` overrides the path of the checkpoint. Reads headers and scales alone; the ONNX exports
    are left out where onnx is not installed.
    """
    from export.checkpoint.compressed_tensors import CompressedTensors
    from export.checkpoint.fp8 import Fp8
    from export.checkpoint.fused import check_fused
    from export.checkpoint.modelopt import ModelOpt
    from export.source import Source

    source = Source.open(calibration, model, shards=False)
    checks: dict[str, tuple[Callable[[Source], None], ...]] = {
        "checkpoint": (CompressedTensors().check, check_fused),
        "checkpoint --format modelopt": (ModelOpt().check, check_fused),
        "checkpoint --format fp8": (Fp8().check, check_fused),
    }
    with suppress(ModuleNotFoundError):
        from export.onnx.decoder import check_architecture
        from export.onnx.linear import check_groups
        from export.onnx.tensorrt_decoder import check_recipe

        graph = (lambda source: check_architecture(source.spec), check_groups)
        checks |= {"onnx": graph, "onnx --for tensorrt": (*graph, check_recipe)}
    return {arguments: _reason(source, found) for arguments, found in checks.items()}


def _reason(source: "Source", checks: "Sequence[Callable[[Source], None]]") -> str | None:
    try:
        for check in checks:
            check(source)
    except OctetError as error:
        return str(error)
    return None
