"""The kernel that counts live activations on a GPU, beside a count on the CPU."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: pytest -m gpu"),
]
MOST = 128


def counted(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Counts the rows that a step of `tokens` tokens has, evenly spaced, at most MOST of them."""
    rows = x[: tokens : max(1, -(-tokens // MOST))].reshape(-1).cpu()
    return torch.bincount((rows.view(torch.int16) & 0x7FFF).long(), minlength=1 << 15)


@pytest.mark.parametrize("tokens", [0, 1, 64, 129, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_counted_as_on_the_cpu(tokens: int, dtype: torch.dtype) -> None:
    from serve.vllm_counting.count_rows import count_rows, in_order

    qkv = torch.randn(300, 3, 4, 96, device="cuda").to(dtype)
    qkv[0, 0, 0, :3] = torch.tensor([0.0, -0.0, torch.inf])
    counts = torch.zeros(1 << 15, dtype=torch.int64, device="cuda")
    limit = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    for x in (qkv, qkv[:, 1]):  # all of it, and the keys, whose rows are apart
        counts.zero_()
        count_rows(x, counts, limit, MOST)
        assert torch.equal(in_order(counts).cpu(), counted(x, tokens))


def test_a_graph_counts_what_each_step_has() -> None:
    from serve.vllm_counting.count_rows import count_rows, in_order

    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    counts = torch.zeros(1 << 15, dtype=torch.int64, device="cuda")
    limit = torch.zeros(1, dtype=torch.int32, device="cuda")
    count_rows(x, counts, limit, MOST)  # compiles it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count_rows(x, counts, limit, MOST)
    expected = torch.zeros(1 << 15, dtype=torch.int64)
    for tokens in (3, 250, 0):
        x.normal_()
        limit.fill_(tokens)
        graph.replay()
        expected += counted(x, tokens)
    assert torch.equal(in_order(counts).cpu(), expected)
