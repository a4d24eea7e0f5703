"""A tiny random Llama and calibrations of it, made without the calibrate stage."""

from pathlib import Path

import numpy as np
import pytest
import torch

from octet import scaling
from octet.artifact import Manifest, ModelIdentity, software
from octet.calibration import Calibration
from octet.checkpoint import Checkpoint
from octet.formats import E4M3
from octet.golden import GoldenRecord, GoldenSet
from octet.recipe import Recipe

RECIPES = ("fp8", "fp8-static", "fp8-block")


def make_model(path: Path, *, tied: bool = True, seed: int = 0, layers: int = 2) -> Path:
    """Saves a random BF16 Llama: 4 query heads on 2 KV heads of 64, vocabulary 4,096."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=4096,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # livelier than the initialisation, so that distributions are not flat
        for name, parameter in model.named_parameters():
            parameter.mul_(3.0 if "proj" in name else 1.0)
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if "embed" in name:
                parameter.mul_(4.0)
    model.to(torch.bfloat16).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    return path


def make_calibration(
    path: Path, model: Path, recipe: Recipe, *, scales: dict[str, float] | None = None
) -> Path:
    """Saves weight scales from the absolute maximum, and plausible input scales."""
    checkpoint = Checkpoint.open(model)
    granularity = scaling.Granularity.of(recipe.weights.granularity, recipe.weights.group_size)
    found: dict[str, np.ndarray] = {}
    for linear in checkpoint.spec.linears():
        weight = checkpoint.read(f"{linear.name}.weight").float32()
        amax = scaling.absmax(weight, granularity)
        found[f"{linear.name}.weight_scale"] = scaling.scale_from_absmax(amax, E4M3)
        if not recipe.activations.dynamic:
            found[f"{linear.name}.input_scale"] = np.array(8.0 / 448, np.float32)
    for index in range(checkpoint.spec.layers):
        for kind in "kv":
            found[f"model.layers.{index}.self_attn.{kind}_scale"] = np.array(1, np.float32)
    for name, value in (scales or {}).items():
        found[name] = np.array(value, np.float32)
    record = GoldenRecord(
        prompt="a",
        prompt_token_ids=(5,),
        top_token_ids=(1, 2),
        top_logprobs=(-0.1, -3.0),
        continuation_token_ids=(1,),
    )
    golden = GoldenSet(weights_sha256="0", compute_dtype="float32", software={}, records=(record,))
    manifest = Manifest(
        kind="calibration",
        model=ModelIdentity.of(checkpoint),
        recipe=recipe,
        details={"source": str(model)},
        software=software(),
    )
    Calibration.save(path, manifest, {}, {}, found, golden)
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("export") / "tiny")


@pytest.fixture(scope="session")
def calibrations(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    """A calibration of the tiny model for each preset recipe."""
    root = tmp_path_factory.mktemp("calibrations")
    return {name: make_calibration(root / name, tiny_model, Recipe.load(name)) for name in RECIPES}
