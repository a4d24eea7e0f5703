"""FP4 weights of an ONNX export as ONNX Runtime can read them, in memory.

ONNX Runtime 1.31 knows the type FLOAT4E2M1 but has no kernel for it. Every E2M1 value is an E4M3
value too, so the codes are exchanged one for one, and the DequantizeLinear that reads them stays:
a byte a weight while the session is made, which then folds it to float32 as it does FP8 weights.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto

from octet.errors import ArtifactError
from octet.numerics.bits import unpack_e2m1
from octet.numerics.formats import E2M1, E4M3, decode, encode

__all__ = ["store_e2m1_as_e4m3"]

_E4M3_CODES = encode(decode(np.arange(16, dtype=np.uint8), E2M1), E4M3)


def store_e2m1_as_e4m3(model: onnx.ModelProto, directory: Path) -> dict[str, Any]:
    """Exchanges the FLOAT4E2M1 initializers of `model`; returns those outside of it, by name.

    A tensor with its data in a file of `directory` keeps its place there, which no longer fits: the
    session must be given its OrtValue instead (`add_external_initializers`). ArtifactError for a
    reference that leaves the directory or its file.
    """
    outside: dict[str, Any] = {}
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT4E2M1:
            continue
        tensor.data_type = TensorProto.FLOAT8E4M3FN
        if tensor.data_location != TensorProto.EXTERNAL:
            packed = np.frombuffer(tensor.raw_data, np.uint8)
            tensor.raw_data = _E4M3_CODES[unpack_e2m1(packed)].tobytes()
            continue
        codes = _E4M3_CODES[unpack_e2m1(_external(tensor, directory))].reshape(tuple(tensor.dims))
        outside[tensor.name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            codes, TensorProto.FLOAT8E4M3FN
        )
    return outside


def _external(tensor: onnx.TensorProto, directory: Path) -> NDArray[np.uint8]:
    """The packed codes of a tensor whose data is in a file."""
    place = {item.key: item.value for item in tensor.external_data}
    name, nbytes = place.get("location", ""), int(np.prod(tensor.dims)) // 2
    offset = int(place.get("offset", 0))
    path = directory / name
    if Path(name).name != name or not path.is_file() or path.stat().st_size < offset + nbytes:
        raise ArtifactError(f"{directory}: {tensor.name} is not in {name!r}; export it again")
    return np.fromfile(path, np.uint8, nbytes, offset=offset)
