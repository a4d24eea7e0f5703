"""The decode kernel against attention in float32 over the decoded cache."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU; there: pytest -m gpu tests/serve/vllm_attention",
    ),
]

SIZE, PAGE = 64, 16


def cached(pages: int, groups: int, generator: torch.Generator) -> torch.Tensor:
    """Makes a cache of random finite E5M2 codes, uint8 [pages, 2, PAGE, groups, SIZE]."""
    values = torch.randn(pages, 2, PAGE, groups, SIZE, generator=generator, device="cuda")
    return values.to(torch.float8_e5m2).view(torch.uint8)


@pytest.mark.parametrize("heads, groups", [(8, 2), (4, 4), (16, 1)])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.75, 1.5), (2.0**-28, 3.0)])
@pytest.mark.parametrize("splits", [None, 1, 8])
def test_that_decoding_agrees_with_float32(
    heads: int, groups: int, scales: tuple[float, float], splits: int | None
) -> None:
    from serve.vllm_attention.decode_kernel import Buffers, attend

    generator = torch.Generator("cuda").manual_seed(0)
    lengths = torch.tensor([1, 16, 300, 0, 65], dtype=torch.int32, device="cuda")
    batch, pages = len(lengths), 20
    cache = cached(batch * pages, groups, generator)
    table = torch.randperm(batch * pages, generator=generator, device="cuda").int()
    table = table.reshape(batch, pages)
    query = torch.randn(batch, heads, SIZE, generator=generator, device="cuda")
    query = (query / scales[0]).bfloat16()  # 2^28 is beyond FP16
    k_scale, v_scale = (torch.tensor(x, device="cuda") for x in scales)
    found = torch.full_like(query, torch.nan)
    buffers = Buffers(batch, heads, groups, SIZE, "cuda")
    keys, values = cache.unbind(1)
    attend(query, keys, values, table, lengths, k_scale, v_scale, 0.125, found, buffers, splits)
    for row, length in enumerate(lengths.tolist()):
        stored = cache[table[row].long()].view(torch.float8_e5m2).float()
        key, value = (
            stored[:, side].reshape(-1, groups, SIZE)[:length].repeat_interleave(heads // groups, 1)
            for side in (0, 1)
        )
        scores = torch.einsum("hd,thd->ht", query[row].float(), key * k_scale) * 0.125
        wanted = torch.einsum("ht,thd->hd", scores.softmax(-1), value * v_scale)
        error = (found[row].float() - wanted).norm()
        assert error <= 4e-3 * wanted.norm()  # BF16 has 8 bits
        assert torch.isfinite(found[row]).all()
