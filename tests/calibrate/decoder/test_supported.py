"""Tests that a model that cannot run layer by layer is refused at the start, with the reason."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from calibrate.decoder.layers import LayeredModel
from calibrate.decoder.loading import load_skeleton
from calibrate.decoder.supported import check_make, window_of
from calibrate.observe.layer_observer import require_shared_inputs
from calibrate.observe.sweep import observe_checkpoint
from calibrate.options import Options
from calibrate.pipeline import run
from octet.errors import UnsupportedError
from octet.limit import Limit
from octet.model.checkpoint import Checkpoint
from octet.model.spec import Linear
from octet.recipe import Recipe
from octet.storage.tensors import Tensor, write_tensors
from tests.calibrate.runs import batches_of
from tests.models import write_model


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("olmo2") / "model", "olmo2")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma2") / "model", "gemma2")


def copied(
    model: Path,
    path: Path,
    config: dict[str, Any],
    rename: Callable[[str], str] = lambda name: name,
    **extra: Tensor,
) -> Checkpoint:
    """A copy of `model` with other keys in its config.json and other tensor names."""
    checkpoint = Checkpoint.open(model)
    tensors = {rename(name): checkpoint.read(name) for name in checkpoint.tensor_names}
    (path / "config.json").write_text(json.dumps(checkpoint.config | config))
    write_tensors(path / "model.safetensors", tensors | extra)
    return Checkpoint.open(path)


def refused(checkpoint: Checkpoint, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        LayeredModel(checkpoint, "float32")
    assert str(checkpoint.path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_architecture_that_transformers_lacks(olmo: Path, tmp_path: Path) -> None:
    config = {"architectures": ["NewForCausalLM"], "model_type": "new"}
    refused(
        copied(olmo, tmp_path, config),
        r"transformers [\d.]+ does not know NewForCausalLM, .* install",
    )


def test_frequencies_that_transformers_leaves_out(
    olmo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers 4 does: golden records would be of whatever was in memory."""
    monkeypatch.setattr("transformers.PreTrainedModel._init_weights", lambda self, module: None)
    refused(Checkpoint.open(olmo), r"does not compute model.rotary_emb.inv_freq .* install")


def test_a_matrix_that_transformers_has_no_linear_for(olmo: Path, tmp_path: Path) -> None:
    weight = Checkpoint.open(olmo).read("model.layers.0.mlp.up_proj.weight")
    changed = copied(olmo, tmp_path, {}, **{"model.layers.1.mlp.side_proj.weight": weight})
    refused(changed, r"layers.1.mlp.side_proj.weight is no linear's weight of \[96, 64\]")


def test_layers_that_transformers_has_elsewhere(olmo: Path, tmp_path: Path) -> None:
    moved = copied(olmo, tmp_path, {}, lambda name: name.replace("model.layers", "net.layers"))
    refused(moved, "has 2 layers in model.layers, the checkpoint 2 in net.layers")


def test_tensors_that_transformers_renames(olmo: Path, tmp_path: Path) -> None:
    def rename(name: str) -> str:
        return name.replace("post_feedforward_layernorm", "norm_of_mlp")

    layered = LayeredModel(copied(olmo, tmp_path, {}, rename), "float32")
    with pytest.raises(UnsupportedError, match=r"has a tensor model.layers.0.post_feedforward_lay"):
        next(layered.sweep())


def test_weights_around_the_layers(gemma: Path) -> None:
    """OPT's decoder, say, projects what leaves its last layer."""
    from calibrate.decoder.partial import find_norm

    decoder = load_skeleton(Checkpoint.open(gemma), "float32").base_model
    assert find_norm(decoder) == "norm"
    decoder.project_out = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="besides layers and embeddings there is norm, project_"):
        find_norm(decoder)


def test_what_a_layer_sees(gemma: Path) -> None:
    checkpoint = Checkpoint.open(gemma)
    model = load_skeleton(checkpoint, "float32")
    assert [window_of(model, checkpoint, index) for index in range(2)] == [24, None]
    model.config.layer_types[1] = "chunked_attention"
    with pytest.raises(UnsupportedError, match="layer 1 is of type 'chunked_attention'"):
        window_of(model, checkpoint, 1)


def test_experts_of_another_make(tmp_path: Path) -> None:
    """Interleaved gates and ups, or a gate of their own, which a loop over experts would miss."""
    checkpoint = Checkpoint.open(write_model(tmp_path / "model", "olmoe"))
    model = load_skeleton(checkpoint, "float32")
    assert check_make(model, checkpoint) == "norm"
    model.base_model.layers[1].mlp.experts.is_concatenated = False
    with pytest.raises(UnsupportedError, match="experts of layer 1 are not gated MLPs fused as"):
        check_make(model, checkpoint)
    model.base_model.layers[0].mlp.experts._apply_gate = lambda x: x
    with pytest.raises(UnsupportedError, match="experts of layer 0 are not gated MLPs fused as"):
        check_make(model, checkpoint)


@pytest.mark.parametrize("change", [{"kv_heads": 4}, {"head_dim": 16}])
def test_a_cache_of_another_make(change: dict[str, int], olmo: Path) -> None:
    """Latent attention, say, caches no heads."""
    checkpoint = Checkpoint.open(olmo)
    other = replace(checkpoint, spec=checkpoint.spec.model_copy(update=change))
    told = f"{change.get('kv_heads', 2)} of {change.get('head_dim', 32)}"
    message = f"layers.0.self_attn caches 2 heads of 32 values, where config.json says {told}:"
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        observe_checkpoint(other, batches_of(2), dtype="float32")


class Split(nn.Module):
    """q reads something else than k."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) + self.k_proj(y)


def test_linears_that_do_not_read_what_their_names_promise() -> None:
    linears = [
        Linear(name=f"l.0.{name}", out_features=4, in_features=4, input="l.0.q_proj.input")
        for name in ("q_proj", "k_proj")
    ]
    layer, x = Split(), torch.ones(2, 4)
    with require_shared_inputs(layer, "l.0", linears):
        layer(x, x)
        with pytest.raises(UnsupportedError, match=r"^l.0.k_proj does not read what l.0.q_proj"):
            layer(x, x + 1)
    layer(x, x + 1)


@pytest.mark.parametrize("wish", [{"sensitivity": True}, {"budget": Limit.parse("ppl=1%")}])
def test_what_needs_a_known_head_is_refused(
    wish: dict[str, Any], olmo: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="Olmo2ForCausalLM is not; leave them out"):
        run(
            Options(
                model=olmo,
                samples=tiny_samples,
                out=tmp_path / "out",
                recipe=Recipe.load("fp8"),
                **wish,
            )
        )


def test_a_calibration_tells_that_its_linears_were_found_by_name(
    gemma: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    calibration = run(
        Options(
            model=gemma,
            samples=tiny_samples,
            out=tmp_path / "out",
            recipe=Recipe.load("fp8"),
            count=16,
            max_length=64,
            allow_few_samples=True,
            dtype="float32",
        )
    )
    assert calibration is not None
    (told,) = Checkpoint.open(gemma).warnings
    assert told.startswith("Gemma2ForCausalLM is an architecture that Octet does not know")
    assert told in calibration.manifest.details["warnings"]
    quantized = {name.removesuffix(".weight_scale") for name in calibration.scales}
    assert {linear.name for linear in Checkpoint.open(gemma).spec.linears()} <= quantized
