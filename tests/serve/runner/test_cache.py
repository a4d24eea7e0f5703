"""The slot cache: what is written is what is read, and nothing else ever is."""

import numpy as np
import pytest

from octet.errors import ConfigError
from octet.model.spec import ModelSpec
from octet.numerics.formats import E5M2, decode
from serve.runner.protocol import SlotCache, window
from tests.fakes import fake_spec


@pytest.fixture
def spec() -> ModelSpec:
    return fake_spec(context=200).model_copy(update={"layers": 3, "kv_heads": 2, "head_dim": 8})


def some_rows(spec: ModelSpec, batch: int, count: int, seed: int = 0) -> np.ndarray:
    """E5M2 codes [2·layers, B, Hkv, T, D] without NaN or Inf."""
    shape = (2 * spec.layers, batch, spec.kv_heads, count, spec.head_dim)
    codes = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    codes[(codes & 0x7F) > 0x7B] = 0x3C
    return codes


def read(cache: SlotCache, spec: ModelSpec, slots: list[int], live: int) -> np.ndarray:
    shape = (2 * spec.layers, len(slots), spec.kv_heads, live, spec.head_dim)
    out = np.full(shape, np.nan, np.float16)
    cache.read(slots, out)
    return out


def test_windows_are_multiples_of_64() -> None:
    assert [window(n) for n in (0, 1, 63, 64, 65, 128)] == [0, 64, 64, 64, 128, 128]


def test_rows_come_back_as_the_exact_values_of_their_codes(spec: ModelSpec) -> None:
    cache = SlotCache(spec, 4, 200, "e5m2")
    first, second = cache.acquire(), cache.acquire()
    assert first is not None and second is not None
    prompt = some_rows(spec, 1, 70)
    cache.append([first], prompt)
    step = some_rows(spec, 2, 1, seed=1)
    cache.append([first, second], step)
    out = read(cache, spec, [second, first], 128)
    np.testing.assert_array_equal(out[:, 1, :, :70], decode(prompt[:, 0], E5M2))
    np.testing.assert_array_equal(out[:, 1, :, 70], decode(step[:, 0, :, 0], E5M2))
    np.testing.assert_array_equal(out[:, 0, :, 0], decode(step[:, 1, :, 0], E5M2))
    assert not out[:, 1, :, 71:].any() and not out[:, 0, :, 1:].any()
    assert cache.lengths[[first, second]].tolist() == [71, 1]


def test_every_e5m2_code_is_decoded_exactly(spec: ModelSpec) -> None:
    cache = SlotCache(spec, 1, 200, "e5m2")
    codes = np.resize(np.arange(256, dtype=np.uint8), (2 * spec.layers, 1, 2, 16, 8))
    cache.append([cache.acquire() or 0], codes)
    out = read(cache, spec, [0], 64)[:, :, :, :16]
    np.testing.assert_array_equal(out, decode(codes, E5M2))


def test_float16_rows_are_kept_bit_for_bit(spec: ModelSpec) -> None:
    cache = SlotCache(spec, 2, 100, "float16")
    values = np.random.default_rng(0).standard_normal((6, 1, 2, 5, 8)).astype(np.float16)
    cache.append([1], values.view(np.uint16))
    np.testing.assert_array_equal(read(cache, spec, [1], 64)[:, :, :, :5], values)
    assert cache.size_bytes == 2 * SlotCache(spec, 2, 100, "e5m2").size_bytes


def test_a_freed_slot_leaves_nothing_behind_even_nan(spec: ModelSpec) -> None:
    cache = SlotCache(spec, 1, 100, "e5m2")
    slot = cache.acquire()
    assert slot == 0 and cache.acquire() is None
    cache.append([slot], np.full((6, 1, 2, 90, 8), 0x7F, np.uint8))  # NaN
    cache.release(slot)
    assert cache.free_slots == 1 and not cache.codes.any()
    assert cache.acquire() == 0 and cache.lengths[0] == 0


@pytest.mark.parametrize(("slots", "positions"), [(0, 10), (1, 0), (1, 201)])
def test_sizes_that_cannot_be_are_refused(spec: ModelSpec, slots: int, positions: int) -> None:
    with pytest.raises(ConfigError, match=r"at least 1|1 to 200"):
        SlotCache(spec, slots, positions, "e5m2")
