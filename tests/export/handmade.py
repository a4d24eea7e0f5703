"""Quantized checkpoints written by hand, from the formats' descriptions and ml_dtypes alone.

None of Octet's code for formats, scales or files has a part in it: what `octet verify` reads here
was written by another hand. Rounding is ml_dtypes', to nearest even; values are clamped before.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from octet.artifacts.manifest import Manifest, software, write_artifact
from octet.artifacts.provenance import ModelIdentity
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe

Tensors = dict[str, torch.Tensor]
Damage = Callable[[Tensors, dict[str, Any]], None]
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}


# compressed-tensors' and ModelOpt's words for an E4M3 cache.
E4M3_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@dataclass(frozen=True)
class Format:
    """`linear` gives the tensors of one; `config` the quantization_config."""

    recipe: str
    linear: Callable[[np.ndarray, float], Tensors]
    config: dict[str, Any]
    static: bool = False


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def torch_of(x: np.ndarray) -> torch.Tensor:
    x = np.ascontiguousarray(x)
    if x.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(x)


def pack(x: np.ndarray) -> np.ndarray:
    """E2M1, two a byte: the low nibble is the even column."""
    codes = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def amax_of(w: np.ndarray, rows: int, columns: int) -> np.ndarray:
    n, k = w.shape
    return np.abs(w).reshape(n // rows, rows, k // columns, columns).max(axis=(1, 3))


def spread(scale: np.ndarray, w: np.ndarray) -> np.ndarray:
    return scale.repeat(w.shape[0] // scale.shape[0], 0).repeat(w.shape[1] // scale.shape[1], 1)


def per_tensor(w: np.ndarray, shared: float) -> Tensors:
    scale = np.array([shared / 448], np.float32)
    return {"weight": torch_of(e4m3(w / scale)), "weight_scale": torch_of(scale)}


def static(w: np.ndarray, shared: float) -> Tensors:
    return per_tensor(w, shared) | {"input_scale": torch.tensor([8.0 / 448])}


def per_channel(w: np.ndarray, _: float) -> Tensors:
    scale = (np.abs(w).max(axis=1, keepdims=True) / 448).astype(np.float32)
    return {"weight": torch_of(e4m3(w / scale)), "weight_scale": torch_of(scale)}


def flat_channel(w: np.ndarray, shared: float) -> Tensors:
    tensors = per_channel(w, shared)
    return tensors | {"weight_scale": tensors["weight_scale"].reshape(-1)}


def blocks(w: np.ndarray, _: float) -> Tensors:
    scale = (amax_of(w, 128, 128) / 448).astype(np.float32)
    return {"weight": torch_of(e4m3(w / spread(scale, w))), "weight_scale": torch_of(scale)}


def inverse_blocks(w: np.ndarray, shared: float) -> Tensors:
    tensors = blocks(w, shared)
    return {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"]}


def four_axes(w: np.ndarray, shared: float) -> Tensors:
    tensors = blocks(w, shared)
    return tensors | {"weight_scale": tensors["weight_scale"][:, None, :, None].contiguous()}


def mx(w: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Scaled values and the E8M0 codes of groups of 32."""
    exponent = np.ceil(np.log2(amax_of(w, 1, 32) / largest)).astype(int)
    return w / spread(np.exp2(exponent.astype(np.float32)), w), (exponent + 127).astype(np.uint8)


def mxfp8(w: np.ndarray, _: float) -> Tensors:
    scaled, codes = mx(w, 448)
    return {"weight": torch_of(e4m3(scaled)), "weight_scale": torch_of(codes)}


def mxfp4(w: np.ndarray, _: float) -> Tensors:
    scaled, codes = mx(w, 6)
    return {"weight_packed": torch_of(pack(scaled)), "weight_scale": torch_of(codes)}


def unnamed_mxfp4(w: np.ndarray, shared: float) -> Tensors:
    tensors = mxfp4(w, shared)
    return {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}


def two_levels(w: np.ndarray, shared: float) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Packed codes, E4M3 group scales and the global scale, which multiplies."""
    whole = np.float32(shared / (6 * 448))
    scale = e4m3(amax_of(w, 1, 16) / 6 / whole)
    return pack(w / spread(scale.astype(np.float32) * whole, w)), scale, whole


def nvfp4_divisors(w: np.ndarray, shared: float) -> Tensors:
    codes, scale, whole = two_levels(w, shared)
    return {
        "weight_packed": torch_of(codes),
        "weight_scale": torch_of(scale),
        "weight_global_scale": torch.tensor([1 / whole]),
        "input_global_scale": torch.tensor([6 * 448 / 8.0]),
    }


def nvfp4_multipliers(w: np.ndarray, shared: float) -> Tensors:
    codes, scale, whole = two_levels(w, shared)
    return {
        "weight": torch_of(codes),
        "weight_scale": torch_of(scale),
        "weight_scale_2": torch.tensor(whole),
        "input_scale": torch.tensor(8.0 / (6 * 448)),
    }


def ct(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": form,
                "weights": weights | {"dynamic": False},
                "input_activations": inputs,
            }
        },
    }


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def token(base: dict[str, Any]) -> dict[str, Any]:
    return base | {"strategy": "token", "dynamic": True}


MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NV = {"strategy": "tensor_group", "group_size": 16}
BLOCK = {"strategy": "block", "block_structure": [128, 128]}
FLOATS = "float-quantized"

FORMATS: dict[str, Format] = {
    "ct-channel": Format(
        "fp8", per_channel, ct(FLOATS, FLOAT8 | {"strategy": "channel"}, token(FLOAT8))
    ),
    "ct-static": Format(
        "fp8-static",
        static,
        ct(
            FLOATS,
            FLOAT8 | {"strategy": "tensor"},
            FLOAT8 | {"strategy": "tensor", "dynamic": False},
        ),
    ),
    "ct-block": Format(
        "fp8-block",
        blocks,
        ct(
            FLOATS,
            FLOAT8 | BLOCK,
            FLOAT8 | {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
    ),
    "ct-nvfp4": Format(
        "nvfp4",
        nvfp4_divisors,
        ct("nvfp4-pack-quantized", FLOAT4 | NV, FLOAT4 | NV | {"dynamic": "local"}),
    ),
    "ct-mxfp4": Format(
        "mxfp4",
        mxfp4,
        ct("mxfp4-pack-quantized", FLOAT4 | MX, FLOAT4 | MX | {"dynamic": True}),
    ),
    "ct-mxfp8": Format(
        "mxfp8",
        mxfp8,
        ct("mxfp8-quantized", FLOAT8 | MX, FLOAT8 | MX | {"dynamic": True}),
    ),
    "modelopt-fp8": Format("fp8-static", static, modelopt("FP8")),
    "modelopt-channel": Format("fp8", flat_channel, modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
    "modelopt-block": Format("fp8-block", four_axes, modelopt("FP8_PB_WO")),
    "modelopt-nvfp4": Format("nvfp4", nvfp4_multipliers, modelopt("NVFP4", group_size=16)),
    "modelopt-mxfp8": Format("mxfp8", mxfp8, modelopt("MXFP8")),
    "modelopt-mxfp4": Format("mxfp4", unnamed_mxfp4, modelopt("mxfp4")),
    "fp8-static": Format(
        "fp8-static",
        static,
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "fp8-block": Format(
        "fp8-block",
        inverse_blocks,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "ignored_layers": ["lm_head"],
        },
    ),
}


def write_handmade(
    path: Path,
    model: Path,
    form: str,
    *,
    damage: Damage | None = None,
    manifest: bool = True,
    recipe: str | None = None,
    details: dict[str, Any] | None = None,
) -> Path:
    """The checkpoint `model` in the format `form`, as another program would have written it.

    `damage` changes tensors and config.json before they are written, and hashes are of what is:
    only the numbers and the names can tell. `manifest` False leaves a foreign checkpoint; else it
    has the format's recipe, or `recipe`, and `details`.
    """
    kind = FORMATS[form]
    original = load_file(model / "model.safetensors")
    shared = shared_largest(original)
    tensors: Tensors = {}
    for name, value in original.items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            found = kind.linear(value.float().numpy(), shared[module])
            tensors |= {f"{module}.{key}": tensor for key, tensor in found.items()}
        else:
            tensors[name] = value
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = json.loads(json.dumps(kind.config))
    if damage is not None:
        damage(tensors, config)
    if not manifest:
        path.mkdir(parents=True)
        _files(path, model, tensors, config)
        return path
    with write_artifact(path) as writer:
        _files(writer.path, model, tensors, config)
        identity = ModelIdentity.of(Checkpoint.open(model))
        writer.finish(
            Manifest(
                kind="checkpoint",
                model=identity,
                recipe=Recipe.load(recipe or kind.recipe),
                details=details or {},
                software=software(),
            )
        )
    return path


def shared_largest(original: Tensors) -> dict[str, float]:
    """The largest magnitude of the projections that a kernel fuses, for each of them."""
    largest = {
        name.removesuffix(".weight"): float(value.float().abs().max())
        for name, value in original.items()
        if name.endswith("_proj.weight")
    }
    for name in largest:
        parent, _, projection = name.rpartition(".")
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if projection in group:
                top = max(largest[f"{parent}.{one}"] for one in group)
                largest |= {f"{parent}.{one}": top for one in group}
    return largest


def _files(path: Path, model: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    for file in (*model.glob("tokenizer*"), *model.glob("generation_config.json")):
        shutil.copy(file, path)
