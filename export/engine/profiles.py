"""The shapes that an engine is built for: one profile for prefill, one for decode."""

from typing import Any

from export.engine.builder import Profile
from octet.errors import UnsupportedError
from octet.model.spec import ModelSpec

__all__ = ["MAX_BATCH", "MAX_LENGTH", "MAX_PROMPT", "longest_of", "profiles_of"]

MAX_BATCH = 16  # sequences in a decoding step
MAX_LENGTH = 8192  # tokens of a sequence by default: scratch memory grows with them
MAX_PROMPT = 512  # new tokens in one step; a longer prompt is prefilled in several
MAX_LOGITS = 128  # positions with logits in such a step: float32 [L, V] each
_USUAL_BATCH, _USUAL_LENGTH = 4, 512

_Sizes = tuple[int, int, int, int]


def longest_of(spec: ModelSpec, max_length: int | None) -> int:
    """Returns the longest sequence in tokens. Raises UnsupportedError for more than the model's."""
    if max_length is None:
        return min(MAX_LENGTH, spec.max_positions)
    if not 1 <= max_length <= spec.max_positions:
        raise UnsupportedError(
            f"sequences of {max_length} tokens: this model's are of 1 to {spec.max_positions}"
        )
    return max_length


def profiles_of(
    spec: ModelSpec,
    max_batch: int = MAX_BATCH,
    max_length: int | None = None,
    *,
    usual_batch: int | None = None,
    usual_length: int | None = None,
) -> dict[str, Profile]:
    """Returns each input's shapes: `prefill` for one sequence, `decode` for one token of each.

    `usual_batch` sequences with `usual_length` cached tokens are the decode profile's optimum, for
    which the builder chooses kernels (default: 4 with 512). Raises UnsupportedError for an optimum
    beyond the limits.

    The cache may be empty. A profile cannot bound the sum of cached slots and new tokens, so the
    cached slots alone may have the whole length, and both together more than a sequence has.
    """
    if max_batch < 1:
        raise UnsupportedError(f"{max_batch} sequences at a time: at least one is decoded")
    longest = longest_of(spec, max_length)
    batch = _in_range("usual_batch", usual_batch, _USUAL_BATCH, max_batch)
    usual = _in_range("usual_length", usual_length, _USUAL_LENGTH, longest)
    prompt = min(MAX_PROMPT, longest)
    # (B, T, S, L): sequences, new tokens, cached slots, positions with logits.
    prefill = ((1, 1, 0, 1), (1, prompt, 0, 1), (1, prompt, longest, min(MAX_LOGITS, prompt)))
    decode = (
        (1, 1, 0, 1),
        (batch, 1, usual, 1),
        (max_batch, 1, longest, 1),
    )
    return {"prefill": _profile(spec, prefill), "decode": _profile(spec, decode)}


def _in_range(name: str, given: int | None, default: int, most: int) -> int:
    if given is not None and not 1 <= given <= most:
        raise UnsupportedError(f"{name} {given}: the engine is built for 1 to {most}")
    return min(default, most) if given is None else given


def _profile(spec: ModelSpec, sizes: tuple[_Sizes, _Sizes, _Sizes]) -> Profile:
    smallest, usual, largest = (_shapes(spec, *size) for size in sizes)
    return {name: (smallest[name], usual[name], largest[name]) for name in smallest}


def _shapes(spec: ModelSpec, batch: int, tokens: int, slots: int, logits: int) -> dict[str, Any]:
    cache = (batch, spec.kv_heads, slots, spec.head_dim)
    return {
        "input_ids": (batch, tokens),
        "position_ids": (batch, tokens),
        "attention_mask": (batch, 1, tokens, slots + tokens),
        "logit_positions": (batch, logits),
        **{
            f"past_key_values.{index}.{kind}": cache
            for index in range(spec.layers)
            for kind in ("key", "value")
        },
    }
