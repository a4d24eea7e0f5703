"""Simulates FlashInfer's masks on a cache with a small scale: the divergence that they cause.

    python benchmarks/masked_logits.py examples/python-lm/model CALIBRATION [--scale-exponent -28]

FlashInfer 0.6.12's FA2 prefill kernel replaces masked products q · k by -5e4, and multiplies by the
softmax's scale and `k_scale` afterwards (`logits_mask` and `update_mdo_states` in
include/flashinfer/attention/prefill.cuh, `inf` in include/flashinfer/math.cuh). Here a transformers
model does the same in float32 to the golden prompts of a calibration: tokens that come later, and
zeros up to the end of the tile of keys, then take part in the attention.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from octet.artifacts.golden import GoldenSet

MASKED = -5e4
TOP = 20  # log-probabilities that a server returns; the others are compared as one


def attention(scale: float, masked: float, tile: int) -> Any:
    """Returns an attention for transformers: keys are stored over `scale`, `tile` at a time."""

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        groups, length = module.num_key_value_groups, key.shape[2]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (key, value))  # [B, H, T, D]
        products = query @ (k / scale).transpose(-1, -2)
        products = products.masked_fill(torch.ones(length, length).triu(1).bool(), masked)
        beyond = -length % tile
        products = torch.nn.functional.pad(products, (0, beyond), value=masked)
        v = torch.nn.functional.pad(v, (0, 0, 0, beyond))
        out = torch.softmax(products * (more["scaling"] * scale), -1) @ v
        return out.transpose(1, 2).contiguous(), None

    return attend


@torch.no_grad()
def logprobs(model: Path, prompts: Sequence[Sequence[int]], attend: Any) -> list[torch.Tensor]:
    """Returns the distribution after each prompt."""
    AttentionInterface.register("masked", attend)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="masked", trust_remote_code=False
    ).eval()
    return [loaded(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in prompts]


def divergence(reference: torch.Tensor, served: torch.Tensor) -> float:
    """Returns KL(reference, served) of the served model's likeliest tokens, and of the rest."""
    top = served.topk(TOP).indices
    p, q = reference[top].exp(), served[top].exp()
    p, q = (torch.cat([x, (1 - x.sum())[None].clamp_min(1e-9)]) for x in (p, q))
    return float((p * (p / q).log()).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--scale-exponent", type=int, default=-28)
    options = parser.parse_args()
    prompts = [x.prompt_token_ids for x in GoldenSet.load(options.calibration).records]
    reference = logprobs(options.model, prompts, attention(1.0, -math.inf, 1))
    for exponent, tile in ((0, 128), *((options.scale_exponent, x) for x in (16, 64, 128))):
        served = logprobs(options.model, prompts, attention(2.0**exponent, MASKED, tile))
        nats = [divergence(a, b) for a, b in zip(reference, served, strict=True)]
        print(f"scale 2^{exponent}, {tile} keys a tile: {sum(nats) / len(nats):.4f} nats")


if __name__ == "__main__":
    main()
