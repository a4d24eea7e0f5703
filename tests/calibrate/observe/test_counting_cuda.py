"""The kernel equals numpy's bincount, bin for bin; what surrounds it is tested without a GPU."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest
import torch

import calibrate.observe.cuda_kernels as cuda_kernels
import calibrate.observe.cuda_layout as cuda_layout
from calibrate.observe.counting_cuda import CudaCounter
from calibrate.observe.cuda_layout import batched, layout_of, pieces
from octet.artifacts.calibration import BINS
from octet.errors import UnsupportedError
from tests.calibrate.contents import contents, count_reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [1, 7, 8, 9, 1023, 8192, 65_537, 1_000_003]

Test = TypeVar("Test", bound=Callable[..., object])
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU; there:"
        " pytest -m gpu tests/calibrate/observe/test_counting_cuda.py",
    ),
]


def on_gpu(function: Test) -> Test:
    for mark in gpu:
        function = mark(function)
    return function


def arrangements(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, list[int] | None]]:
    """Tensors as models and tests lay them out: name, x, lengths."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    full, ragged = [40, 40, 40], [40, 0, 17]
    for name, lengths in (("full", full), ("ragged", ragged), ("none", None)):
        yield f"input {name}", normal(3, 40, 96), lengths
        yield f"values {name}", normal(3, 40, 4, 16), lengths
        yield f"keys {name}", normal(3, 4, 40, 16).transpose(1, 2), lengths
        yield f"odd rows {name}", normal(3, 40, 3, 5), lengths
        yield f"odd heads {name}", normal(3, 3, 40, 5).transpose(1, 2), lengths
        yield f"columns of a wider matrix {name}", normal(3, 40, 96)[..., 32:64], lengths
        yield f"unaligned columns {name}", normal(3, 40, 96)[..., 3:50], lengths
        yield f"every second {name}", normal(3, 40, 96)[..., ::2], lengths
        yield f"later rows of each {name}", normal(3, 60, 32)[:, 20:], lengths
        yield f"time first {name}", normal(40, 3, 32).transpose(0, 1), lengths
        yield f"expanded {name}", normal(3, 1, 32).expand(3, 40, 32), lengths
        yield f"three axes turned {name}", normal(3, 4, 40, 2, 8).permute(0, 2, 3, 1, 4), lengths
    for offset in range(9):
        yield f"odd start {offset}", normal(1010)[offset : 1000 - offset], None
        yield (
            f"odd start of rows {offset}",
            normal(4021)[offset:][:4000].view(4, 20, 50),
            [20, 3, 0, 7],
        )
    yield "one element", normal(1, 1, 1), [1]
    yield "no axes", normal(1)[0], None
    yield "nothing", normal(3, 0, 5), [0, 0, 0]
    yield "nothing at all", normal(0), None
    yield "all lengths zero", normal(2, 3, 8), [0, 0]
    yield "one step of each", normal(5, 1, 4, 8), [1, 1, 0, 1, 1]
    yield "more samples than one launch", normal(700, 3, 8), [i % 4 for i in range(700)]
    yield (
        "more heads than one launch",
        normal(300, 2, 3, 8).transpose(1, 2),
        [i % 4 for i in range(300)],
    )
    yield "long", normal(2, 500, 1024), [500, 499]


def real(x: torch.Tensor, lengths: list[int] | None) -> torch.Tensor:
    """What of x must be counted, flat."""
    if lengths is None:
        return x.flatten()
    parts = [row[:length].flatten() for row, length in zip(x, lengths, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("longest", [1 << 31, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_cover_each_element_once(
    dtype: torch.dtype, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The addresses that a launch would read, followed here with as_strided."""
    monkeypatch.setattr(cuda_layout, "_LONGEST", longest)
    width = 16 // dtype.itemsize
    for name, x, lengths in arrangements(dtype):
        found = []
        for piece, rows in pieces(*batched(x, lengths)):
            layout = layout_of(piece, rows) or layout_of(piece.contiguous(), rows)
            assert layout is not None, name
            assert sum(rows) * piece[0, 0].numel() <= max(longest, piece[0, 0].numel()), name
            assert len(layout.lengths) <= 256, name
            for b, length in enumerate(layout.lengths):
                runs, run = layout.runs, length * layout.unit
                if layout.rows_outer:
                    runs, run = length, layout.unit
                offset = layout.x.storage_offset() + b * layout.batch_stride
                part = layout.x.as_strided((runs, run), (layout.run_stride, 1), offset)
                found.append(part.flatten())
                if layout.rows_outer or runs > 1:
                    assert part.data_ptr() % 16 == 0, name
                    assert run % width == 0 and layout.run_stride % width == 0, name
        counts = count_reference(torch.cat([*found, x.new_empty(0)]))
        assert (counts == count_reference(real(x, lengths))).all(), name


def test_reads_what_models_lay_out_without_a_copy() -> None:
    x = torch.zeros(2, 64, 8, 128, dtype=torch.bfloat16)
    for view in (x, x.flatten(2), x.view(2, 8, 64, 128).transpose(1, 2), x[:, :, 2:4], x[:, 3:]):
        for lengths in ([view.shape[1]] * 2, [view.shape[1], 5]):
            assert layout_of(view, lengths) is not None


def test_refuses_a_device_without_cuda() -> None:
    with pytest.raises(UnsupportedError, match="device cpu has no CUDA"):
        CudaCounter(1, torch.device("cpu"))


def test_says_what_does_not_fit_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 25.00 MiB.")

    monkeypatch.setattr("calibrate.observe.counting_cuda.kernels_of", lambda index: None)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.zeros", full)
    with pytest.raises(UnsupportedError) as error:
        CudaCounter(10_000, torch.device("cuda", 0))
    assert str(error.value) == (
        "cuda:0 has no memory for 10000 histograms (2.6 GB): free some there, or calibrate with"
        " --device cpu"
    )


def count(x: torch.Tensor, lengths: list[int] | None) -> np.ndarray:
    counter = CudaCounter(3, torch.device("cuda"))
    counter.add(1, x, lengths)
    before, counts, after = counter.counts()
    assert not before.any() and not after.any()
    first_special = 0x7C00 if x.dtype == torch.float16 else 0x7F80
    assert counter.bad()() == ([1] if counts[first_special:].any() else [])
    counter.close()
    return counts


@pytest.fixture(params=[1, 2, 4], ids=lambda parts: f"{128 // parts} KB a block")
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Each way of splitting the counters, whatever this GPU would take."""
    cuda_kernels.kernels_of.cache_clear()
    monkeypatch.setattr(cuda_kernels, "parts_for", lambda *_: request.param)
    yield request.param
    cuda_kernels.kernels_of.cache_clear()


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference_bin_for_bin(dtype: torch.dtype, parts: int) -> None:
    for size in SIZES:
        for name, x in contents(size, dtype).items():
            assert (count(x.cuda(), None) == count_reference(x)).all(), (name, size)


@on_gpu
def test_rounds_float32_to_nearest_even_at_every_middle(parts: int) -> None:
    codes = torch.arange(0x7F80, dtype=torch.int32) << 16
    offsets = torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    middles = (codes[:, None] + offsets).view(torch.float32).flatten()
    expected = torch.bincount(middles.bfloat16().view(torch.int16).long(), minlength=BINS)
    assert (count(middles.cuda(), None) == expected.numpy()).all()


def moved(x: torch.Tensor) -> torch.Tensor:
    """`x` on the GPU with its strides, and with its offset from a multiple of 512 bytes."""
    storage = x.new_empty(0).set_(
        x.untyped_storage(), 0, (x.untyped_storage().nbytes() // x.dtype.itemsize,)
    )
    return storage.cuda().as_strided(x.shape, x.stride(), x.storage_offset())


@on_gpu
@pytest.mark.parametrize("longest", [1 << 31, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_every_arrangement(
    dtype: torch.dtype, longest: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_layout, "_LONGEST", longest)
    for name, x, lengths in arrangements(dtype):
        if not x.numel():
            assert not count(x.cuda(), lengths).any(), name
            continue
        assert (count(moved(x), lengths) == count_reference(real(x, lengths))).all(), name


@on_gpu
def test_never_reads_padding() -> None:
    x = torch.randn(4, 70, 64, dtype=torch.bfloat16)
    lengths = [70, 0, 3, 1]
    for row, length in enumerate(lengths):
        x[row, length:] = float("nan")  # would be seen if it were read
    assert (count(x.cuda(), lengths) == count_reference(real(x, lengths))).all()


@on_gpu
def test_adds_to_what_is_there_until_cleared() -> None:
    counter = CudaCounter(2, torch.device("cuda"))
    x = torch.randn(1, 300, 1000, device="cuda")
    for _ in range(20):
        counter.add(0, x, [300])
    assert (counter.counts()[0] == 20 * count_reference(x.cpu())).all()
    counter.add(1, torch.full((1, 1, 1), float("nan"), device="cuda"), [1])
    assert counter.bad()() == [1]
    counter.clear()
    assert counter.bad()() == []
    assert not counter.counts().any()


@on_gpu
def test_follows_the_current_stream() -> None:
    counter = CudaCounter(1, torch.device("cuda"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(1 << 26, dtype=torch.bfloat16, device="cuda")
        for _ in range(20):
            x += 1  # were it counted too early, another number would be
        counter.add(0, x)
    stream.synchronize()
    counts = counter.counts()[0]
    assert np.flatnonzero(counts).tolist() == [int(torch.tensor(20.0).bfloat16().view(torch.int16))]


@on_gpu
def test_counts_on_every_gpu() -> None:
    x = torch.randn(1 << 20).bfloat16()
    for index in reversed(range(torch.cuda.device_count())):
        counter = CudaCounter(1, torch.device("cuda", index))
        counter.add(0, x.to(f"cuda:{index}"))
        assert (counter.counts()[0] == count_reference(x)).all()
        with pytest.raises(TypeError, match="on cpu with a counter on cuda"):
            counter.add(0, x)


@on_gpu
def test_counts_more_elements_than_32_bits_hold() -> None:
    x = torch.zeros((1 << 32) + 12_345, dtype=torch.bfloat16, device="cuda")  # 8.6 GB
    x[-1] = 1.0
    counts = count(x, None)
    assert counts[0] == (1 << 32) + 12_344
    assert counts.sum() == (1 << 32) + 12_345


@on_gpu
def test_reads_tensors_whose_memory_the_model_wants_again() -> None:
    counter = CudaCounter(1, torch.device("cuda"))
    size, layers = 1 << 24, 60
    with counter.beside():
        for layer in range(layers):
            x = torch.full((size,), float(layer % 8), dtype=torch.bfloat16, device="cuda")
            counter.add(0, x)
            del x  # the next layer's tensor would lie where this one is still being read
    counts = counter.counts()[0]
    expected = np.zeros(BINS, np.int64)
    for layer in range(layers):
        expected[torch.tensor(float(layer % 8)).bfloat16().view(torch.int16).item()] += size
    assert (counts == expected).all()
