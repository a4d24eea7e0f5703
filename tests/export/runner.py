"""Runs an exported decoder with ONNX Runtime, as a serving engine would, but plainly."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import TensorProto

E5M2, FLOAT16 = TensorProto.FLOAT8E5M2, TensorProto.FLOAT16
WINDOW = 64  # cached slots are given in multiples of this


class OnnxModel:
    """`step` runs the graph; caches are lists of codes (uint8 or float16) [B, Hkv, S, D]."""

    def __init__(self, directory: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        # ONNX Runtime fuses FP8 Q/DQ of a float32 graph into integer kernels that refuse it.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        self.session = onnxruntime.InferenceSession(
            str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        pasts = [i for i in self.session.get_inputs() if i.name.startswith("past_key_values.")]
        self.pasts = [item.name for item in pasts]
        self.presents = [name.replace("past_key_values", "present") for name in self.pasts]
        self.heads, self.head_dim = pasts[0].shape[1], pasts[0].shape[3]
        self.kind = E5M2 if "float8e5m2" in pasts[0].type else FLOAT16

    def empty(self, batch: int, slots: int = 0) -> list[npt.NDArray]:
        dtype = np.uint8 if self.kind == E5M2 else np.float16
        return [np.zeros((batch, self.heads, slots, self.head_dim), dtype) for _ in self.pasts]

    def step(
        self,
        ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        mask: npt.NDArray[np.bool_],
        wanted: npt.NDArray[np.int64],
        past: list[npt.NDArray],
    ) -> tuple[npt.NDArray[np.float32], list[npt.NDArray]]:
        """Logits [B, L, V] and the new rows."""
        value = onnxruntime.OrtValue
        feeds = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": mask,
            "logit_positions": wanted,
        }
        bound = {name: value.ortvalue_from_numpy(array) for name, array in feeds.items()}
        for name, codes in zip(self.pasts, past, strict=True):
            bound[name] = value.ortvalue_from_numpy_with_onnx_type(
                np.ascontiguousarray(codes), self.kind
            )
        binding = self.session.io_binding()
        for name, item in bound.items():
            binding.bind_ortvalue_input(name, item)
        for name in ("logits", *self.presents):
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        logits, *new = binding.get_outputs()
        return logits.numpy(), [self._codes(item) for item in new]

    def _codes(self, item: onnxruntime.OrtValue) -> npt.NDArray:
        if self.kind == FLOAT16:
            return item.numpy()
        import ctypes

        size = int(np.prod(item.shape()))
        buffer = (ctypes.c_uint8 * size).from_address(item.data_ptr())
        return np.frombuffer(buffer, np.uint8).reshape(item.shape()).copy()

    def forward(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Every position at once, without a cache: [B, T] → [B, T, V]."""
        batch, length = ids.shape
        positions = np.tile(np.arange(length), (batch, 1))
        mask = np.tile(np.tril(np.ones((length, length), bool)), (batch, 1, 1, 1))
        return self.step(ids, positions, mask, positions, self.empty(batch))[0]
