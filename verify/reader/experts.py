"""Presents the experts that gpt-oss stacks in one tensor as modules of their own.

`<experts>.<projection>_blocks` U8 [E, N, K/32, 16] becomes `<experts>.<e>.<projection>.blocks` U8
[N, K/2] of each expert e, and `_scales` [E, N, K/32], `_bias` [E, N] and unquantized weights
[E, K, N] in the same way; of the last, `.weight` is [N, K]. Blocks of a row follow one another, and
their bytes too: two codes each, the even column in the low bits. Source:
`convert_moe_packed_tensors` in transformers' integrations/mxfp4.py.
"""

import re

from octet.storage.stacked import Part, StackedFile
from octet.storage.tensors import TensorFile

__all__ = ["one_by_one"]

_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


def one_by_one(file: TensorFile) -> TensorFile:
    """Returns `file` with its stacked experts one by one; tensors of other shapes stay as is."""
    parts: dict[str, Part] = {}
    for name in file.names:
        match = _STACKED.fullmatch(name)
        if match is None:
            continue
        module, projection, kind = match.groups()
        experts, *shape = file.shape(name)
        if 1 + len(shape) != _DIMENSIONS[kind]:
            continue
        if kind == "_blocks":
            shape[1:] = [shape[1] * shape[2]]
        own = tuple(shape if kind else shape[::-1])
        leaf = kind.removeprefix("_") or "weight"
        for expert in range(experts):
            found = f"{module}.{expert}.{projection}.{leaf}"
            parts[found] = Part(name, expert, own, transposed=not kind)
    return StackedFile(file, parts) if parts else file
