"""A plain torch decoder with the same quantization, independent of the product's own arithmetic.

Weights come through `safetensors`, FP8 is torch's own cast, attention is written out. It computes
every position at once, without a cache: keys and values are rounded where a cache would hold them.

FP8 rounding is chaotic: a sum taken in another order now and then moves a value across a rounding
boundary, that is a whole step of the grid, and the layers after it multiply it. The same reference
with its contractions summed in another order diverges from itself by some 4e-3 nats on the example
model. So an engine is compared in two ways: freely, against that noise floor; and with `decisions`,
the codes that it chose at every rounding. Those the reference checks, each must be what its own
value rounds to within a few units of float32 noise, and then computes on with them.
"""

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import silu

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
NOISE = 1e-5  # of a row's absolute maximum: what float32 sums in another order differ by
KvCache = Literal["e5m2", "e4m3", "float16", "none"]
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def to_e4m3(x: Tensor) -> Tensor:
    """Rounded to nearest even, saturating, and back to float32."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def to_e5m2(x: Tensor) -> Tensor:
    return x.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2).float()


def to_float16(x: Tensor) -> Tensor:
    return x.clamp(-65504.0, 65504.0).half().float()


def to_e2m1(x: Tensor) -> Tensor:
    """Rounded to the nearest of 15 values, ties to the even code, saturating."""
    magnitude, middles = x.abs(), torch.tensor(E2M1_MIDDLES)
    code = torch.bucketize(magnitude, middles)  # a tie gets the code below
    tie = magnitude == middles[code.clamp(max=6)]
    return torch.tensor(E2M1_VALUES)[code + (tie & (code % 2 == 1))] * x.sign()


def to_mxfp8_scale(amax: Tensor) -> Tensor:
    """2^ceil(log2(amax / 448))."""
    fraction, exponent = torch.frexp(amax.double() / E4M3_MAX)  # fraction in [0.5, 1)
    power = exponent - (fraction == 0.5).int()
    return torch.exp2(power.clamp(-127, 127).double()).float()


def to_mxfp4_scale(amax: Tensor) -> Tensor:
    """A quarter of amax rounded to a power of two, up from 1.75 on and down below."""
    fraction, exponent = torch.frexp(amax.double())
    power = exponent - 1 + (fraction >= 0.875).int() - 2
    return torch.exp2(power.clamp(-127, 127).double()).float()


def round_weight(
    weight: Tensor, scale: Tensor, scheme: dict[str, Any], global_scale: Tensor | None
) -> Tensor:
    """[N, K] with a scale [], [N, 1]; in blocks of g [⌈N/g⌉, ⌈K/g⌉]; in groups [N, ⌈K/g⌉]."""
    n, k = weight.shape
    size = scheme["group_size"]
    if scheme["granularity"] == "block":
        scale = scale.repeat_interleave(size, 0)[:n]
    if size is not None:
        scale = scale.repeat_interleave(size, 1)[:, :k]
    if global_scale is not None:
        scale = scale * global_scale
    rounding = to_e4m3 if scheme["format"] == "e4m3" else to_e2m1
    return rounding(weight / scale) * scale


class Reference:
    """A Llama in float32: as stored if `calibration` is None, quantized as it says otherwise.

    `decisions` maps `<first linear>.input`, `<first linear>.input.scale` (of groups, as its codes
    are, without a global scale) and `present.{i}.key|value` to the values of the codes that an
    engine chose; `differing` counts those other than the reference's own, of `rounded`.
    """

    def __init__(
        self,
        model: Path,
        calibration: Path | None = None,
        kv_cache: KvCache = "none",
        *,
        reorder: bool = False,
    ) -> None:
        self.config = json.loads((model / "config.json").read_text())
        self.weights: dict[str, Tensor] = {}
        for shard in sorted(model.glob("*.safetensors")):
            loaded = safetensors.torch.load_file(shard)
            self.weights |= {name: tensor.float() for name, tensor in loaded.items()}
        self.kv_cache = kv_cache
        self.reorder = reorder  # sum the contractions backwards
        self.scales: dict[str, Tensor] = {}
        self.recipe: dict[str, Any] = {}
        self.decisions: dict[str, Tensor] | None = None
        self.differing = self.rounded = 0
        if calibration is not None:
            self._quantize(calibration)

    def _quantize(self, calibration: Path) -> None:
        self.recipe = json.loads((calibration / "manifest.json").read_text())["recipe"]
        self.scales = safetensors.torch.load_file(calibration / "scales.safetensors")
        for name, scale in self.scales.items():
            module = name.removesuffix(".weight_scale")
            scheme = self.scheme(module)
            if module != name and scheme is not None:
                weight, shared = (
                    f"{module}.weight",
                    self.scales.get(f"{module}.weight_global_scale"),
                )
                rounded = round_weight(self.weights[weight], scale, scheme["weights"], shared)
                self.weights[weight] = rounded

    def scheme(self, module: str) -> dict[str, Any] | None:
        """The `weights` and `activations` of a linear that is quantized."""
        if not self.recipe or any(fnmatch.fnmatchcase(module, p) for p in self.recipe["exclude"]):
            return None
        for override in self.recipe["overrides"]:
            if fnmatch.fnmatchcase(module, override["match"]):
                return override
        return self.recipe

    def linear(self, module: str, x: Tensor) -> Tensor:
        scheme = self.scheme(module)
        if scheme is not None:
            x = self.round_input(module, x, scheme["activations"])
        return self.product(x, self.weights[f"{module}.weight"])

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """[..., K] and [N, K] → [..., N]."""
        return x.flip(-1) @ weight.flip(-1).T if self.reorder else x @ weight.T

    def round_input(self, module: str, x: Tensor, scheme: dict[str, Any]) -> Tensor:
        name = f"{self.first_reader(module)}.input"
        rounding = to_e4m3 if scheme["format"] == "e4m3" else to_e2m1
        noise = NOISE * x.abs().amax(-1, keepdim=True)
        if scheme["group_size"] is not None:
            x, noise = x.unflatten(-1, (-1, scheme["group_size"])), noise.unsqueeze(-1)
        amax = x.abs().amax(-1, keepdim=True)
        if not scheme["dynamic"]:
            scale = self.scales[f"{module}.input_scale"]
        elif scheme["scale_format"] == "e8m0":
            power = to_mxfp8_scale if scheme["format"] == "e4m3" else to_mxfp4_scale
            scale = self.choose(f"{name}.scale", amax, power, noise)
        elif scheme["scale_format"] == "e4m3":
            shared = self.scales[f"{module}.input_global_scale"]
            wanted = amax * (torch.tensor(1.0) / 6) * shared.reciprocal()
            chosen = self.choose(f"{name}.scale", wanted, to_e4m3, noise / (6 * shared))
            scale = torch.where(chosen == 0, torch.finfo(torch.float32).max, chosen * shared)
        else:
            scale = (amax / E4M3_MAX).clamp(min=2.0**-126)
        rounded = self.choose(name, x / scale, rounding, noise / scale) * scale
        return rounded if scheme["group_size"] is None else rounded.flatten(-2)

    def first_reader(self, module: str) -> str:
        """The first of the linears with the same input that rounds it in the same way."""
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            stem, _, last = module.rpartition(".")
            for name in (first, *others) if last in others else ():
                candidate = f"{stem}.{name}"
                same = all(
                    torch.equal(self.scales[f"{module}.{kind}"], self.scales[f"{candidate}.{kind}"])
                    for kind in ("input_scale", "input_global_scale")
                    if f"{module}.{kind}" in self.scales and f"{candidate}.{kind}" in self.scales
                )
                theirs, own = self.scheme(candidate), self.scheme(module)
                if same and theirs and own and theirs["activations"] == own["activations"]:
                    return candidate
        return module

    def choose(
        self, name: str, x: Tensor, rounding: Callable[[Tensor], Tensor], noise: Tensor
    ) -> Tensor:
        """x on the format's grid: the nearest value, or an engine's decision if it is as near.

        `noise` is what an engine's x may differ by.
        """
        own = rounding(x)
        if self.decisions is None:
            return own
        theirs = self.decisions[name].float().view_as(x)
        other = (theirs != own).nonzero(as_tuple=True)
        value, choice, slack = x[other], theirs[other], noise.expand_as(x)[other]
        wrong = (choice < rounding(value - slack)) | (choice > rounding(value + slack))
        if wrong.any():
            at = tuple(int(axis[wrong][0]) for axis in other)
            raise AssertionError(
                f"{name}{list(at)}: {x[at]:.6g} was rounded to {theirs[at]:.6g}, not {own[at]:.6g};"
                f" so are {int(wrong.sum())} of {own.numel()}"
            )
        self.differing += wrong.numel()
        self.rounded += own.numel()
        return theirs

    def norm(self, module: str, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        scaled = x * torch.rsqrt(variance + self.config["rms_norm_eps"])
        return scaled * self.weights[f"{module}.weight"]

    def cached(self, rows: Tensor, layer: int, kind: Literal["key", "value"]) -> Tensor:
        """Keys or values as they come back from the cache."""
        if self.kv_cache == "none":
            return rows
        name = f"model.layers.{layer}.self_attn.{kind[0]}_scale"
        of_type = self.scales.get(f"{name}_{self.kv_cache}")
        scale = of_type if of_type is not None else self.scales.get(name, torch.tensor(1.0))
        rounding = {"e5m2": to_e5m2, "e4m3": to_e4m3, "float16": to_float16}[self.kv_cache]
        stored = rows / scale
        noise = NOISE * stored.abs().amax(-1, keepdim=True)
        return self.choose(f"present.{layer}.{kind}", stored, rounding, noise) * scale

    def attention(self, layer: int, x: Tensor) -> Tensor:
        module = f"model.layers.{layer}.self_attn"
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim = self.config.get("head_dim") or self.config["hidden_size"] // heads
        q = self.linear(f"{module}.q_proj", x).unflatten(-1, (heads, dim)).transpose(1, 2)
        k = self.linear(f"{module}.k_proj", x).unflatten(-1, (kv_heads, dim)).transpose(1, 2)
        v = self.linear(f"{module}.v_proj", x).unflatten(-1, (kv_heads, dim)).transpose(1, 2)
        q, k = self.rotate(q), self.rotate(k)
        k = self.cached(k, layer, "key").repeat_interleave(heads // kv_heads, 1)
        v = self.cached(v, layer, "value").repeat_interleave(heads // kv_heads, 1)
        length = x.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) * dim**-0.5).masked_fill(hidden, -torch.inf)
        context = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return self.linear(f"{module}.o_proj", context)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of [B, H, T, D]; the halves of D are the pairs."""
        rope = self.config.get("rope_parameters") or {}
        theta = rope.get("rope_theta", self.config.get("rope_theta", 10_000.0))
        dim = x.shape[-1]
        inverse = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(x.shape[-2]).float()[:, None] * inverse
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def mlp(self, module: str, x: Tensor) -> Tensor:
        gate = silu(self.linear(f"{module}.gate_proj", x))
        return self.linear(f"{module}.down_proj", gate * self.linear(f"{module}.up_proj", x))

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """int64 [B, T] → float32 [B, T, V]."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            x = x + self.attention(index, self.norm(f"{layer}.input_layernorm", x))
            x = x + self.mlp(f"{layer}.mlp", self.norm(f"{layer}.post_attention_layernorm", x))
        x = self.norm("model.norm", x)
        tied = self.config.get("tie_word_embeddings", False)
        return x @ self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """The most likely continuation, every step computed from scratch."""
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(self.logits(torch.tensor([ids]))[0, -1].argmax()))
        return ids[len(prompt) :]


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference ‖ other) in nats for each position, from logits [..., V]."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


E4M3_VALUES = tuple(  # subnormals, then normals below the NaN
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)]
)
E8M0_VALUES = tuple(2.0**e for e in range(-127, 128))


def least_group_errors(
    weight: NDArray[np.float32],
    size: int,
    values: tuple[float, ...],
    scales: tuple[float, ...],
    global_scale: float = 1.0,
) -> NDArray[np.float64]:
    """[N, ⌈K/size⌉] the least squared error of each group, over every one of `scales`.

    By definition, in float64: each element takes the nearest of `values` times the scale. Nothing
    is pruned, and nothing rounded but by the format.
    """
    rows, columns = weight.shape
    magnitudes = np.zeros((rows, -(-columns // size) * size))
    magnitudes[:, :columns] = np.abs(weight)
    least = np.full((rows, magnitudes.shape[1] // size), np.inf)
    grid = np.array(values)
    for scale in scales:
        real = grid * (scale * global_scale)
        above = np.clip(np.searchsorted(real, magnitudes), 1, len(real) - 1)
        error = np.minimum(
            (magnitudes - real[above - 1]) ** 2,
            (magnitudes - real[above]) ** 2,
        )
        least = np.minimum(least, error.reshape(rows, -1, size).sum(axis=2))
    return least
