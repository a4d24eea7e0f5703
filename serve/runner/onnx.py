"""Runs an ONNX export with ONNX Runtime on the CPU.

export/onnx/decoder.py lists the graph's inputs and outputs. A step is fast because:

- FP8 casts, which are slow in ONNX Runtime 1.31, and FP4, which it lacks, are replaced in memory
  (onnx_rewrite.py). The cache stays E5M2 codes: a window is read as FP16, of whose values the codes
  are the top bytes. An E4M3 cache is read as it is.
- All inputs and outputs are bound to arrays that are reused while the shapes stay the same.
- While the same requests keep decoding, the windows in these arrays need only their newest row.

With a `LiveCounts`, some steps also return the activations, which are counted. The graph is then
the same in all steps, so no answer depends on which of them are.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto

from octet.artifacts.live import Counting, LiveCounts
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError, BackendError, OctetError, UnsupportedError
from octet.hardware.cores import usable_cores
from octet.model.spec import ModelSpec
from octet.numerics.counting import count_codes
from serve.runner.onnx_rewrite import read_past_as_float16, round_in_float32, store_e2m1_as_e4m3
from serve.runner.onnx_taps import add_taps
from serve.runner.protocol import CacheDtype, SlotCache, StepBatch, window

__all__ = ["OnnxRunner"]

MODEL_FILE = "model.onnx"
_E8M0_OPSET, _E8M0_RELEASE = 24, (1, 27)  # tested: 1.26 lacks the kernel, 1.27 has it
_ONE_TOKEN_MORE = np.array([0, 0, 1])
_STORED_TYPES: dict[CacheDtype, int] = {
    "e5m2": TensorProto.FLOAT8E5M2,
    "e4m3": TensorProto.FLOAT8E4M3FN,
    "float16": TensorProto.FLOAT16,
}


class OnnxRunner:
    """A `Runner` over one ONNX Runtime session."""

    slots = 16

    def __init__(
        self,
        directory: Path,
        *,
        threads: int = 0,
        rewrite: bool = True,
        count: Counting | None = None,
    ) -> None:
        """Opens and verifies `directory`.

        `threads` compute one operator (0: one per core). `rewrite=False` runs the graph as it is on
        disk. With `count`, activations of a share of the steps are counted. Raises ArtifactError
        for anything but an unaltered ONNX export that loads, and UnsupportedError for a graph that
        was exported for TensorRT.
        """
        self.manifest = Manifest.load(directory, "onnx")
        if self.manifest.details.get("target", "onnxruntime") != "onnxruntime":
            raise UnsupportedError(
                f"{directory}: this graph is for TensorRT: compile it with `octet build-engine`,"
                " or serve an export made with `octet export onnx`"
            )
        self.spec: ModelSpec = self.manifest.model.spec
        self.kv_dtype: CacheDtype = self.manifest.details["kv_cache"]
        self._past_type = _STORED_TYPES[self.kv_dtype]
        self.live = None if count is None else LiveCounts(count, self.manifest)
        self._taps: dict[str, str] = {}  # names of the graph's values, by observation
        path = directory / MODEL_FILE
        options = _session_options(directory, threads)
        try:
            model = onnx.load(path, load_external_data=False)
            _check_version(model, path)
            if count is not None:
                self._taps = add_taps(model, self.spec)
            if rewrite:
                self._past_type = read_past_as_float16(model) or self._past_type
                round_in_float32(model)
                outside = store_e2m1_as_e4m3(model, directory)
                options.add_external_initializers(list(outside), list(outside.values()))
            onnxruntime.disable_telemetry_events()  # some builds can report to their vendor
            self._session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except OctetError:
            raise
        except Exception as error:  # protobuf's and ONNX Runtime's classes share no other base
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ArtifactError(f"{path}: ONNX Runtime cannot load it: {reason}") from error
        self._plans: dict[bool, _Plan] = {}  # the last one for prefill, and for decoding

    def new_cache(self, slots: int, positions: int) -> SlotCache:
        """See `Runner`."""
        return SlotCache(self.spec, slots, positions, self.kv_dtype)

    def forward(self, step: StepBatch, cache: SlotCache) -> NDArray[np.float32]:
        """See `Runner`. The logits are valid until the next call."""
        past = window(int(cache.lengths[step.slots].max()))
        shape = (*step.token_ids.shape, past, step.logit_positions.shape[1])
        decoding = shape[1] == 1
        counted = self.live if self.live is not None and self.live.begin_step() else None
        plan = self._plans.get(decoding)
        if plan is None or plan.shape != shape or counted is not None:
            plan = _Plan(shape, self._session, self.spec, self.kv_dtype, self._past_type)
            if counted is None:  # a counted step's is bound to more outputs than others need
                self._plans[decoding] = plan
        plan.fill(step, cache)
        if counted is not None:
            for value in self._taps.values():
                plan.binding.bind_output(value, "cpu")
        try:
            self._session.run_with_iobinding(plan.binding)
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            raise BackendError(f"ONNX Runtime: {str(error).splitlines()[0]}") from error
        cache.append(step.slots, plan.present)
        if counted is not None:
            values = plan.binding.get_outputs()[-len(self._taps) :]
            for name, value in zip(self._taps, values, strict=True):
                counted.add(name, count_codes(value.numpy()))
            counted.end_step(step.token_ids.size)
        return plan.logits


class _Plan:
    """Arrays for one combination of shapes, bound to the session's inputs and outputs."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        session: Any,
        spec: ModelSpec,
        kv_dtype: CacheDtype,
        past_type: int,
    ) -> None:
        self.shape = shape
        batch, count, past, wanted = shape
        tensors, heads, dim = 2 * spec.layers, spec.kv_heads, spec.head_dim
        past_dtype = np.float16 if past_type == TensorProto.FLOAT16 else np.uint8
        code_dtype = np.uint16 if kv_dtype == "float16" else np.uint8
        code_type = _STORED_TYPES[kv_dtype]
        self.ids = np.empty((batch, count), np.int64)
        self.positions = np.empty((batch, count), np.int64)
        self.offsets = np.arange(count)
        self.mask = np.empty((batch, 1, count, past + count), bool)
        self.mask[:, :, :, past:] = np.tri(count, dtype=bool)
        self.cached = np.arange(past)
        self.wanted = np.empty((batch, wanted), np.int64)
        self.past = np.zeros((tensors, batch, heads, past, dim), past_dtype)
        self.logits = np.empty((batch, wanted, spec.vocab_size), np.float32)
        self.present = np.empty((tensors, batch, heads, count, dim), code_dtype)
        self._cache: SlotCache | None = None  # the cache whose windows `past` holds, for `_rows`
        self._rows = np.empty((batch, 3), np.int64)
        self.binding = session.io_binding()
        self._input("input_ids", self.ids, TensorProto.INT64)
        self._input("position_ids", self.positions, TensorProto.INT64)
        self._input("attention_mask", self.mask, TensorProto.BOOL)
        self._input("logit_positions", self.wanted, TensorProto.INT64)
        self._output("logits", self.logits, TensorProto.FLOAT)
        for index in range(tensors):
            name = f"{index // 2}.{('key', 'value')[index % 2]}"
            self._input(f"past_key_values.{name}", self.past[index], past_type)
            self._output(f"present.{name}", self.present[index], code_type)

    def fill(self, step: StepBatch, cache: SlotCache) -> None:
        """Sets every input for `step`."""
        lengths = cache.lengths[step.slots, None]
        self.ids[:] = step.token_ids
        self.wanted[:] = step.logit_positions
        np.add(lengths, self.offsets, out=self.positions)
        self.mask[:, 0, :, : len(self.cached)] = (self.cached < lengths)[:, None]
        # Slot, tenant and length of each row: int64 [B, 3].
        rows = np.column_stack([step.slots, cache.tenants[step.slots], lengths])
        if self._cache is cache and np.array_equal(self._rows + _ONE_TOKEN_MORE, rows):
            cache.read_newest(step.slots, self.past)
        else:
            cache.read(step.slots, self.past)
        self._cache, self._rows = cache, rows

    def _input(self, name: str, array: NDArray[Any], kind: int) -> None:
        self.binding.bind_input(name, "cpu", 0, kind, array.shape, array.ctypes.data)

    def _output(self, name: str, array: NDArray[Any], kind: int) -> None:
        self.binding.bind_output(name, "cpu", 0, kind, array.shape, array.ctypes.data)


def _check_version(model: onnx.ModelProto, path: Path) -> None:
    """Raises UnsupportedError if this ONNX Runtime lacks the cast to E8M0, the MX scales' type."""
    opset = max(item.version for item in model.opset_import if not item.domain)
    release = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if opset >= _E8M0_OPSET and release < _E8M0_RELEASE:
        raise UnsupportedError(
            f"{path}: MXFP8 and MXFP4 need onnxruntime {'.'.join(map(str, _E8M0_RELEASE))} or"
            f" later, and this is {onnxruntime.__version__}"
        )


def _session_options(directory: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = threads or usable_cores()
    options.log_severity_level = 3
    # ONNX Runtime would fuse FP8 Q/DQ of a float32 graph into integer kernels that refuse it.
    # Without that fusion the weights' DQ is folded and the GEMMs get prepacked float32 weights.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # Threads spin between operators but not between runs: 12 to 15 % faster on two idle cores, 10
    # to 25 % slower if another process keeps one of them busy. In that case, spinning between runs
    # too (ONNX Runtime's default) halves the speed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # ONNX Runtime looks here for the model.onnx.data of a model given as bytes.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(directory)
    )
    return options
