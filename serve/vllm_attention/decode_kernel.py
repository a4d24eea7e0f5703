"""A decode kernel of attention over a paged E5M2 cache, in Triton.

E5M2 is the upper byte of FP16, so a shift by eight bits decodes it exactly. Each program attends
one split of a request's tokens for one KV head, with all its queries; a second kernel merges the
splits by their maxima and sums (FlashDecoding, Dao et al. 2023). The scales are applied in FP32:
the keys' to the scores, which a tiny one would underflow in FP16 before, and the values' to the
output. Queries are divided by a power of two, because FP16 ends at 65,504 and BF16 does not.
"""

# Triton compiles these functions from their source; its arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

__all__ = ["Buffers", "attend", "is_supported", "splits_of"]

BLOCK = 64  # tokens that a program reads at a time
_PROGRAMS = 1024  # in all, about: several for each multiprocessor of a large GPU
_MOST_SPLITS = 64  # of a request and KV head
_ROWS = 16  # least rows of tl.dot; the queries of a KV head are padded to it


@triton.jit
def _split_kernel(
    query,  # [B, H, D] BF16 or FP16
    key,  # [pages, page, K, D] uint8, E5M2
    value,
    table,  # [B, pages of a request] int32
    lengths,  # [B] int32
    k_scale,
    part,  # [B, H, splits, D] float32
    maxima,  # [B, H, splits] float32, in units of log2
    sums,
    scale,
    table_stride,
    query_stride,
    page_stride,
    token_stride,
    head_stride,
    value_page_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
):
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request)
    chunk = tl.cdiv(tl.cdiv(length, COUNT), N) * N
    start = split * chunk
    stop = tl.minimum(start + chunk, length)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, SIZE)
    mine = head * GROUP + rows
    valid = rows < GROUP
    out = (request * HEADS + mine) * COUNT + split
    if start >= length:
        tl.store(sums + out, tl.zeros([ROWS], tl.float32), mask=valid)
        tl.store(maxima + out, tl.full([ROWS], float("-inf"), tl.float32), mask=valid)
        return
    at = query + request * query_stride + mine[:, None] * SIZE + dims[None, :]
    q = tl.load(at, mask=valid[:, None], other=0.0).to(tl.float32)
    # The power of two of the largest magnitude of a row; bits of a float32 without its mantissa.
    peak = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000
    peak = tl.maximum(peak.to(tl.float32, bitcast=True), 7.9e-31)  # 2^-100
    q = (q / peak[:, None]).to(tl.float16)
    unit = (peak * (scale * tl.load(k_scale) * 1.4426950408889634))[:, None]  # log2(e)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SIZE], tl.float32)
    for first in range(start, stop, N):
        tokens = first + tl.arange(0, N)
        inside = tokens < stop
        page = tl.load(table + request * table_stride + tokens // PAGE, mask=inside, other=0)
        offset = (tokens % PAGE) * token_stride + head * head_stride
        base = page.to(tl.int64) * page_stride + offset
        k = tl.load(key + base[None, :] + dims[:, None], mask=inside[None, :], other=0)
        k = (k.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
        scores = tl.dot(q, k) * unit
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(weights, 1)
        base = page.to(tl.int64) * value_page_stride + offset
        v = tl.load(value + base[:, None] + dims[None, :], mask=inside[:, None], other=0)
        v = (v.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
        acc = acc * shrink[:, None] + tl.dot(weights.to(tl.float16), v)
        top = new
    tl.store(part + out[:, None] * SIZE + dims[None, :], acc, mask=valid[:, None])
    tl.store(maxima + out, top, mask=valid)
    tl.store(sums + out, total, mask=valid)


@triton.jit
def _merge_kernel(
    part,
    maxima,
    sums,
    v_scale,
    output,  # [B, H, D]
    output_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    splits, dims = tl.arange(0, COUNT), tl.arange(0, SIZE)
    at = (request * HEADS + head) * COUNT + splits
    weight = tl.load(sums + at)
    top = tl.load(maxima + at)
    share = tl.where(weight > 0, tl.exp2(top - tl.max(top, 0)), 0.0)
    total = tl.sum(weight * share, 0)
    found = tl.load(
        part + at[:, None] * SIZE + dims[None, :], mask=(weight > 0)[:, None], other=0.0
    )
    total = tl.where(total > 0, total, 1.0)  # a request of no tokens pads a CUDA graph
    mixed = tl.sum(found * share[:, None], 0) / total * tl.load(v_scale)
    where = output + request * output_stride + head * SIZE + dims
    tl.store(where, mixed.to(output.dtype.element_ty))


def is_supported(head_size: int) -> bool:
    """Returns whether the kernel has the size: powers of two from 32 to 256."""
    return head_size in (32, 64, 128, 256)


def splits_of(batch: int, groups: int) -> int:
    """Returns how many programs share a request and KV head: a power of two."""
    wanted: int = triton.next_power_of_2(max(1, _PROGRAMS // (batch * groups)))
    return min(wanted, _MOST_SPLITS)


class Buffers:
    """Partial results of batches of up to `most`; allocated once, so CUDA graphs can use them.

    `heads` are those of the queries, `groups` those of keys and values, of `size` values each.
    """

    def __init__(
        self, most: int, heads: int, groups: int, size: int, device: torch.device | str
    ) -> None:
        self.most = most
        rows = max(2 * _PROGRAMS, most * groups) * (heads // groups)
        self.part = torch.empty(rows, size, dtype=torch.float32, device=device)
        self.maxima = torch.empty(rows, dtype=torch.float32, device=device)
        self.sums = torch.empty(rows, dtype=torch.float32, device=device)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    buffers: Buffers,
    splits: int | None = None,
) -> None:
    """Attends one query token [B, H, D] of each request to its cached tokens; fills `output`.

    `key` and `value` are uint8 [pages, page, K, D] of E5M2 codes, `table` the pages of each request
    and `lengths` its tokens, the new one included; scales are tensors with one element.
    """
    batch, heads, size = query.shape
    _, page, groups, _ = key.shape
    splits = splits or splits_of(batch, groups)
    _split_kernel[(batch, groups, splits)](
        query,
        key,
        value,
        table,
        lengths,
        k_scale,
        buffers.part,
        buffers.maxima,
        buffers.sums,
        scale,
        table.stride(0),
        query.stride(0),
        key.stride(0),
        key.stride(1),
        key.stride(2),
        value.stride(0),
        GROUP=heads // groups,
        HEADS=heads,
        PAGE=page,
        SIZE=size,
        N=BLOCK,
        ROWS=max(_ROWS, triton.next_power_of_2(heads // groups)),
        COUNT=splits,
        num_warps=4,
        num_stages=3,
    )
    _merge_kernel[(batch, heads)](
        buffers.part,
        buffers.maxima,
        buffers.sums,
        v_scale,
        output,
        output.stride(0),
        HEADS=heads,
        SIZE=size,
        COUNT=splits,
        num_warps=4,
    )
