"""Checks that a decoder can be run layer by layer, and finds how far each layer sees."""

import sys
from typing import Any

from torch import nn

from calibrate.decoder.loading import load_skeleton
from calibrate.decoder.partial import find_norm
from octet.errors import UnsupportedError
from octet.model.checkpoint import Checkpoint

__all__ = ["check_make", "require_runnable", "window_of"]


def require_runnable(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedError for an architecture that `check_make` refuses; reads no weight."""
    if checkpoint.spec.generic:  # Octet knows how the others are made
        check_make(load_skeleton(checkpoint, "bfloat16"), checkpoint)


def check_make(model: Any, checkpoint: Checkpoint) -> str:
    """Returns the name of the decoder's last norm.

    Raises UnsupportedError unless the decoder is a stack of layers between embeddings and a norm,
    with the linears of the checkpoint.
    """
    spec, path, decoder = checkpoint.spec, checkpoint.path, model.base_model
    whole = f"{path}: {spec.architecture} cannot be run layer by layer: "
    prefix = f"{model.base_model_prefix}.layers"
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise UnsupportedError(f"{whole}its decoder has no stack of layers")
    if prefix != spec.prefix or len(decoder.layers) != spec.layers:
        raise UnsupportedError(
            f"{whole}transformers has {len(decoder.layers)} layers in {prefix}, the"
            f" checkpoint {spec.layers} in {spec.prefix}"
        )
    try:
        norm = find_norm(decoder)
    except ValueError as error:
        raise UnsupportedError(f"{whole}{error}, where a norm was expected") from None
    if spec.generic:
        for linear in spec.linears():
            if ".experts." not in linear.name:
                _check_linear(model, linear.name, (linear.out_features, linear.in_features), whole)
        for index in range(spec.layers):
            window_of(model, checkpoint, index)
            _check_experts(decoder.layers[index], index, checkpoint, whole)
    return norm


def _check_linear(model: Any, name: str, shape: tuple[int, int], whole: str) -> None:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear) or tuple(module.weight.shape) != shape:
        raise UnsupportedError(
            f"{whole}{name}.weight is no linear's weight of {list(shape)} in transformers"
        )


def _check_experts(layer: Any, index: int, checkpoint: Checkpoint, whole: str) -> None:
    """Raises UnsupportedError unless `calibrate.decoder.experts` can compute these experts."""
    spec = checkpoint.spec
    experts = getattr(getattr(layer, "mlp", None), "experts", None)
    if experts is None and index not in spec.sparse_layers:
        return
    inner, hidden = spec.moe_intermediate_size, spec.hidden_size
    expected = {
        "gate_up_proj": (spec.experts, 2 * inner, hidden),
        "down_proj": (spec.experts, hidden, inner),
    }
    found = {} if experts is None else {n: tuple(x.shape) for n, x in experts.named_parameters()}
    gating = getattr(getattr(experts, "_apply_gate", None), "__name__", "")
    plain = gating == "_default_apply_gate" and getattr(experts, "is_concatenated", False)
    if found != expected or not plain or index not in spec.sparse_layers:
        raise UnsupportedError(
            f"{whole}the experts of layer {index} are not gated MLPs fused as transformers 5 fuses"
            " those of Mixtral and Qwen3-MoE"
        )


def window_of(model: Any, checkpoint: Checkpoint, index: int) -> int | None:
    """Returns how many tokens a token sees in layer `index`, itself included; None for no limit."""
    spec, decoder = checkpoint.spec, model.base_model
    if not spec.generic:
        return spec.sliding_window if index in spec.sliding_layers else None
    config = decoder.config
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # all layers or none; used only if the module can make the mask
        source = sys.modules[type(decoder).__module__]
        return window if hasattr(source, "create_sliding_window_causal_mask") else None
    if kinds[index] not in ("full_attention", "sliding_attention"):
        raise UnsupportedError(
            f"{checkpoint.path}: layer {index} is of type '{kinds[index]}'; Octet runs"
            " 'full_attention' and 'sliding_attention'"
        )
    return window if kinds[index] == "sliding_attention" else None
