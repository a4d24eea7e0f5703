"""The ONNX runner counts what calibration counts, and computes the same with and without."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calibrate.observe.counting_cpu import CpuCounter
from octet.artifacts.calibration import StoredHistograms
from octet.artifacts.live import Counting
from octet.numerics.counting import count_codes
from octet.storage.tensors import TensorFile
from serve.runner.onnx import OnnxRunner
from tests.serve.runner.steps import forward, prompt_of


def test_numpy_counts_what_calibration_counts() -> None:
    values = torch.randn(3, 50, 8) * 100
    for dtype in (torch.float32, torch.float16):
        x = values.to(dtype)
        counter = CpuCounter(1, 1)
        counter.add(0, x)
        np.testing.assert_array_equal(count_codes(x.numpy()), counter.counts()[0])
        counter.close()


@pytest.mark.parametrize("recipe", ["fp8", "fp8-static", "nvfp4"])
def test_counting_sees_every_tensor_and_changes_no_logit(
    exports: dict[str, Path], tmp_path: Path, recipe: str
) -> None:
    plain = OnnxRunner(exports[recipe], threads=2)
    counting = OnnxRunner(exports[recipe], threads=2, count=Counting(tmp_path, 2, 1 << 20))
    logits = []
    for runner in (plain, counting):
        cache = runner.new_cache(1, 512)
        found = [forward(runner, cache, prompt_of(40), [0], [[39]]).copy()]
        for token in range(12):
            found.append(forward(runner, cache, np.array([[token]]), [0], [[0]]).copy())
        logits.append(found)
    np.testing.assert_array_equal(*map(np.concatenate, logits))
    live = counting.live
    assert live is not None and live.flush()
    live.close()
    (path,) = tmp_path.iterdir()
    stored = StoredHistograms(TensorFile.open(path), summed=True)
    assert 0 < live.counted_tokens < 52
    spec = plain.spec
    expected = {linear.input: linear.in_features for linear in spec.linears()}
    for index in range(spec.layers):
        for kind in ("key", "value"):
            expected[f"{spec.layer(index)}.self_attn.{kind}"] = spec.kv_heads * spec.head_dim
    assert {name: counts.sum() / live.counted_tokens for name, counts in stored.items()} == expected
