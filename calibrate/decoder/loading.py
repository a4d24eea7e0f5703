"""Loads a checkpoint as a transformers model, from the local directory and without log output.

`Stored` gives a checkpoint's tensors as torch tensors, each copied on access.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

from calibrate.decoder.arithmetic import fast_matmuls
from calibrate.decoder.experts import assemble
from calibrate.samples.tokens import quiet
from octet.errors import CheckpointError, ConfigError, UnsupportedError
from octet.model.block_format import QUANTIZATION
from octet.model.checkpoint import Checkpoint
from octet.model.gpt_oss import GPT_OSS
from octet.storage.tensors import Tensor

__all__ = [
    "ComputeDtype",
    "Stored",
    "apply_changes",
    "empty_like_stored",
    "load_config",
    "load_model",
    "load_skeleton",
    "resolve_device",
    "resolve_dtype",
    "to_torch",
]

ComputeDtype = Literal["bfloat16", "float32"]


def resolve_dtype(
    requested: Literal["auto", "bfloat16", "float32"], checkpoint: Checkpoint
) -> ComputeDtype:
    """Resolves "auto" once: bfloat16 for a BF16 checkpoint, float32 for any other.

    A BF16 checkpoint is also served in bfloat16.
    """
    if requested != "auto":
        return requested
    stored = checkpoint.dtype(f"{next(checkpoint.spec.linears()).name}.weight")
    return "bfloat16" if stored == "BF16" else "float32"


def resolve_device(requested: str) -> str:
    """Resolves "auto": "cuda" if there is a GPU, else "cpu".

    Raises ConfigError if "cuda" is requested and there is none.
    """
    found = torch.cuda.device_count()
    if requested == "cuda" and not found:
        raise ConfigError(
            "--device cuda: torch finds no GPU; give --device cpu, or install NVIDIA's driver"
            " and a torch built for CUDA"
        )
    if requested == "auto":
        return "cuda" if found else "cpu"
    return requested


def load_config(checkpoint: Checkpoint) -> Any:
    """Returns the checkpoint's transformers configuration.

    It has no quantization of weights that are decoded. Raises UnsupportedError for an architecture
    that the installed transformers release lacks.
    """
    import transformers

    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(
                checkpoint.path, local_files_only=True, trust_remote_code=False
            )
            _attention(config)
            if checkpoint.blocks is not None:
                for key in config.to_dict().keys() & set(QUANTIZATION):
                    delattr(config, key)
        except (ValueError, KeyError):
            raise UnsupportedError(
                f"{checkpoint.path}: transformers {transformers.__version__} does not know"
                f" {checkpoint.spec.architecture}, and a calibration runs what transformers"
                " computes: install a release that knows it"
            ) from None
    return config


def load_skeleton(checkpoint: Checkpoint, dtype: ComputeDtype) -> Any:
    """Builds the transformers model in evaluation mode on the meta device: shapes, no weights."""
    from transformers import AutoModelForCausalLM

    config = load_config(checkpoint)
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation=_attention(config),
            trust_remote_code=False,
        )
    return fast_matmuls(model.eval())


def _attention(config: Any) -> str:
    """Chooses PyTorch's fused attention where the architecture allows it, else eager attention.

    Gemma 2's soft cap does not allow it.
    """
    from transformers import AutoModelForCausalLM

    return "sdpa" if AutoModelForCausalLM._model_mapping[type(config)]._supports_sdpa else "eager"


def load_model(checkpoint: Checkpoint, dtype: ComputeDtype) -> Any:
    """Loads the transformers model in evaluation mode, weights cast to `dtype`.

    Raises CheckpointError if the checkpoint lacks a tensor, which transformers would initialise at
    random.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(checkpoint)
    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": _attention(config),
        "local_files_only": True,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    with quiet():
        if checkpoint.blocks is None:
            model, info = AutoModelForCausalLM.from_pretrained(
                checkpoint.path, trust_remote_code=False, **options
            )
        else:  # transformers would need a GPU to run the blocks
            weights = _weights_of(checkpoint.unchanged(), options["dtype"])
            architecture = AutoModelForCausalLM._model_mapping[type(config)]
            model, info = architecture.from_pretrained(
                None, config=config, state_dict=weights, trust_remote_code=False, **options
            )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{checkpoint.path}: tensor {missing[0]} is missing")
    apply_changes(model, checkpoint)
    return fast_matmuls(model.eval())


def _weights_of(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns all tensors under names that transformers loads; it fuses most experts itself."""
    found = dict(Stored(checkpoint, "", dtype))
    if checkpoint.spec.architecture == GPT_OSS:
        for layer in map(checkpoint.spec.layer, range(checkpoint.spec.layers)):
            names = [name for name in found if name.startswith(f"{layer}.")]
            mine = assemble({name.removeprefix(f"{layer}."): found.pop(name) for name in names})
            found |= {f"{layer}.{name}": weight for name, weight in mine.items()}
    return found


def apply_changes(model: Any, checkpoint: Checkpoint) -> None:
    """Copies the changed tensors of `checkpoint` into the loaded `model`."""
    with torch.no_grad():
        for name in checkpoint.changed:
            changed = torch.from_numpy(checkpoint.read(name).float32())
            model.get_parameter(name).copy_(changed)


# safetensors tag -> the torch dtype of the values, and of an integer of its size
_DTYPES = {
    "F64": (torch.float64, torch.int64),
    "F32": (torch.float32, torch.int32),
    "F16": (torch.float16, torch.int16),
    "BF16": (torch.bfloat16, torch.int16),
}


_PIECE = 1 << 20  # values that are converted at a time


class Stored(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint below `prefix`, each copied in `dtype` on every access.

    The pages that were read are released at once, because those of a mapped file count as our
    memory.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype) -> None:
        self._checkpoint, self._prefix, self._dtype = checkpoint, prefix, dtype
        self._names = [
            name.removeprefix(prefix)
            for name in checkpoint.tensor_names
            if name.startswith(prefix) and not name.endswith("rotary_emb.inv_freq")
        ]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        copy = to_torch(self._checkpoint.read(f"{self._prefix}{name}"), self._dtype)
        self._checkpoint.release()
        return copy

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def to_torch(tensor: Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copies a stored floating-point tensor to the CPU in `dtype`, into memory of its own."""
    whole = torch.empty(tensor.shape, dtype=dtype)
    flat, codes = whole.view(-1), tensor.codes.reshape(-1)
    piece = empty_like_stored(tensor.dtype, (min(len(codes), _PIECE),))
    raw = piece.view(_DTYPES[tensor.dtype][1]).numpy()
    for start in range(0, len(codes), _PIECE):
        part = codes[start : start + _PIECE]
        np.copyto(raw[: len(part)], part.view(raw.dtype))
        flat[start : start + len(part)] = piece[: len(part)]
    return whole


def empty_like_stored(dtype: str, shape: tuple[int, ...], *, pin: bool = False) -> torch.Tensor:
    """Returns memory for a tensor of a safetensors dtype; `pin` makes copying to a GPU faster."""
    return torch.empty(shape, dtype=_DTYPES[dtype][0], pin_memory=pin)
