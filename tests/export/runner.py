"""Runs an exported decoder, as a serving engine would, but plainly: with ONNX Runtime, or, where
it lacks a kernel, with ONNX's own reference evaluator."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from octet.numerics import formats

FLOAT = {
    "tensor(float16)": (TensorProto.FLOAT16, np.float16),
    "tensor(float)": (TensorProto.FLOAT, np.float32),
}
FLOAT8 = {
    "tensor(float8e5m2)": (TensorProto.FLOAT8E5M2, formats.E5M2),
    "tensor(float8e4m3fn)": (TensorProto.FLOAT8E4M3FN, formats.E4M3),
    "tensor(float8e8m0)": (TensorProto.FLOAT8E8M0, formats.E8M0),
}
Rewrite: TypeAlias = Callable[[onnx.ModelProto], object]
WINDOW = 64  # cached slots are given in multiples of this


def roundings(model: onnx.ModelProto) -> dict[str, str]:
    """Values that hold what inputs and their groups' scales were rounded to → `Reference`'s names.

    They are there whether or not the casts were rewritten.
    """
    found = {}
    for node in model.graph.node:
        stem, _, last = node.output[0].rpartition(".")
        name = stem.removesuffix(".group")
        if not name.endswith(".input"):
            continue
        if last == "values" or node.op_type == "QuantizeLinear":
            found[node.output[0]] = name
        elif last in ("power", "scale_quantized"):
            found[node.output[0]] = f"{name}.scale"
    return found


def full_pass(ids: npt.NDArray[np.int64]) -> dict[str, npt.NDArray]:
    """The inputs, apart from the cache, that give the logits of every position of `ids` [B, T]."""
    batch, length = ids.shape
    positions = np.tile(np.arange(length), (batch, 1))
    mask = np.tile(np.tril(np.ones((length, length), bool)), (batch, 1, 1, 1))
    return {
        "input_ids": ids,
        "position_ids": positions,
        "attention_mask": mask,
        "logit_positions": positions,
    }


class EvaluatedModel:
    """The file as it is, by onnx.reference; `decisions` as `OnnxModel` has them."""

    def __init__(self, directory: Path) -> None:
        self.model = onnx.load(directory / "model.onnx")
        self.roundings = roundings(self.model)
        self.presents = [o.name for o in self.model.graph.output if o.name != "logits"]
        self.evaluator = ReferenceEvaluator(self.model)
        self.values: dict[str, npt.NDArray] = {}

    def forward(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Every position at once, without a cache: [B, T] → [B, T, V]; `values` has all values."""
        feeds = full_pass(ids)
        for item in self.model.graph.input:
            kind, shape = item.type.tensor_type.elem_type, item.type.tensor_type.shape.dim
            if item.name.startswith("past_key_values."):
                empty = (len(ids), shape[1].dim_value, 0, shape[3].dim_value)
                feeds[item.name] = np.zeros(empty, onnx.helper.tensor_dtype_to_np_dtype(kind))
        self.values = self.evaluator.run(None, feeds, intermediate=True)
        return np.asarray(self.values["logits"])

    @property
    def decisions(self) -> dict[str, npt.NDArray[np.float32]]:
        names = {name: name for name in self.presents} | self.roundings
        return {to: self.values[name].astype(np.float32) for name, to in names.items()}


class OnnxModel:
    """`step` runs the graph; caches are lists of codes (uint8 or float16) [B, Hkv, S, D].

    With `observe`, `decisions` holds what the last step's roundings gave, as float32: the inputs of
    the linears by `<first linear>.input`, the scales of their groups by that and `.scale`, and the
    new rows by `present.{i}.key|value`. `rewrite` changes the graph in memory before.
    """

    def __init__(
        self, directory: Path, *, observe: bool = False, rewrite: Rewrite | None = None
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        # Idle threads must not spin: torch computes the reference on the same cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # ONNX Runtime fuses FP8 Q/DQ of a float32 graph into integer kernels that refuse it.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        model = onnx.load(directory / "model.onnx")
        if rewrite is not None:
            rewrite(model)
        self.observed = roundings(model) if observe else {}
        for name in self.observed:
            kind = TensorProto.FLOAT8E8M0 if name.endswith(".power") else TensorProto.FLOAT8E4M3FN
            kind = TensorProto.FLOAT if name.endswith(".values") else kind
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
        self.decisions: dict[str, npt.NDArray[np.float32]] = {}
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        pasts = [i for i in self.session.get_inputs() if i.name.startswith("past_key_values.")]
        self.pasts = [item.name for item in pasts]
        self.presents = [name.replace("past_key_values", "present") for name in self.pasts]
        self.heads, self.head_dim = pasts[0].shape[1], pasts[0].shape[3]
        self.kind, self.dtype = FLOAT.get(pasts[0].type) or (FLOAT8[pasts[0].type][0], np.uint8)

    def empty(self, batch: int, slots: int = 0) -> list[npt.NDArray]:
        return [np.zeros((batch, self.heads, slots, self.head_dim), self.dtype) for _ in self.pasts]

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
        count = len(self.presents)
        if self.observed:
            names = (*self.presents, *self.observed.values())
            decoded = [self._decoded(item) for item in rest]
            self.decisions = dict(zip(names, decoded, strict=True))
        return logits.numpy(), [self._codes(item) for item in rest[:count]]

    def _codes(self, item: onnxruntime.OrtValue) -> npt.NDArray:
        if item.data_type() not in FLOAT8:
            return item.numpy()
        size = int(np.prod(item.shape()))
        buffer = (ctypes.c_uint8 * size).from_address(item.data_ptr())
        return np.frombuffer(buffer, np.uint8).reshape(item.shape()).copy()

    def _decoded(self, item: onnxruntime.OrtValue) -> npt.NDArray[np.float32]:
        codes = self._codes(item)
        known = FLOAT8.get(item.data_type())
        return codes.astype(np.float32) if known is None else formats.decode(codes, known[1])

    def forward(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Every position at once, without a cache: [B, T] → [B, T, V]."""
        return self.step(*full_pass(ids).values(), self.empty(len(ids)))[0]


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
