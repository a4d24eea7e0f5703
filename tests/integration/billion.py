"""A checkpoint with the sizes of Llama 3.2 1B and random weights, and calibrations of it.

The scales are plausible constants: what is tested is that engines of this size are built, not what
they say. Drawing, hashing and rounding a billion weights takes most of the time.
"""

import json
import shutil
from pathlib import Path

import numpy as np

from octet.model.checkpoint import Checkpoint
from octet.model.spec import Linear
from octet.numerics import scaling
from octet.recipe import Recipe, TensorScheme
from tests.calibrations import save_calibration

__all__ = ["calibrate", "write_checkpoint"]

TOKENIZER = Path(__file__).parents[2] / "examples" / "python-lm" / "model"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
_DEVIATION = 0.02
_LARGEST = 5.5 * _DEVIATION  # of so many normal numbers


def write_checkpoint(path: Path) -> Path:
    """1,235,814,400 parameters in BF16, in one shard of 2.5 GB."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copy(file, path)
    shapes = _shapes()
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    # One draw for all tensors, each from another place in it.
    drawn = np.random.default_rng(0).normal(0, _DEVIATION, 1 << 24).astype(np.float32)
    bits = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    one = np.uint16(0x3F80)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, shape in enumerate(shapes.values()):
            count = int(np.prod(shape))
            if len(shape) == 1:
                np.full(count, one).tofile(file)
                continue
            start = index * 7919 % len(bits)
            while count:
                part = bits[start : start + count]
                part.tofile(file)
                count, start = count - len(part), 0
    return path


def calibrate(path: Path, model: Path, recipe: Recipe) -> Path:
    """A calibration of `model` with constant scales."""
    checkpoint = Checkpoint.open(model)
    scales: dict[str, np.ndarray] = {}
    for linear in checkpoint.spec.linears():
        schemes = recipe.scheme_of(linear.name)
        if schemes is not None:
            scales |= _scales(linear, *schemes)
    for index in range(checkpoint.spec.layers):
        for kind in "kv":
            for suffix in ("", "_e4m3", "_e5m2"):
                name = f"model.layers.{index}.self_attn.{kind}_scale{suffix}"
                scales[name] = np.array(1, np.float32)
    return save_calibration(path, checkpoint, recipe, scales)


def _scales(linear: Linear, weights: TensorScheme, inputs: TensorScheme) -> dict[str, np.ndarray]:
    name, shape = linear.name, (linear.out_features, linear.in_features)
    granularity = scaling.Granularity.of(weights.granularity, weights.group_size)
    largest = 6 if weights.format == "e2m1" else 448
    found = {}
    scale = _LARGEST / largest
    if weights.two_level:
        found[f"{name}.weight_global_scale"] = np.array(scale / 448, np.float32)
        scale = 448
    found[f"{name}.weight_scale"] = np.full(granularity.scale_shape(shape), scale, np.float32)
    if not inputs.dynamic:
        found[f"{name}.input_scale"] = np.array(8 / 448, np.float32)
    elif inputs.two_level:
        found[f"{name}.input_global_scale"] = np.array(8 / (6 * 448), np.float32)
    return found


def _shapes() -> dict[str, list[int]]:
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    heads, kv_heads, size = (
        CONFIG[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = {
        "input_layernorm": [hidden],
        "self_attn.q_proj": [heads * size, hidden],
        "self_attn.k_proj": [kv_heads * size, hidden],
        "self_attn.v_proj": [kv_heads * size, hidden],
        "self_attn.o_proj": [hidden, heads * size],
        "post_attention_layernorm": [hidden],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }
    shapes = {"model.embed_tokens.weight": [CONFIG["vocab_size"], hidden]}
    for index in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return shapes | {"model.norm.weight": [hidden]}
