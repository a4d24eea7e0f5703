"""Bit patterns against torch, onnx and the definition."""

import numpy as np
import onnx
import pytest
import torch

from octet.numerics.bits import (
    bf16_to_float32,
    e5m2_to_float16,
    float32_to_bf16,
    pack_e2m1,
    unpack_e2m1,
)
from octet.numerics.formats import E2M1, E5M2, decode
from tests.generators import mismatches


def test_e5m2_to_float16_is_exact_for_every_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    ours = e5m2_to_float16(codes)
    expected = torch.from_numpy(codes).view(torch.float8_e5m2).to(torch.float16).numpy()
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(ours.astype(np.float32), decode(codes, E5M2))


def test_e5m2_to_float16_writes_into_a_slice() -> None:
    codes = np.arange(240, dtype=np.uint8).reshape(2, 5, 24)
    cache = np.full((2, 9, 30), -1, np.float16)
    window = cache[:, 2:7, :24]
    assert e5m2_to_float16(codes, window) is window
    np.testing.assert_array_equal(cache[:, 2:7, :24], e5m2_to_float16(codes))
    assert (
        (cache[:, 7:] == -1).all() and (cache[:, :2] == -1).all() and (cache[..., 24:] == -1).all()
    )


def test_e2m1_is_packed_low_nibble_first_as_in_onnx() -> None:
    codes = np.arange(16, dtype=np.uint8).reshape(2, 8)
    packed = pack_e2m1(codes)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]]
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT4E2M1, dims=codes.shape)
    tensor.raw_data = packed.tobytes()
    onnx_values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
    np.testing.assert_array_equal(decode(codes, E2M1), onnx_values)


def test_unpack_is_the_inverse_of_pack() -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(4, 64)
    codes = unpack_e2m1(packed)
    assert codes.shape == (4, 128) and codes.max() == 15
    np.testing.assert_array_equal(pack_e2m1(codes), packed)


def test_an_odd_number_of_e2m1_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="3 E2M1 codes"):
        pack_e2m1(np.zeros((2, 3), np.uint8))


def test_bf16_to_float32_is_exact_for_every_pattern() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(bf16_to_float32(bits), expected)
    quiet = np.isfinite(expected)
    np.testing.assert_array_equal(float32_to_bf16(expected)[quiet], bits[quiet])


def test_float32_to_bf16_rounds_to_nearest_even_as_torch() -> None:
    low = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | low).reshape(-1)
    x = bits.view(np.float32)
    theirs = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    ours = float32_to_bf16(x)
    number = ~np.isnan(x)
    assert mismatches(x[number], ours[number], theirs[number]) == []
    assert np.isnan(bf16_to_float32(ours[~number])).all()
    assert (ours[~number] & 0x0040).all()  # quiet
    np.testing.assert_array_equal(ours[~number] >> 15, bits[~number] >> 31)
    assert float32_to_bf16(x.reshape(6, -1).T).shape == (1 << 16, 6)
