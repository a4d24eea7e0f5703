"""The speed that a GPU's memory bandwidth and arithmetic permit: an upper bound, not a forecast.

A step takes the longer of two times: to read the weights and the cache once, and to compute the
matmuls. Prompts are prefilled one after the other, then all requests decode together:

    tokens/s = requests * output / (requests * prefill + output * step)

Communication between GPUs, launches, sampling and the host take no time here. A GPU's figures are
those of its data sheet.
"""

from dataclasses import dataclass

from octet.hardware.devices import Device
from octet.plan.sizes import Sizes
from octet.recipe import KvCacheDtype

__all__ = ["Load", "Roofline"]


@dataclass(frozen=True)
class Load:
    """`requests` at a time, of `prompt` tokens in and `output` tokens out each."""

    requests: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt}x{self.output}"


@dataclass(frozen=True)
class Roofline:
    """A model on `degree` GPUs; with `native`, quantized linears multiply in their own format."""

    sizes: Sizes
    kv_cache: KvCacheDtype
    device: Device
    degree: int
    native: bool

    def tokens_per_s(self, load: Load) -> float | None:
        """Returns the output tokens per second of all requests; None without the GPU's figures."""
        if self.device.bandwidth is None or self.device.flops_16bit is None:
            return None
        middle = load.prompt + load.output / 2
        prefill = self._seconds(1, load.prompt, load.prompt / 2, self.device.bandwidth)
        step = self._seconds(load.requests, 1, middle, self.device.bandwidth)
        seconds = load.requests * prefill + load.output * step
        return load.requests * load.output / seconds

    def _seconds(self, requests: int, tokens: int, seen: float, bandwidth: float) -> float:
        """Returns the seconds of a forward pass over `tokens` tokens of each request.

        Each token attends to `seen` tokens on average.
        """
        sizes, spec = self.sizes, self.sizes.spec
        cached = requests * (seen if tokens == 1 else tokens)
        token_bytes = sizes.cache_bytes(self.kv_cache, self.degree)
        nbytes = sizes.read_bytes(self.degree, requests * tokens) + cached * token_bytes
        head = spec.vocab_size * spec.hidden_size
        plain: float = tokens * (sizes.products(quantized=False) - head) + head
        plain += tokens * seen * 2 * spec.layers * spec.heads * spec.head_dim
        quantized = tokens * sizes.products(quantized=True)
        work = plain / self._flops(None) + quantized / self._flops(self._format)
        return max(nbytes / bandwidth, 2 * requests * work / self.degree)

    @property
    def _format(self) -> str | None:
        recipe = self.sizes.recipe
        return recipe.weights.format if recipe is not None and self.native else None

    def _flops(self, format: str | None) -> float:
        """Returns the GPU's FLOP/s with weights in `format`; in 16 bits if it lacks that format."""
        device = self.device
        rates = {"e4m3": device.flops_fp8, "e2m1": device.flops_fp4 or device.flops_fp8}
        return rates.get(format or "") or device.flops_16bit or 0.0
