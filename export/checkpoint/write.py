"""calibration + checkpoint → a quantized checkpoint that vLLM, SGLang or TensorRT-LLM load.

Codes and scales replace the weights of quantized linears. They are copied if both the checkpoint
and the recipe have FP8 blocks. Every other tensor is copied bit for bit.

Shards are streamed, one per core, with part of one tensor of each in memory. Each file is read
once, written once, and hashed on the way: SHA-256 of the output, which identifies it, and XXH3-128
of the input, if the calibration recorded one (octet/storage/files.py explains its limits). If a
shard has changed since calibration, the export fails at the shard's end and leaves nothing behind.

| cache (`kv_cache`) | in the checkpoint                                                          |
|--------------------|----------------------------------------------------------------------------|
| e5m2               | no cache scheme; scales of K and V in a layer where one of them is not 1   |
| e4m3               | a cache scheme; scales of K and V, and of queries where they were observed |
| float16            | nothing                                                                    |

Scales multiply, `real = stored * scale`, except NVFP4's global scales in compressed-tensors.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console

from export.accuracy_gate import Judge, finish
from export.checkpoint.compressed_tensors import CompressedTensors
from export.checkpoint.fp8 import Fp8
from export.checkpoint.fused import check_fused, check_tensor_parallel
from export.checkpoint.layout import CacheScale, Layout, Tensors, float32
from export.checkpoint.modelopt import ModelOpt
from export.source import Source, require_space
from octet.artifacts.manifest import Manifest, check_destination, write_artifact
from octet.errors import ConfigError, OctetError, UnsupportedError, nearest
from octet.hardware.cores import usable_cores
from octet.model.block_format import POWER_SCALES
from octet.model.chat_template import DEFAULT_TEMPLATE, TEMPLATE_FILE, template_of
from octet.progress import progress_bar
from octet.recipe import KvCacheDtype
from octet.storage.files import Digest
from octet.storage.tensors import (
    PendingTensor,
    Tensor,
    TensorFile,
    pending,
    tensors_nbytes,
    write_tensors,
)

__all__ = ["CheckpointFormat", "ShardReader", "export_checkpoint"]

_DEEP_GEMM = (
    "scales of FP8 blocks are not powers of two: vLLM's DeepGEMM rounds them up and quantizes the"
    " weights again; on Hopper start vLLM with VLLM_USE_DEEP_GEMM_E8M0=0, as octet serve does"
)
_PART = 8 << 20  # bytes mapped and hashed together
_AHEAD = 64 << 20  # bytes that may wait to be hashed
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: maps many pages at once, and cheaply


class ShardReader:
    """Reads a shard, and hashes its bytes with `digest` on `executor` while they are in memory."""

    def __init__(self, shard: TensorFile, digest: Digest, executor: Executor) -> None:
        self.shard = shard
        self._executor = executor
        self._digest = digest
        # Offsets in the file; all bytes before them have been:
        self._encoded = 0
        self._submitted = 0  # for hashing
        self._hashed = 0
        self._released = 0
        self._waiting: deque[tuple[int, Future[None]]] = deque()  # (end, hashing) of each part

    def expect(self, name: str, rows: int = 0) -> None:
        """Announces that a tensor is about to be encoded, after its first `rows` rows.

        Reading is fastest if tensors are announced in the file's order.
        """
        start, stop = self.shard.span(name)
        if rows:
            start += (stop - start) // self.shard.shape(name)[0] * rows
        self._read(start, min(start + _PART, stop))

    def parts(self, name: str) -> Iterator[npt.NDArray[Any]]:
        """Yields the codes of a tensor that is copied, some rows at a time."""
        codes = self.shard.read(name).codes
        start, stop = self.shard.span(name)
        if codes.ndim == 0 or stop == start:
            self._read(start, stop)
            yield codes
            return
        row = (stop - start) // len(codes)
        step = max(1, _PART // row)
        for first in range(0, len(codes), step):
            last = min(first + step, len(codes))
            self._read(start + first * row, start + last * row)
            yield codes[first:last]

    def release(self) -> None:
        """Releases the memory of what has been hashed and encoded; reading it again is possible."""
        self._settle(_AHEAD)
        done = min(self._hashed, self._encoded)
        self.shard.advise("MADV_DONTNEED", self._released, done)
        self._released = max(done, self._released)

    def hexdigest(self) -> str:
        """Returns the hash of the whole file."""
        end = len(self.shard.contents)
        self._read(end, end)
        self._settle(0)
        self.release()
        return self._digest.hexdigest()

    def _read(self, start: int, stop: int) -> None:
        """Marks all before `start` as encoded, and submits the bytes up to `stop` to be hashed."""
        self._encoded = max(start, self._encoded)
        contents = self.shard.contents
        while self._submitted < stop:
            first, self._submitted = self._submitted, min(self._submitted + _PART, stop)
            with suppress(OSError):  # without it, pages are mapped one by one
                self.shard.advise(_POPULATE_READ, first, self._submitted)
            part = self._executor.submit(self._digest.update, contents[first : self._submitted])
            self._waiting.append((self._submitted, part))

    def _settle(self, ahead: int) -> None:
        """Waits until no more than `ahead` bytes have yet to be hashed."""
        while self._waiting:
            end, part = self._waiting[0]
            if not part.done() and self._submitted - self._hashed <= ahead:
                return
            part.result()
            self._hashed = end
            self._waiting.popleft()


CheckpointFormat = Literal["compressed-tensors", "modelopt", "fp8"]
INDEX_FILE = "model.safetensors.index.json"
_LAYOUTS: dict[str, Callable[[], Layout]] = {
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "fp8": Fp8,
}
_METADATA = {"format": "pt"}
_SHARDS_AT_A_TIME = 8  # at most; each is encoded on one thread and hashed on another


def export_checkpoint(
    calibration: Path,
    out: Path,
    *,
    model: Path | None = None,
    format: CheckpointFormat = "compressed-tensors",
    kv_cache: KvCacheDtype | None = None,
    tensor_parallel: int = 1,
    force: bool = False,
    console: Console | None = None,
    judge: Judge | None = None,
) -> Manifest:
    """Writes the checkpoint directory `out`; `model` overrides the path of the original.

    `kv_cache` overrides the recipe's. The checkpoint must be splittable over `tensor_parallel`
    GPUs. `judge` may refuse it once it is complete.

    Raises UnsupportedError, naming the layer, for what engines would refuse or get wrong, and
    ArtifactError or ExportError for any other obstacle. Each is raised before the first byte is
    written, except for a shard altered since calibration.
    """
    if format not in _LAYOUTS:
        raise ConfigError(f"unknown checkpoint format '{format}'{nearest(format, _LAYOUTS)}")
    check_destination(out, force=force, inputs=[calibration])
    source = Source.open(calibration, model, kv_cache=kv_cache, shards=False)
    layout = _LAYOUTS[format]()
    if not source.quantized_linears():
        raise UnsupportedError(f"recipe {source.recipe.name} leaves every layer in full precision")
    layout.check(source)
    check_fused(source)
    check_tensor_parallel(source, tensor_parallel)
    shards = {shard.path.name: _shard(source, layout, shard) for shard in source.checkpoint.shards}
    sizes = {name: tensors_nbytes(tensors, _METADATA) for name, tensors in shards.items()}
    require_space(out, sum(sizes.values()))
    details = _details(source, layout, tensor_parallel)
    with write_artifact(out, force=force) as writer:
        _write_side_files(source, layout, writer.path)
        if (source.checkpoint.path / INDEX_FILE).exists():
            _write_index(writer.path, shards)
        hashes = _write_shards(source, writer.path, shards, console)
        source.require_unaltered()
        manifest = source.manifest("checkpoint", details, "numba")
        return finish(writer, manifest, out, judge, hashes)


def _write_shards(
    source: Source, directory: Path, shards: dict[str, Tensors], console: Console | None
) -> dict[str, str]:
    """Writes every shard and verifies its original; returns SHA-256 by file name."""
    total = sum(shard.path.stat().st_size for shard in source.checkpoint.shards)
    stop = threading.Event()

    def write(shard: TensorFile) -> str:
        written = _write_shard(source, shard, directory, shards[shard.path.name], stop)
        advance(shard.path.stat().st_size)
        return written

    with (
        progress_bar(console, "export", total, "bytes", transient=True) as advance,
        ThreadPoolExecutor(min(_SHARDS_AT_A_TIME, usable_cores())) as pool,
    ):
        writing = {x.path.name: pool.submit(write, x) for x in source.checkpoint.shards}
        try:
            return {name: future.result() for name, future in writing.items()}
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _write_shard(
    source: Source, shard: TensorFile, directory: Path, tensors: Tensors, stop: threading.Event
) -> str:
    """Writes a shard and returns its SHA-256; raises CancelledError soon after `stop` is set."""
    with ThreadPoolExecutor(1) as hashing:
        digest = source.calibration.manifest.model.digest(shard.path.name)
        reader = ShardReader(shard, digest, hashing)

        def release() -> None:
            reader.release()
            if source.checkpoint.changes is not None:
                source.checkpoint.changes.release()
            if stop.is_set():
                raise CancelledError

        try:
            path, streamed = directory / shard.path.name, _streamed(source, reader, tensors)
            written = write_tensors(path, streamed, _METADATA, release=release)
        except OctetError:  # such as a NaN, which an altered shard may have caused
            source.require_shard(shard.path, reader.hexdigest())
            raise
        source.require_shard(shard.path, reader.hexdigest())
        return written


def _streamed(source: Source, reader: ShardReader, tensors: Tensors) -> Tensors:
    """Returns `tensors` fed by `reader`, so that each tensor of an unchanged shard is read once."""
    stored, changed = set(reader.shard.names), source.checkpoint.changed
    copied = stored & set(source.checkpoint.tensor_names)
    found: Tensors = {}
    for name, tensor in tensors.items():
        weight = f"{name.rpartition('.')[0]}.weight"  # `name` may end in weight_packed
        if isinstance(tensor, PendingTensor) and weight in stored:
            found[name] = _announced(reader, weight, tensor)
        elif name in copied and name not in changed:
            found[name] = replace(pending(tensor), parts=partial(reader.parts, name))
        else:
            found[name] = tensor
    return found


def _announced(reader: ShardReader, stored: str, tensor: PendingTensor) -> PendingTensor:
    """Returns `tensor`, which tells `reader` while it is encoded how much of `stored` was read."""

    def parts() -> Iterator[npt.NDArray[Any]]:
        rows = 0
        reader.expect(stored)
        for part in (tensor.read(),) if tensor.parts is None else tensor.parts():
            rows += len(part) if part.ndim else 0
            yield part
            reader.expect(stored, rows)

    return replace(tensor, parts=parts)


def _shard(source: Source, layout: Layout, shard: TensorFile) -> Tensors:
    """Returns the tensors of `shard` to be written, in their order; computes nothing yet."""
    quantized = {f"{name}.weight": item for name, item in source.quantized_linears().items()}
    cache_scales = _cache_scales(source, layout)
    tensors: Tensors = {}
    model = set(source.checkpoint.tensor_names)
    for name in shard.names:
        if name in quantized:
            tensors |= layout.linear(source, quantized[name])
        elif name in model:  # leaves out scales of weights that the checkpoint decodes
            tensors[name] = _copied(source, name)
        tensors |= cache_scales.get(name, {})
    return tensors


def _copied(source: Source, name: str) -> Tensor | PendingTensor:
    """Returns a tensor that is not quantized.

    A folded or decoded one is computed only when it is written.
    """
    checkpoint = source.checkpoint
    if name not in checkpoint.powers and not checkpoint.decodes(name):
        return checkpoint.stored(name)
    dtype, shape = checkpoint.dtype(name), checkpoint.shape(name)
    return PendingTensor(dtype, shape, lambda: checkpoint.read(name).codes)


def _cache_scales(source: Source, layout: Layout) -> dict[str, Tensors]:
    """Returns the scales of queries, keys and values, by the weight that they follow."""
    found: dict[str, Tensors] = {}
    for index in range(source.spec.layers):
        attention = f"{source.spec.layer(index)}.self_attn"
        k, v = source.cache_scales(index)
        scales: dict[CacheScale, float | None] = {"q": source.query_scale(index), "k": k, "v": v}
        if source.kv_cache == "e5m2":  # both or none: vLLM would use a single scale for K and V
            scales = {"k": k, "v": v} if (k, v) != (1, 1) else {}
        elif source.kv_cache == "float16":
            scales = {}
        inside = [x.name for x in source.spec.linears(index) if x.name.startswith(f"{attention}.")]
        for which, scale in scales.items():
            if scale is not None:
                projection = f"{attention}.{which}_proj"
                after = projection if projection in inside else inside[0]
                name = layout.cache_scale_name(attention, which, after != projection)
                tensor = float32(np.asarray(scale, np.float32), (1,))
                found.setdefault(f"{after}.weight", {})[name] = tensor
    return found


def _write_side_files(source: Source, layout: Layout, directory: Path) -> None:
    source.copy_side_files(directory, config=False)
    quantization = layout.config(source)
    if _blocks_have_powers(source):
        quantization |= POWER_SCALES
    config = source.checkpoint.config | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    for name, text in layout.side_files(source).items():
        (directory / name).write_text(text, "utf-8")
    if template_of(source.checkpoint.path) is None:
        # vLLM refuses chats without a template in the checkpoint, and accepts none in a request.
        (directory / TEMPLATE_FILE).write_text(DEFAULT_TEMPLATE, "utf-8")


def _write_index(directory: Path, shards: dict[str, Tensors]) -> None:
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {
        "metadata": {"total_size": sum(tensors_nbytes(x, header=False) for x in shards.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _blocks_have_powers(source: Source) -> bool | None:
    """Returns whether all scales of FP8 blocks are powers of two; None if there are no blocks."""
    scales = [
        source.weight_scale(linear)
        for linear in source.quantized_linears().values()
        if source.quantized_schemes(linear)[0].blocks
    ]
    if not scales:
        return None
    return all(bool((np.frexp(scale)[0] == 0.5).all()) for scale in scales)


def _details(source: Source, layout: Layout, tensor_parallel: int) -> dict[str, Any]:
    """Returns the details for the manifest."""
    details: dict[str, Any] = {
        "format": layout.label(source),
        "kv_cache": source.kv_cache,
        "tensor_parallel": tensor_parallel,
    }
    if source.kv_cache != "float16":
        details["serve_with"] = f"--kv-cache-dtype fp8_{source.kv_cache}"
    if source.kv_cache == "e4m3":
        known = [source.query_scale(index) is not None for index in range(source.spec.layers)]
        details["query_scale"] = (
            "calibrated" if all(known) else "not observed: an engine that rounds queries takes 1"
        )
    warnings = layout.warnings(source)
    if _blocks_have_powers(source) is False:
        warnings.append(_DEEP_GEMM)
    if warnings:
        details["warnings"] = warnings
    if template_of(source.checkpoint.path) is None:
        details["chat_template"] = "plain default: the model brings none"
    return details
