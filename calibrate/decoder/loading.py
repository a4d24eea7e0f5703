"""A checkpoint as a transformers model, from the local directory and in silence."""

from typing import Any, Literal

import torch

from calibrate.decoder.arithmetic import fast_matmuls
from calibrate.samples.tokens import quiet
from octet.errors import CheckpointError, UnsupportedError
from octet.model.checkpoint import Checkpoint

__all__ = [
    "ComputeDtype",
    "apply_changes",
    "load_config",
    "load_model",
    "load_skeleton",
    "resolve_dtype",
]

ComputeDtype = Literal["bfloat16", "float32"]


def resolve_dtype(
    requested: Literal["auto", "bfloat16", "float32"], checkpoint: Checkpoint
) -> ComputeDtype:
    """What "auto" means, decided once: bfloat16, which is how it is served, for a BF16 checkpoint;
    float32 for any other."""
    if requested != "auto":
        return requested
    stored = checkpoint.read(f"{next(checkpoint.spec.linears()).name}.weight").dtype
    return "bfloat16" if stored == "BF16" else "float32"


def load_config(checkpoint: Checkpoint) -> Any:
    """The checkpoint's transformers configuration.

    UnsupportedError for an architecture that the transformers release that is installed lacks.
    """
    import transformers

    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(
                checkpoint.path, local_files_only=True, trust_remote_code=False
            )
            _attention(config)
        except (ValueError, KeyError):
            raise UnsupportedError(
                f"{checkpoint.path}: transformers {transformers.__version__} does not know"
                f" {checkpoint.spec.architecture}, and a calibration runs what transformers"
                " computes: install a release that knows it"
            ) from None
    return config


def load_skeleton(checkpoint: Checkpoint, dtype: ComputeDtype) -> Any:
    """The transformers model in evaluation mode on the meta device: shapes, and no weights."""
    from transformers import AutoModelForCausalLM

    config = load_config(checkpoint)
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation=_attention(config),
        )
    return fast_matmuls(model.eval())


def _attention(config: Any) -> str:
    """PyTorch's fused attention where the architecture allows it: Gemma 2's soft cap does not."""
    from transformers import AutoModelForCausalLM

    return "sdpa" if AutoModelForCausalLM._model_mapping[type(config)]._supports_sdpa else "eager"


def load_model(checkpoint: Checkpoint, dtype: ComputeDtype) -> Any:
    """The transformers model in evaluation mode, weights cast to `dtype`.

    CheckpointError for a checkpoint that lacks a tensor, which transformers would initialise at
    random.
    """
    from transformers import AutoModelForCausalLM

    attention = _attention(load_config(checkpoint))
    with quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{checkpoint.path}: tensor {missing[0]} is missing")
    apply_changes(model, checkpoint)
    return fast_matmuls(model.eval())


def apply_changes(model: Any, checkpoint: Checkpoint) -> None:
    """Copies the tensors that `checkpoint` has changed into the loaded `model`."""
    if checkpoint.changes is None:
        return
    with torch.no_grad():
        for name in checkpoint.changes.names:
            changed = torch.from_numpy(checkpoint.changes.read(name).float32())
            model.get_parameter(name).copy_(changed)
