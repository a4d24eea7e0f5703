"""Takes static activation scales from a training's amax histories, as Transformer Engine saves it.

A module trained with DelayedScaling keeps its state under `<module>._extra_state`: bytes of a
pickle since Transformer Engine 2.0, before that a BytesIO of torch.save (`get_extra_state` in
transformer_engine/pytorch/module/base.py). `amax_history_fwd` is float32 [steps, 3 * GEMMs]: the
largest magnitudes of each GEMM's input, weight and output. To unpickle it may run code. Here none
runs: tensors are read, the recipe's classes become stand-ins, and any other name is refused.

The largest amax of the history sets the scale, even if the training used `most_recent`: a frozen
scale must hold for more than the next step. NaN, Inf and 0 (no pass) do not count, as there. The
margin is the recipe's, not the training's.
"""

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.observe.histogram import Histogram
from calibrate.scales.activations import scale_of
from octet.errors import ConfigError
from octet.model.spec import ModelSpec
from octet.numerics import formats, microscaling
from octet.recipe import Recipe

__all__ = ["TrainedInputs"]

_SUFFIX = "._extra_state"
_MOST_AMAXES = 1 << 24  # of a module: a tensor of stride 0 can claim any number
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

# Modules of Megatron and of te.TransformerLayer: for each of their GEMMs, the linears of a Hugging
# Face layer that have the same input.
_MODULES: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("linear_qkv", "layernorm_qkv", "qkv"), (_QKV,)),
    **dict.fromkeys(("linear_proj", "proj"), (("self_attn.o_proj",),)),
    "linear_fc1": (_GATE_UP,),
    "linear_fc2": (("mlp.down_proj",),),
    "layernorm_mlp": (_GATE_UP, ("mlp.down_proj",)),
}


@dataclass(frozen=True)
class TrainedInputs:
    """The largest magnitudes of activations in the last steps of a training, by observation."""

    path: Path
    amaxes: Mapping[str, float]
    steps: int  # of the longest history

    @classmethod
    def read(cls, path: Path, spec: ModelSpec) -> "TrainedInputs":
        """Reads a file of torch.save: a state dict, or the `_extra_state` entries of one.

        Names are those of the Hugging Face model, of Megatron or of te.TransformerLayer. Raises
        ConfigError, naming the file, if it holds none for `spec`, or more than data.
        """
        inputs = {linear.name: linear.input for linear in spec.linears()}
        amaxes: dict[str, float] = {}
        steps = 0
        for key, value in _read(path).items():
            if not (isinstance(key, str) and key.endswith(_SUFFIX)):
                continue
            gemms = _linears_of(key.removesuffix(_SUFFIX), spec, inputs)
            history = _history(f"{path}: {key}", value) if gemms else None
            if history is None:
                continue
            if history.shape[1] < 3 * len(gemms):
                raise ConfigError(
                    f"{path}: {key} has an amax history of shape {list(history.shape)}, not 3"
                    f" amaxes for each of {len(gemms)} GEMMs"
                )
            for column, names in zip(history.T[::3], gemms, strict=False):
                seen = column[np.isfinite(column)].max(initial=0)
                for name in names:
                    if seen > 0:
                        amaxes[inputs[name]] = max(float(seen), amaxes.get(inputs[name], 0))
                        steps = max(steps, len(column))
        if not amaxes:
            raise ConfigError(
                f"{path}: no amax history of this model's linear layers under '..._extra_state'."
                " Only DelayedScaling has one. In the training's environment, save: {k: v for k, v"
                " in model.state_dict().items() if k.endswith('_extra_state')}"
            )
        return cls(path, amaxes, steps)

    def scales(self, spec: ModelSpec, recipe: Recipe) -> dict[str, NDArray[np.float32]]:
        """Returns the stored input scales of `recipe` for these magnitudes, by their full name.

        ConfigError if it stores none, or by another method than `max`.
        """
        found = {}
        for linear in spec.linears():
            schemes = recipe.scheme_of(linear.name)
            amax = self.amaxes.get(linear.input)
            if schemes is None or amax is None:
                continue
            scheme, fmt = schemes[1], formats.format_named(schemes[1].format)
            if scheme.two_level:
                scale = microscaling.global_scale(amax, fmt)
                found[f"{linear.name}.input_global_scale"] = scale
            elif not scheme.dynamic:
                if scheme.method != "max":
                    raise ConfigError(
                        f"{self.path}: recipe {recipe.name} scales activations by method"
                        f" {scheme.method}, and a history of amaxes gives max alone"
                    )
                scale = np.asarray(scale_of(amax, fmt, scheme.margin), np.float32)
                found[f"{linear.name}.input_scale"] = scale
        if not found:
            raise ConfigError(
                f"{self.path}: recipe {recipe.name} scales activations at run time, and takes no"
                " amaxes; give --recipe fp8-static"
            )
        return found

    def warnings(self, observed: Mapping[str, Histogram]) -> list[str]:
        """Says where the scales come from, and where the samples exceed or lack a history."""
        found = [
            f"scales of {len(self.amaxes)} activations are for the largest magnitudes of the last"
            f" {self.steps} steps of a training, from {self.path}, not for the samples"
        ]
        lacking = [name for name in observed if name.endswith(".input") and name not in self.amaxes]
        if lacking:
            found.append(
                f"{len(lacking)} activations have no amax history in {self.path} and keep the"
                f" calibration's scales: {lacking[0]}{' and others' * (len(lacking) > 1)}"
            )
        exceeded = {
            name: observed[name].absmax / amax
            for name, amax in self.amaxes.items()
            if observed[name].absmax > amax
        }
        if exceeded:
            worst = max(exceeded, key=lambda name: exceeded[name])
            found.append(
                f"the samples exceed the training's amax in {len(exceeded)} activations, most in"
                f" {worst}, {exceeded[worst]:.3g} times: a margin in the recipe gives head-room"
            )
        return found


def _read(path: Path) -> Mapping[Any, Any]:
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            read = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged file makes torch raise nearly anything
        raise ConfigError(
            f"{path}: is no file of torch.save that holds tensors alone"
            f" ({type(error).__name__}); save only the entries '..._extra_state'"
        ) from None
    if not isinstance(read, Mapping):
        raise ConfigError(f"{path}: holds {type(read).__name__}, not a state dict")
    return read


def _linears_of(module: str, spec: ModelSpec, known: Mapping[str, str]) -> list[list[str]]:
    """Returns, for each GEMM of a module, the names of the model's linears with that input."""
    module = module.removeprefix("module.")  # of DistributedDataParallel
    if module in known:  # Accelerate puts te.Linear in the place of each nn.Linear
        return [[module]]
    gemms = _MODULES.get(module.rpartition(".")[2])
    layer = re.search(r"(?:^|\.)layers\.(\d{1,9})\.", module)
    if gemms is None or layer is None or int(layer[1]) >= spec.layers:
        return []
    prefix = spec.layer(int(layer[1]))
    names = [[f"{prefix}.{name}" for name in gemm] for gemm in gemms]
    return [[name for name in gemm if name in known] for gemm in names]


def _history(where: str, state: object) -> NDArray[np.float32] | None:
    """Returns `amax_history_fwd` of an `_extra_state`; None for one that has no state."""
    try:
        if isinstance(state, torch.Tensor):
            if not state.numel():
                return None
            read = _Unpickler(io.BytesIO(state.contiguous().numpy().tobytes())).load()
        elif isinstance(state, io.BytesIO):
            state.seek(0)
            read = torch.load(state, map_location="cpu", weights_only=True)
        else:
            return None
        if read is None or "amax_history_fwd" not in read:
            return None
        history = read["amax_history_fwd"].numpy()
        if history.dtype != np.float32 or history.ndim != 2 or history.size > _MOST_AMAXES:
            raise ValueError
    except _Refused as error:
        raise ConfigError(
            f"{where}: names {error}, which is not data, so it was not loaded; take the file from"
            " the training, or leave the entry out"
        ) from None
    except Exception as error:  # damaged bytes make pickle raise nearly anything
        raise ConfigError(
            f"{where}: is no state of Transformer Engine's delayed scaling"
            f" ({type(error).__name__}); take the file from the training again"
        ) from None
    return np.asarray(history, np.float32)


class _Refused(pickle.UnpicklingError):
    """A pickle that names something that is not data."""


class _Ignored:
    """Stands for an object of Transformer Engine's recipe, of which nothing is needed."""

    def __new__(cls, *arguments: object) -> "_Ignored":
        return super().__new__(cls)

    def __init__(self, *arguments: object) -> None:
        pass


def _storage(data: bytes) -> Any:
    """Stands for torch.storage._load_from_bytes, which unpickles without limits."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class _Unpickler(pickle.Unpickler):
    """Reads tensors, containers and numbers; runs nothing that the file names."""

    _KNOWN: Mapping[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): dict,
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("torch.storage", "_load_from_bytes"): _storage,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "transformer_engine.common.recipe":
            return _Ignored
        if (module, name) not in self._KNOWN:
            raise _Refused(f"{module}.{name}")
        return self._KNOWN[module, name]
