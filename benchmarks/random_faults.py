"""Draws faults of a served model at random: kind, layer, tensor and size.

`KINDS` maps names to functions that change a `Served` model and say what they changed. Sizes are
log-uniform. Everything in a decoder layer's linears is undone with `Served`; other changes are
undone by callbacks of its `stack`.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibrate.simulate.model import Schemes, layer_weights
from calibrate.simulate.scales import DeviceScales
from octet.artifacts.scenarios import Fault, Scenario
from octet.artifacts.serving_path import ServingPath
from octet.model.spec import ModelSpec

__all__ = ["KINDS", "Planted", "Served"]

Random = np.random.Generator


@dataclass(frozen=True)
class Planted:
    """A fault: where it is, how large, and the scenario that would be its right name, if any."""

    where: str
    size: float
    scenario: Scenario | None = None


@dataclass
class Served:
    """A model that computes as it is served on `path`; its dequantized weights can be changed."""

    model: Any
    spec: ModelSpec
    schemes: Schemes
    scales: DeviceScales
    path: ServingPath
    stack: ExitStack

    @property
    def decoder(self) -> Any:
        return self.model.base_model

    def layer(self, random: Random) -> tuple[int, Any]:
        index = int(random.integers(self.spec.layers))
        return index, self.decoder.layers[index]

    def linears(self, index: int) -> dict[str, Tensor]:
        """Returns the weights [N, K] of the quantized linears of a layer, as served."""
        prefix = self.spec.layer(index)
        names = [name for name in self.schemes if name.startswith(f"{prefix}.")]
        return layer_weights(self.model.get_submodule(prefix), prefix, self.spec, names)

    def linear(self, random: Random) -> tuple[str, Tensor]:
        index, _ = self.layer(random)
        found = self.linears(index)
        name = str(random.choice(sorted(found)))
        return name, found[name]

    def codes(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the E4M3 codes of a weight, uint8 [N, K], and its scales."""
        scale = self.scales.need(f"{name}.weight_scale")
        codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scale

    def keep(self, tensor: Tensor) -> Tensor:
        """Restores `tensor`, which is not a linear's weight, in the end."""
        before = tensor.detach().clone()
        self.stack.callback(lambda: tensor.copy_(before))
        return tensor

    def set(self, module: Any, name: str, value: Any) -> None:
        """Sets an attribute until the end."""
        self.stack.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)


def _size(random: Random, low: float, high: float) -> float:
    return float(np.exp(random.uniform(math.log(low), math.log(high))))


def _factor(random: Random, low: float, high: float) -> float:
    """Draws a factor whose logarithm has a size of `low` to `high` and either sign."""
    return float(np.exp(random.choice([-1, 1]) * _size(random, low, high)))


def _some(random: Random, count: int, share: float, least: int = 1) -> Tensor:
    """Draws `share` of the numbers below `count`, `least` of them at least."""
    many = min(count, max(least, round(share * count)))
    return torch.from_numpy(random.choice(count, many, replace=False))


def _noise(random: Random, weight: Tensor) -> Tensor:
    """Draws Gaussian noise with the mean square of `weight`."""
    generator = torch.Generator(weight.device).manual_seed(int(random.integers(1 << 31)))
    noise = torch.randn(weight.shape, generator=generator, device=weight.device)
    return noise * weight.float().square().mean().sqrt()


def scale(served: Served, random: Random) -> Planted:
    name, weight = served.linear(random)
    factor = _factor(random, 0.003, 1.5)
    weight.mul_(factor)
    return Planted(name, factor)


def scale_of_layer(served: Served, random: Random) -> Planted:
    index, _ = served.layer(random)
    factor = _factor(random, 0.003, 1.5)
    for weight in served.linears(index).values():
        weight.mul_(factor)
    return Planted(f"layer {index}", factor, _of_layer(served, index, 0.5 if factor < 1 else 2.0))


def scale_of_layer_simulated(served: Served, random: Random) -> Planted:
    index, _ = served.layer(random)
    factor = float(random.choice([0.5, 2.0]))
    for weight in served.linears(index).values():
        weight.mul_(factor)
    return Planted(f"layer {index}", factor, _of_layer(served, index, factor))


def _of_layer(served: Served, index: int, factor: float) -> Scenario:
    fault = Fault(kind="weight_scales_scaled", layer=index, factor=factor)
    return Scenario(path=served.path, fault=fault)


def scales_permuted(served: Served, random: Random) -> Planted:
    """Exchanges the scales of some rows of a linear."""
    name, weight = served.linear(random)
    codes, scales = served.codes(name, weight)
    share = _size(random, 1 / len(weight), 1.0)
    rows = _some(random, len(weight), share, 2).to(weight.device)
    whole = scales.expand(len(weight), 1).clone()
    whole[rows] = whole[rows.roll(1)]
    weight.copy_(codes.view(torch.float8_e4m3fn).float() * whole)
    return Planted(name, share)


def scales_exchanged(served: Served, random: Random) -> Planted:
    """Gives two linears of equal shape in two layers each other's scales."""
    name, weight = served.linear(random)
    index = int(name.split(".")[2])
    other = (index + 1 + int(random.integers(served.spec.layers - 1))) % served.spec.layers
    twin = name.replace(f".layers.{index}.", f".layers.{other}.")
    pair = {name: weight, twin: served.linears(other)[twin]}
    read = {key: served.codes(key, x) for key, x in pair.items()}
    for key, x in pair.items():
        codes, foreign = read[key][0], read[twin if key == name else name][1]
        x.copy_(codes.view(torch.float8_e4m3fn).float() * foreign)
    return Planted(f"{name}, layer {other}", float(abs(other - index)))


def rows_zeroed(served: Served, random: Random) -> Planted:
    name, weight = served.linear(random)
    share = _size(random, 1 / len(weight), 0.5)
    weight[_some(random, len(weight), share).to(weight.device)] = 0
    return Planted(name, share)


def columns_zeroed(served: Served, random: Random) -> Planted:
    name, weight = served.linear(random)
    share = _size(random, 1 / weight.shape[1], 0.5)
    weight[:, _some(random, weight.shape[1], share).to(weight.device)] = 0
    return Planted(name, share)


def heads_zeroed(served: Served, random: Random) -> Planted:
    """Zeroes what the output projection reads of some attention heads of one layer."""
    index, layer = served.layer(random)
    weight = layer.self_attn.o_proj.weight
    heads = served.spec.heads
    chosen = _some(random, heads, _size(random, 1 / heads, 0.5))
    for head in chosen.tolist():
        weight[:, head * served.spec.head_dim : (head + 1) * served.spec.head_dim] = 0
    return Planted(f"layer {index}", len(chosen) / heads)


def rows_permuted(served: Served, random: Random) -> Planted:
    name, weight = served.linear(random)
    share = _size(random, 2 / len(weight), 1.0)
    rows = _some(random, len(weight), share, 2).to(weight.device)
    weight[rows] = weight[rows.roll(1)]
    return Planted(name, share)


def pairs_swapped(served: Served, random: Random) -> Planted:
    """Reads each pair of codes of some rows in the wrong order, as swapped nibbles do."""
    name, weight = served.linear(random)
    share = _size(random, 1 / len(weight), 1.0)
    rows = _some(random, len(weight), share).to(weight.device)
    found = weight[rows]
    weight[rows] = found.reshape(len(rows), -1, 2).flip(-1).reshape(found.shape)
    return Planted(name, share)


def bits_flipped(served: Served, random: Random) -> Planted:
    """Flips one bit each of some codes of all linears."""
    share = _size(random, 1e-6, 1e-2)
    for index in range(served.spec.layers):
        for name, weight in served.linears(index).items():
            count = int(random.binomial(weight.numel(), share))
            if not count:
                continue
            codes, scales = served.codes(name, weight)
            places = torch.from_numpy(random.integers(weight.numel(), size=count))
            bits = torch.from_numpy(2 ** random.integers(8, size=count)).to(torch.uint8)
            flat = codes.flatten()
            places, bits = places.to(flat.device), bits.to(flat.device)
            after = flat[places] ^ bits
            flat[places] = torch.where((after & 0x7F) == 0x7F, flat[places], after)  # no NaN
            decoded = flat.view(codes.shape).view(torch.float8_e4m3fn).float()
            weight.copy_(decoded * scales)
    return Planted("all linears", share)


def noise(served: Served, random: Random) -> Planted:
    name, weight = served.linear(random)
    size = _size(random, 0.01, 1.0)
    weight.add_(size * _noise(random, weight))
    return Planted(name, size)


def noise_everywhere(served: Served, random: Random) -> Planted:
    """Moves all linears, as further training does."""
    size = _size(random, 0.002, 0.2)
    for index in range(served.spec.layers):
        for weight in served.linears(index).values():
            weight.add_(size * _noise(random, weight))
    return Planted("all linears", size)


def fewer_bits(served: Served, random: Random) -> Planted:
    """Clears low mantissa bits of the codes of one layer, or of all."""
    index, _ = served.layer(random)
    whole, bits = bool(random.integers(2)), int(random.integers(1, 4))
    for one in range(served.spec.layers) if whole else (index,):
        for name, weight in served.linears(one).items():
            codes, scales = served.codes(name, weight)
            kept = codes & (0xFF << bits & 0xFF)
            weight.copy_(kept.view(torch.float8_e4m3fn).float() * scales)
    return Planted("all linears" if whole else f"layer {index}", bits)


def layers_exchanged(served: Served, random: Random) -> Planted:
    count = served.spec.layers
    first = int(random.integers(count))
    other = (first + 1 + int(random.integers(count - 1))) % count
    layers = list(served.decoder.layers)
    layers[first], layers[other] = layers[other], layers[first]
    served.set(served.decoder, "layers", torch.nn.ModuleList(layers))
    return Planted(f"layers {first} and {other}", float(abs(first - other)))


def norm(served: Served, random: Random) -> Planted:
    index, layer = served.layer(random)
    names = [name for name, _ in layer.named_parameters() if "norm" in name]
    name = str(random.choice(names))
    factor = _factor(random, 0.003, 1.5)
    served.keep(layer.get_parameter(name)).mul_(factor)
    return Planted(f"layer {index}, {name}", factor)


def final_norm(served: Served, random: Random) -> Planted:
    factor = _factor(random, 0.003, 0.7)
    served.keep(served.decoder.norm.weight).mul_(factor)
    return Planted("final norm", factor)


def norm_epsilon(served: Served, random: Random) -> Planted:
    factor = _size(random, 1.05, 100)
    for module in served.decoder.modules():
        if hasattr(module, "variance_epsilon"):
            served.set(module, "variance_epsilon", module.variance_epsilon * factor)
    return Planted("all norms", factor)


def rope_theta(served: Served, random: Random) -> Planted:
    factor = _factor(random, 0.005, 3.0)
    frequencies = served.keep(served.decoder.rotary_emb.inv_freq)
    count = len(frequencies)
    exponents = torch.arange(count, device=frequencies.device) / count
    frequencies.mul_(factor**-exponents)
    return Planted("RoPE", factor)


def rope_stretched(served: Served, random: Random) -> Planted:
    """Divides positions by a factor, as linear scaling does."""
    factor = math.exp(_size(random, 0.001, 1.5))
    served.keep(served.decoder.rotary_emb.inv_freq).div_(factor)
    return Planted("RoPE", factor)


def attention_scale(served: Served, random: Random) -> Planted:
    index, layer = served.layer(random)
    factor = _factor(random, 0.005, 1.5)
    served.set(layer.self_attn, "scaling", layer.self_attn.scaling * factor)
    return Planted(f"layer {index}", factor)


def embedding_permuted(served: Served, random: Random) -> Planted:
    table = served.keep(served.model.get_input_embeddings().weight)
    share = _size(random, 2 / len(table), 0.3)
    rows = _some(random, len(table), share, 2).to(table.device)
    table[rows] = table[rows.roll(1)]
    return Planted("embeddings", share)


def embedding_noise(served: Served, random: Random) -> Planted:
    table = served.keep(served.model.get_input_embeddings().weight)
    size = _size(random, 0.003, 0.5)
    table.add_(size * _noise(random, table))
    return Planted("embeddings", size)


KINDS: dict[str, Callable[[Served, Random], Planted]] = {
    "scale of a linear": scale,
    "scales of a layer": scale_of_layer,
    "scales of a layer, halved or doubled": scale_of_layer_simulated,
    "scales of rows permuted": scales_permuted,
    "scales of two layers exchanged": scales_exchanged,
    "rows zeroed": rows_zeroed,
    "columns zeroed": columns_zeroed,
    "heads zeroed": heads_zeroed,
    "rows permuted": rows_permuted,
    "pairs of codes swapped": pairs_swapped,
    "bits flipped": bits_flipped,
    "noise in a linear": noise,
    "noise in all linears": noise_everywhere,
    "mantissa bits cleared": fewer_bits,
    "layers exchanged": layers_exchanged,
    "a norm scaled": norm,
    "the final norm scaled": final_norm,
    "norm epsilon": norm_epsilon,
    "RoPE theta": rope_theta,
    "positions stretched": rope_stretched,
    "attention scale": attention_scale,
    "embeddings permuted": embedding_permuted,
    "embedding noise": embedding_noise,
}
