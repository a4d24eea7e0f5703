"""Runs an exported decoder with ONNX Runtime, as a serving engine would, but plainly."""

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto

from octet import formats

E5M2, FLOAT16 = TensorProto.FLOAT8E5M2, TensorProto.FLOAT16
WINDOW = 64  # cached slots are given in multiples of this


class OnnxModel:
    """`step` runs the graph; caches are lists of codes (uint8 or float16) [B, Hkv, S, D].

    With `observe`, `decisions` holds what the last step's roundings gave, as float32: the inputs of
    the linears by `<first linear>.input`, and the new rows by `present.{i}.key|value`.
    """

    def __init__(self, directory: Path, *, observe: bool = False) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        # Idle threads must not spin: torch computes the reference on the same cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # ONNX Runtime fuses FP8 Q/DQ of a float32 graph into integer kernels that refuse it.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        model = onnx.load(directory / "model.onnx")
        rounded = [node.name for node in model.graph.node if node.name.endswith(".quantized")]
        self.observed = rounded if observe else []
        for name in self.observed:
            kind = TensorProto.FLOAT8E4M3FN
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
        self.decisions: dict[str, npt.NDArray[np.float32]] = {}
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
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
        for name in ("logits", *self.presents, *self.observed):
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        logits, *rest = binding.get_outputs()
        codes = [self._codes(item) for item in rest]
        new = codes[: len(self.presents)]
        if self.observed:
            kv = [formats.decode(x, formats.E5M2) if self.kind == E5M2 else x for x in new]
            inputs = [formats.decode(x, formats.E4M3) for x in codes[len(new) :]]
            names = [
                name.removesuffix(".quantized").removesuffix(".group") for name in self.observed
            ]
            self.decisions = dict(zip((*self.presents, *names), (*kv, *inputs), strict=True))
        return logits.numpy(), new

    def _codes(self, item: onnxruntime.OrtValue) -> npt.NDArray:
        if "float16" in item.data_type():
            return item.numpy()
        size = int(np.prod(item.shape()))
        buffer = (ctypes.c_uint8 * size).from_address(item.data_ptr())
        return np.frombuffer(buffer, np.uint8).reshape(item.shape()).copy()

    def forward(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Every position at once, without a cache: [B, T] → [B, T, V]."""
        batch, length = ids.shape
        positions = np.tile(np.arange(length), (batch, 1))
        mask = np.tile(np.tril(np.ones((length, length), bool)), (batch, 1, 1, 1))
        return self.step(ids, positions, mask, positions, self.empty(batch))[0]


def random_ids(batch: int, length: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 4096, (batch, length))


def prefill_and_decode(
    model: OnnxModel, ids: npt.NDArray[np.int64], prompt: int, spare: int = 0
) -> None:
    """Feeds `ids` as a prompt and then one by one; each row must equal a full pass's, bit for bit.

    `spare` more windows than needed stay unused.
    """
    full = model.forward(ids[None])[0]
    slots = -(-len(ids) // WINDOW) * WINDOW + spare * WINDOW
    cache = model.empty(1, slots)
    at = np.arange(prompt)
    mask = np.tril(np.ones((1, 1, prompt, prompt), bool))
    logits, new = model.step(ids[None, :prompt], at[None], mask, at[None, -1:], model.empty(1))
    np.testing.assert_array_equal(logits[0, 0], full[prompt - 1])
    for position in range(prompt, len(ids)):
        for tensor, rows in zip(cache, new, strict=True):
            tensor[:, :, position - rows.shape[2] : position] = rows
        window = -(-position // WINDOW) * WINDOW + spare * WINDOW
        logits, new = decode(model, ids[position], position, [c[:, :, :window] for c in cache])
        np.testing.assert_array_equal(logits[0, 0], full[position], err_msg=f"at {position}")


def decode(
    model: OnnxModel, token: int, position: int, past: list[npt.NDArray]
) -> tuple[npt.NDArray[np.float32], list[npt.NDArray]]:
    mask = np.ones((1, 1, 1, past[0].shape[2] + 1), bool)
    mask[..., position:-1] = False
    zero = np.zeros((1, 1), np.int64)
    return model.step(np.array([[token]]), np.array([[position]]), mask, zero, past)
