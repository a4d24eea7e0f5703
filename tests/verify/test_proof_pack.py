"""Proof packs: checkpoints as other tools write them, right servers admitted, wrong ones named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.simulate.predict import scenarios
from export.checkpoint.write import export_checkpoint
from octet.artifacts.calibration import Calibration
from octet.artifacts.coverage import coverage
from octet.artifacts.manifest import Manifest
from octet.artifacts.signature import private_key, sign
from octet.errors import ArtifactError, CheckpointError, ConfigError, UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.proof.reference import load_proofs
from octet.recipe import Recipe
from octet.storage.files import read_object
from octet.storage.tensors import Tensor
from serve.config.proof import Proof
from serve.proof.client_view import Defaults
from serve.proof.golden_exam import GoldenExam
from serve.proof.served_files import differences
from tests.export.conftest import make_calibration
from tests.models import write_model
from tests.octet.artifacts.keys import write_keys
from tests.shared import Shared
from tests.verify.packs import (
    WEIGHTS,
    Change,
    Tensors,
    changed,
    drop_scales,
    judged,
    load_one_slot,
    scaled,
    served,
    share_global_scales,
    swap_nibbles,
)
from verify.artifact import verify
from verify.proof_pack import PackOptions, open_pair, write_pack

FORMATS = {  # a calibration's recipe -> how its export is written
    "fp8": "compressed-tensors",
    "fp8-static": "compressed-tensors",
    "fp8-block": "fp8",
    "nvfp4": "modelopt",
    "mxfp4": "compressed-tensors",
}


def apart(tensors: Tensors) -> None:
    """Gives fused linears scales of their own, as tools do that look at each linear alone."""
    for name in sorted(tensors):
        factor = {"k_proj": 2.0, "up_proj": 4.0}.get(name.split(".")[-2] if "." in name else "")
        if factor is None:
            continue
        if name.endswith(".weight_scale_2"):
            scaled(tensors, name, factor)
            local = tensors[name.removesuffix("_2")]
            real = torch.from_numpy(local.codes.view(np.uint8)).view(torch.float8_e4m3fn).float()
            codes = (real / factor).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            tensors[name.removesuffix("_2")] = Tensor(local.dtype, codes)


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a short context, so that its golden prompts are short, too.

    Its logits are twice as large: random ones are so close that no fault moves them far.
    """

    def sharpen(tensors: Tensors) -> None:
        norm = tensors["model.norm.weight"].float32()
        tensors["model.norm.weight"] = Tensor("F32", norm * np.float32(2))

    out = changed(tiny_model, tmp_path_factory.mktemp("short") / "model", sharpen)
    config = read_object(out / "config.json", CheckpointError)
    (out / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 96}))
    return out


@pytest.fixture(scope="module")
def checkpoints(model: Path, shared: Shared) -> dict[str, Path]:
    def build(root: Path) -> None:
        for recipe, form in FORMATS.items():
            out = root / f"{recipe}.ours"
            made = make_calibration(root / f"{recipe}.from", model, Recipe.load(recipe))
            export_checkpoint(made, out, format=form, kv_cache="float16")
            changed(out, root / recipe, apart if recipe == "nvfp4" else lambda tensors: None)

    root = shared.directory("stranger-checkpoints", build)
    return {name: root / name for name in FORMATS}


def options(model: Path, quantized: Path, samples: Path, out: Path) -> PackOptions:
    return PackOptions(
        original=model,
        quantized=quantized,
        samples=samples / "heldout.jsonl",
        out=out,
        device="cpu",
    )


@pytest.fixture(scope="module")
def packs(
    checkpoints: dict[str, Path], model: Path, example_samples: Path, shared: Shared
) -> Callable[[str], Path]:
    def pack(recipe: str) -> Path:
        def build(out: Path) -> None:
            wanted = options(model, checkpoints[recipe], example_samples, out)
            write_pack(open_pair(wanted), wanted)

        return shared.directory(f"pack-{recipe}", build)

    return pack


@pytest.mark.parametrize("recipe", FORMATS)
def test_a_right_server_is_admitted(
    recipe: str, packs: Callable[[str], Path], checkpoints: dict[str, Path], model: Path
) -> None:
    proofs = load_proofs(packs(recipe))
    verdict = judged(proofs, served(model, checkpoints[recipe], proofs))
    assert verdict.outcome == "as_expected", verdict.reason


@pytest.mark.parametrize(
    ("recipe", "change", "cause"),
    [
        # Random weights with swapped codes hardly ever predict what the original does: 3 of 24
        # prompts show it, too few to exclude the other causes.
        ("nvfp4", swap_nibbles, "undecided"),
        ("mxfp4", swap_nibbles, "nibbles_swapped"),
        ("nvfp4", lambda x: share_global_scales(x, max), "fused_scales_merged"),
        ("nvfp4", lambda x: share_global_scales(x, min), "fused_scales_smallest"),
        ("nvfp4", load_one_slot, "fused_scales_in_one_slot"),
        ("fp8-static", load_one_slot, "fused_scales_in_one_slot"),
        ("fp8", drop_scales, "weight_scales_dropped"),
        ("fp8-block", drop_scales, "weight_scales_dropped"),
    ],
)
def test_a_loaders_fault_is_refused_and_named(
    recipe: str,
    change: Change,
    cause: str,
    packs: Callable[[str], Path],
    checkpoints: dict[str, Path],
    model: Path,
    tmp_path: Path,
) -> None:
    proofs = load_proofs(packs(recipe))
    wrong = changed(checkpoints[recipe], tmp_path / "wrong", change)
    verdict = judged(proofs, served(model, wrong, proofs))
    assert verdict.outcome == "worse" and verdict.cause is not None
    assert verdict.cause.name == cause, verdict.reason
    if change is swap_nibbles:
        assert "codes are read in the wrong order" in verdict.reason


def refused(original: Path, quantized: Path, samples: Path, tmp_path: Path) -> str:
    wanted = options(original, quantized, samples, tmp_path / "pack")
    with pytest.raises((ArtifactError, CheckpointError, UnsupportedError)) as found:
        write_pack(open_pair(wanted), wanted)
    assert not (tmp_path / "pack").exists()
    return str(found.value)


def test_what_no_pack_can_be_made_of(
    checkpoints: dict[str, Path], model: Path, example_samples: Path, tmp_path: Path
) -> None:
    def told(original: Path, quantized: Path) -> str:
        return refused(original, quantized, example_samples, tmp_path)

    fp8 = checkpoints["fp8"]
    assert "not a quantized checkpoint" in told(model, model)
    assert "quantized already" in told(fp8, fp8)
    assert "no such" in told(model, tmp_path / "nowhere")
    deeper = write_model(tmp_path / "deeper", "llama")
    assert "not made from" in told(deeper, fp8) and "hidden_size is 256" in told(deeper, fp8)
    other = changed(model, tmp_path / "other", lambda x: shuffle(x))
    assert "is not its original" in told(other, fp8)

    scale = "model.layers.1.mlp.up_proj.weight_scale"
    missing = changed(fp8, tmp_path / "missing", lambda x: x.pop(scale) and None)
    assert f"{scale}: missing" in told(model, missing)
    broken = changed(fp8, tmp_path / "nan", lambda x: scaled(x, scale, float("nan")))
    assert f"{scale}: 512 of 512 scales are not finite" in told(model, broken)
    undeclared = changed(fp8, tmp_path / "undeclared", lambda x: None)
    config = read_object(undeclared / "config.json", CheckpointError)
    del config["quantization_config"]
    (undeclared / "config.json").write_text(json.dumps(config))
    assert "declares no quantization, but 14 linear layers hold codes" in told(model, undeclared)
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (undeclared / "config.json").write_text(json.dumps(config))
    assert "quant_method 'awq'" in told(model, undeclared)


def shuffle(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if "_proj." in name:
            tensors[name] = Tensor(tensor.dtype, np.ascontiguousarray(tensor.codes[::-1]))


def test_an_expert_that_no_sample_reached_is_named(example_samples: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "moe", "qwen3_moe")
    made = make_calibration(tmp_path / "from", model, Recipe.load("fp8-static"))
    export_checkpoint(made, tmp_path / "ours", kv_cache="float16")
    scale = "model.layers.0.mlp.experts.3.down_proj.input_scale"
    nan = changed(tmp_path / "ours", tmp_path / "nan", lambda x: scaled(x, scale, float("nan")))
    told = refused(model, nan, example_samples, tmp_path)
    assert f"{scale}: 1 of 1 scales are not finite" in told and "no calibration sample" in told


def test_a_pack_is_an_artifact(packs: Callable[[str], Path], checkpoints: dict[str, Path]) -> None:
    pack = packs("fp8")
    assert sum(path.stat().st_size for path in pack.iterdir()) < 5 << 20
    manifest = Manifest.load(pack, "pack")
    assert set(manifest.details["checkpoint"]["files"]) == {"config.json", WEIGHTS}
    found = verify(pack)
    assert (found.exit_code, found.problems) == (0, []) and "proof pack" in found.format


def test_a_signed_pack_is_taken_as_it_was_signed_alone(
    packs: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("cryptography", reason="signatures need cryptography: pip install it")
    key, public = write_keys(tmp_path / "keys", "openssh")
    pack = tmp_path / "pack"
    shutil.copytree(packs("fp8"), pack)
    config = Proof(golden=pack, key=public)
    with pytest.raises(ArtifactError, match="not signed"):
        GoldenExam.load(pack, config)
    with pytest.raises(ArtifactError, match="not signed"):
        verify(pack, key=public)
    sign(pack, private_key(key))
    assert GoldenExam.load(pack, config).identity == Manifest.load(pack).identity
    found = verify(pack, key=public)
    assert found.problems == [] and f"signed by {public}" in found.notes
    assert "signed; by whom is not checked without --key" in verify(pack).notes
    # Without a key, what clients get is compared with whatever lies there.
    (pack / "tokenizer_config.json").write_text("{}")
    assert GoldenExam.load(pack, Proof(golden=pack))
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json: altered"):
        GoldenExam.load(pack, config)


def test_a_gpu_that_is_not_there_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    wanted = replace(options(tmp_path, tmp_path, tmp_path, tmp_path / "pack"), device="cuda")
    unread: Any = None
    with pytest.raises(ConfigError, match="--device cuda: torch finds no GPU"):
        write_pack(unread, wanted)


def test_a_key_that_cannot_sign_is_refused_before_the_work(
    checkpoints: dict[str, Path], model: Path, example_samples: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography", reason="signatures need cryptography: pip install it")
    wanted = options(model, checkpoints["fp8"], example_samples, tmp_path / "pack")
    with pytest.raises(ConfigError, match="no Ed25519 private key"):
        open_pair(replace(wanted, sign=model / "config.json"))


def test_a_pack_knows_what_clients_get_by_default(
    packs: Callable[[str], Path], model: Path
) -> None:
    pack = packs("fp8")
    defaults = Defaults.load(pack, Manifest.load(pack, "pack"))
    assert defaults.generation == read_object(model / "generation_config.json", CheckpointError)
    assert defaults.generation and defaults.tokenizer is not None


def test_a_pack_says_what_it_examines_and_how_small_a_fault_passes(
    packs: Callable[[str], Path],
) -> None:
    proofs = load_proofs(packs("fp8"))
    whole = coverage(proofs.golden, range(64))
    assert whole is not None and whole.outside < 1 and whole.context == 96
    assert [x.prompts for x in proofs.power] == [24, 64]
    lists = [record for record in proofs.golden.records if record.prompt_nll is None]
    assert lists and all(len(x.prompt_token_ids) >= 32 for x in lists)


def test_a_pack_knows_the_checkpoint_it_is_of(
    packs: Callable[[str], Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    pack = packs("fp8")
    proofs = load_proofs(pack)
    own, other = checkpoints["fp8"], checkpoints["fp8-static"]
    assert differences(own, pack, proofs, trusted=True) == []
    (line,) = differences(other, pack, proofs, trusted=True)
    assert "is not the fp8 that the proof pack was made for: config.json and 1 more" in line
    assert differences(other, pack, proofs, trusted=False) == []  # perhaps another machine's
    revised = changed(
        own,
        tmp_path / "revised",
        lambda x: scaled(x, "model.layers.0.mlp.up_proj.weight_scale", 0.5),
    )
    (line,) = differences(revised, pack, proofs, trusted=False)
    assert f"made for: {WEIGHTS} (SHA-256)" in line


def test_a_pack_of_our_export_has_the_same_scenarios(
    packs: Callable[[str], Path], checkpoints: dict[str, Path], model: Path
) -> None:
    """What the export's own records admit and refuse, the pack does, too: the numbers are equal."""
    proofs = load_proofs(packs("fp8"))
    calibration = Calibration.load(checkpoints["fp8"].with_name("fp8.from"))
    recipe = calibration.manifest.recipe.model_copy(update={"kv_cache": "float16"})
    one = np.ones((), np.float32)
    cache = {
        f"model.layers.{n}.self_attn.{x}_scale{form}": one
        for n in range(2)
        for x in "kv"
        for form in ("", "_e4m3", "_e5m2")
    }
    assert proofs.scenarios is not None
    main = [x for x in proofs.scenarios.logprobs if x.path.kv_cache == "float16"]
    main = [x for x in main if x.fault is None or x.fault.layer is None]
    ours = scenarios(
        Checkpoint.open(model), recipe, calibration.scales | cache, proofs.golden, main
    )
    assert any(x.fault is not None for x in main)
    assert set(ours.logprobs) == set(main)
    for scenario in main:
        mine, theirs = ours.logprobs[scenario], proofs.scenarios.logprobs[scenario]
        np.testing.assert_array_equal(mine, theirs, err_msg=scenario.label)
