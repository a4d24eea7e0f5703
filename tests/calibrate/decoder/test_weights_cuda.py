"""Tests that results do not depend on where a GPU's layers come from, memory or files."""

from typing import Any

import pytest
import torch

from calibrate.decoder.layers import LayeredModel
from calibrate.decoder.loading import ComputeDtype, Stored
from calibrate.decoder.weights import LayerWeights
from calibrate.golden import golden_set
from octet.errors import ConfigError
from octet.model.checkpoint import Checkpoint
from tests.models import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU; there:"
        " pytest -m gpu tests/calibrate/decoder/test_weights_cuda.py",
    ),
]

LAYERS = 5
PROMPTS = [("", [7 + n, *range(100, 100 + length)]) for n, length in enumerate(range(0, 60, 5))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("llama") / "m"
    return Checkpoint.open(write_model(path, "llama", num_hidden_layers=LAYERS))


def room_of(checkpoint: Checkpoint, layers: int) -> int:
    return LayerWeights(checkpoint, "cuda").resident_bytes * layers // LAYERS


@pytest.mark.parametrize("held", [0, 2, LAYERS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_sweep_has_the_weights_of_the_files(
    checkpoint: Checkpoint, held: int, dtype: ComputeDtype
) -> None:
    weights = LayerWeights(checkpoint, "cuda", room=room_of(checkpoint, held))
    models = [LayeredModel(checkpoint, dtype, "cuda", weights) for _ in range(2)]
    for _ in range(2):
        for pairs in zip(*(model.sweep() for model in models), strict=True):
            for index, layer in pairs:
                stored = Stored(checkpoint, f"{checkpoint.spec.layer(index)}.", models[0].dtype)
                for name, parameter in layer.named_parameters():
                    assert torch.equal(parameter.cpu().to(models[0].dtype), stored[name])


def test_golden_records_do_not_depend_on_what_is_held(checkpoint: Checkpoint) -> None:
    found = [
        golden_set(
            checkpoint,
            PROMPTS,
            device="cuda",
            weights=LayerWeights(checkpoint, "cuda", room=room_of(checkpoint, held)),
        )
        for held in (0, 2, LAYERS)
    ]
    assert found[0].records == found[1].records == found[2].records


def test_it_says_where_the_layers_are(checkpoint: Checkpoint) -> None:
    told = [
        str(LayerWeights(checkpoint, "cuda", room=room_of(checkpoint, held)))
        for held in (LAYERS, 2, 0)
    ]
    assert told[0].endswith("held in GPU memory")
    assert "(2 of 5 layers), the rest read from disk for every pass" in told[1]
    assert told[2].endswith("read from disk layer by layer for every pass")


def test_a_full_gpu_holds_fewer_layers_and_says_so(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = golden_set(checkpoint, PROMPTS, device="cuda")
    forward, calls = LayeredModel.forward, 0

    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return forward(*args, **kwargs)

    monkeypatch.setattr(LayeredModel, "forward", full)
    told: list[str] = []
    weights = LayerWeights(checkpoint, "cuda", say=told.append)
    found = golden_set(checkpoint, PROMPTS, device="cuda", weights=weights)
    assert found.records == whole.records
    assert len(told) == 1
    assert "memory is full" in told[0] and "(2 of 5 layers)" in told[0]


def test_a_gpu_that_stays_full_is_an_error_of_one_line(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")

    monkeypatch.setattr(LayeredModel, "forward", full)
    with pytest.raises(ConfigError, match=r"^CUDA out of memory, though no .*--device cpu$"):
        golden_set(checkpoint, PROMPTS, device="cuda")


def test_too_little_memory_for_one_layer_is_said_at_once(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.decoder.weights.free_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"0\.0 GB free, and a layer .* take .* --device cpu$"):
        LayerWeights(checkpoint, "cuda")
