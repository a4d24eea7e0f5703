"""A Hugging Face checkpoint directory: config, safetensors shards and tokenizer, read lazily.

Weights in FP8 blocks (`octet.model.fp8_blocks`) and gpt-oss's MXFP4 (`octet.model.gpt_oss`) are
decoded when they are read, and everything here describes the decoded model; `blocks_of` returns the
blocks that are stored.
"""

import json
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from octet.errors import CheckpointError, UnsupportedError
from octet.hardware.cores import usable_cores
from octet.model.block_format import QUANTIZATION, block_format
from octet.model.chat_template import GENERATION_CONFIG
from octet.model.folding import Folds, powers_of
from octet.model.fp8_blocks import BlockWeights, find_blocks
from octet.model.gpt_oss import GPT_OSS, Mxfp4Weights, find_mxfp4, is_mxfp4, split_experts
from octet.model.not_a_checkpoint import (
    explain_file,
    explain_missing,
    explain_without_config,
    explain_without_weights,
)
from octet.model.spec import ModelSpec, quantized_already, refuse_unsupported
from octet.storage.files import MAX_TOKENIZER_BYTES, file_digests, read_object, sha256_file
from octet.storage.tensor_header import nbytes_of
from octet.storage.tensors import Tensor, TensorFile

__all__ = ["TOKENIZER_FILES", "Checkpoint", "sha256_file"]

# The files of a tokenizer; every export copies those that exist.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)

_FLOATS = ("F64", "F32", "F16", "BF16")  # of weights that are not quantized


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: every shard's header has been validated, but no weight read."""

    path: Path
    config: dict[str, Any]  # without the quantization of weights that are decoded
    spec: ModelSpec
    shards: tuple[TensorFile, ...]
    changes: TensorFile | None = None  # tensors that replace those of the shards
    # Power of two that a tensor is multiplied by when it is read, see `octet.model.folding`.
    powers: Mapping[str, int] = field(default_factory=dict)
    blocks: BlockWeights | Mxfp4Weights | None = None  # the weights that are decoded

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens the checkpoint in the directory `path`.

        Raises CheckpointError if it is not a whole checkpoint, and UnsupportedError if it is not a
        decoder-only model.
        """
        if not path.exists():
            raise explain_missing(path)
        if not path.is_dir():
            raise explain_file(path)
        if not (path / "config.json").exists():
            raise explain_without_config(path)
        _refuse_special(path)
        config = read_object(path / "config.json", CheckpointError)
        refuse_unsupported(config, str(path))
        _refuse_quantized(path)
        shards = tuple(TensorFile.open(shard) for shard in _shard_paths(path))
        shapes = {name: shard.shape(name) for shard in shards for name in shard.names}
        spec = ModelSpec.from_config(config, str(path), shapes)
        if spec.architecture == GPT_OSS:
            shards = split_experts(shards, config, spec, str(path))
        checkpoint = cls(path, config, spec, shards)._with_blocks()
        checkpoint._check_tensors()
        return checkpoint

    def _with_blocks(self) -> Self:
        """Returns this checkpoint with its FP8 blocks or MXFP4, if it has any, to be decoded."""
        config = {key: x for key, x in self.config.items() if key not in QUANTIZATION}
        if is_mxfp4(self.config):
            return replace(self, config=config, blocks=find_mxfp4(self._shard_of, str(self.path)))
        fmt = block_format(self.config)
        if fmt is None:
            return self
        stored = {name: (x.dtype(name), x.shape(name)) for name, x in self._shard_of.items()}
        read, linears = self._stored_as_is, self.spec.linear_names
        blocks = find_blocks(fmt, linears, stored, read, str(self.path))
        return replace(self, config=config, blocks=blocks)

    @cached_property
    def _shard_of(self) -> dict[str, TensorFile]:
        return {name: shard for shard in self.shards for name in shard.names}

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the model's tensors; scales of decoded weights are none of them."""
        scales = set() if self.blocks is None else set(self.blocks.scales.values())
        return tuple(name for name in self._shard_of if name not in scales)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._file_of(name).shape(name)
        return self.blocks.shape(stored) if self.blocks and self.decodes(name) else stored

    def dtype(self, name: str) -> str:
        """Returns the dtype of the tensor that `read` returns."""
        if self.blocks is not None and self.decodes(name):
            return self.blocks.dtype
        return self._file_of(name).dtype(name)

    def nbytes(self, name: str) -> int:
        """Returns the size of the tensor that `read` returns."""
        return nbytes_of(self.dtype(name), self.shape(name))

    def decodes(self, name: str) -> bool:
        """Returns whether the tensor is a weight that is stored in blocks and decoded."""
        changed = self.changes is not None and name in self.changes.names
        return self.blocks is not None and name in self.blocks.scales and not changed

    def blocks_of(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Returns a weight's E4M3 codes [N, K] and scales [⌈N/128⌉, ⌈K/128⌉], views of the files.

        None for a tensor that is not stored in blocks, or was changed. A folded power of two
        multiplies the scales alone.
        """
        if not isinstance(self.blocks, BlockWeights) or not self.decodes(name):
            return None
        codes, scale = (self._stored_as_is(x) for x in (name, self.blocks.scales[name]))
        return codes, scale.times_power(self.powers[name]) if name in self.powers else scale

    def with_changes(self, path: Path) -> Self:
        """Returns this checkpoint with the tensors of the file `path` in place of its own.

        Raises CheckpointError for a tensor that it does not hold, or holds in another shape. Hashes
        stay those of the checkpoint's own files.
        """
        changes, known = TensorFile.open(path), set(self.tensor_names)
        for name in changes.names:
            if name not in known or self.shape(name) != changes.shape(name):
                raise CheckpointError(f"{path}: {name} is no tensor of {self.path} in this shape")
        return replace(self, changes=changes)

    def with_folds(self, folds: Folds) -> Self:
        """Returns this checkpoint with powers of two folded into its attention's tensors."""
        return replace(self, powers=powers_of(self.spec, folds, self.tensor_names))

    def unchanged(self) -> Self:
        """Returns this checkpoint with its own tensors only."""
        return replace(self, changes=None, powers={})

    @property
    def changed(self) -> frozenset[str]:
        """Names of the tensors that are not as the shards hold them."""
        return frozenset((*(self.changes.names if self.changes is not None else ()), *self.powers))

    @property
    def changes_digest(self) -> str:
        """Identifies the changes; empty without any."""
        own = sha256_file(self.changes.path) if self.changes is not None else ""
        return own + (json.dumps(dict(self.powers), sort_keys=True) if self.powers else "")

    def read(self, name: str) -> Tensor:
        """Returns a tensor by name: a view of the file, or a copy if it was folded or decoded."""
        stored = self.stored(name)
        return stored.times_power(self.powers[name]) if name in self.powers else stored

    def stored(self, name: str) -> Tensor:
        """Returns a tensor before folding, in the same dtype and shape.

        It is a view of the file, or a copy if it was decoded.
        """
        if self.blocks is None or not self.decodes(name):
            return self._file_of(name).read(name)
        return self.blocks.decode(name, self._stored_as_is)

    def _stored_as_is(self, name: str) -> Tensor:
        return self._shard_of[name].read(name)

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Reads the bytes of a tensor into `buffer`; for reading with several threads."""
        if name in self.powers or self.decodes(name):
            buffer[:] = np.ascontiguousarray(self.read(name).codes).reshape(-1).view(np.uint8).data
        else:
            self._file_of(name).read_into(name, buffer)

    def _file_of(self, name: str) -> TensorFile:
        if self.changes is not None and name in self.changes.names:
            return self.changes
        try:
            return self._shard_of[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor named {name}") from None

    def release(self) -> None:
        """Releases the memory of tensors read so far: mapped pages count as process memory.

        Tensors read before stay valid; accessing them reads the files again.
        """
        for file in (*self.shards, *([self.changes] if self.changes is not None else [])):
            file.release()

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        return tuple(self.path / name for name in TOKENIZER_FILES if (self.path / name).exists())

    @property
    def side_files(self) -> tuple[Path, ...]:
        """The tokenizer and the defaults of sampling: what a server reads beside the weights."""
        defaults = self.path / GENERATION_CONFIG
        return (*self.tokenizer_files, *([defaults] if defaults.is_file() else []))

    @cached_property
    def _weight_digests(self) -> dict[str, tuple[str, str | None]]:
        with ThreadPoolExecutor(usable_cores()) as pool:  # hashing frees the GIL
            found = pool.map(lambda shard: (shard.path.name, shard.digests), self.shards)
            return {"config.json": file_digests(self.path / "config.json"), **dict(found)}

    @property
    def weight_hashes(self) -> dict[str, str]:
        """SHA-256 of config.json and of each shard, by file name."""
        return {name: sha256 for name, (sha256, _) in self._weight_digests.items()}

    @property
    def weight_checksums(self) -> dict[str, str]:
        """XXH3-128 of the same files; {} without the `xxhash` package."""
        found = self._weight_digests.items()
        return {name: fast for name, (_, fast) in found if fast is not None}

    @cached_property
    def tokenizer_hashes(self) -> dict[str, str]:
        return {path.name: sha256_file(path) for path in self.tokenizer_files}

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user before any work on this checkpoint, one line each."""
        warnings = []
        if self.spec.generic:
            linears, layer = list(self.spec.linears()), f"{self.spec.layer(0)}."
            first = [x.name.removeprefix(layer) for x in self.spec.linears(0)]
            warnings.append(
                f"{self.spec.architecture} is an architecture that Octet does not know: it treats"
                f" every matrix below {self.spec.prefix} as a linear layer, {len(linears)} in all"
                f" (in layer 0: {', '.join(first)})"
            )
        unknown = self._undescribed()
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            warnings.append(
                f"config.json does not describe {', '.join(unknown[:3])}{more}: Octet does not"
                " quantize such tensors, and transformers does not use them"
            )
        return tuple(warnings)

    def _undescribed(self) -> list[str]:
        if self.spec.generic:
            return []
        expected = dict(self.spec.tensor_shapes())
        # Ignores buffers of old transformers releases, and a tied head: the embeddings again.
        return [
            name
            for name in self.tensor_names
            if name not in expected
            and not name.endswith("rotary_emb.inv_freq")
            and name != "lm_head.weight"
        ]

    def _check_tensors(self) -> None:
        expected = dict(self.spec.tensor_shapes())
        for name in self._undescribed():
            matrix = name.endswith(".weight") and len(self._shard_of[name].shape(name)) > 1
            if matrix and name.startswith(f"{self.spec.prefix}."):  # an extra layer or expert
                raise CheckpointError(
                    f"{self.path}: tensor {name} is not one that config.json describes; Octet would"
                    " leave it out of the model"
                )
        for name, shape in expected.items():
            shard = self._shard_of.get(name)
            if shard is None:
                raise CheckpointError(f"{self.path}: tensor {name} is missing")
            if self.dtype(name) not in _FLOATS:
                raise UnsupportedError(
                    quantized_already(str(self.path), f"{name} stored as {shard.dtype(name)}")
                )
            if self.shape(name) != shape:
                raise CheckpointError(
                    f"{self.path}: {name} has shape {self.shape(name)}, config.json says {shape}"
                )


def _refuse_special(path: Path) -> None:
    """Refuses files beside the weights that would block or fill memory, whoever reads them."""
    for file in sorted(path.iterdir()):
        try:
            found = file.stat()
        except OSError:  # a link to nothing, which matters only if it is read
            continue
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise CheckpointError(f"{file}: a FIFO or a device, not a file; remove it")
        if file.name in TOKENIZER_FILES and found.st_size > MAX_TOKENIZER_BYTES:
            raise CheckpointError(
                f"{file}: larger than the {MAX_TOKENIZER_BYTES >> 20} MiB that a tokenizer may"
                " have; copy it again"
            )


def _shard_paths(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_object(index, CheckpointError).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) and os.path.basename(name) == name for name in weight_map.values()
        ):
            raise CheckpointError(f"{index}: weight_map does not name files beside it")
        names = sorted(set(weight_map.values()))
        missing = next((name for name in names if not (path / name).exists()), None)
        if missing is not None:
            raise CheckpointError(
                f"{path}: shard {missing} named by {index.name} is missing; download it, too"
            )
        return [path / name for name in names]
    if single.exists():
        return [single]
    raise explain_without_weights(path)


# Files of quantizers that leave config.json as it was.
_QUANTIZERS = {
    "hf_quant_config.json": "ModelOpt",
    "quantize_config.json": "AutoGPTQ",
    "quant_config.json": "AutoAWQ",
}


def _refuse_quantized(path: Path) -> None:
    for name, method in _QUANTIZERS.items():
        if (path / name).exists():
            raise UnsupportedError(quantized_already(str(path), f"{method} ({name})"))
