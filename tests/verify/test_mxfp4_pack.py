"""Proof packs of gpt-oss in MXFP4: servers that transformers computes are admitted, or named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from octet.artifacts.manifest import Manifest
from octet.errors import CheckpointError
from octet.proof.reference import Proofs, load_proofs
from octet.proof.verdict import Verdict
from tests.models import Tensors, rewrite_model
from tests.mxfp4 import each, pack_experts, unpacked, write_gpt_oss
from tests.shared import Shared
from tests.verify.packs import answered, judged
from verify.artifact import verify
from verify.proof_pack import PackOptions, open_pair, write_pack

FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "wrong nibble order": (each("_blocks", lambda x: x << 4 | x >> 4), "nibbles_swapped"),
    "scales of the next expert": (
        each("_scales", lambda x: np.roll(x, -1, 0)),
        "expert_scales_permuted",
    ),
    "scales taken as 1": (each("_scales", lambda x: np.full_like(x, 127)), "weight_scales_dropped"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt_oss(tmp_path_factory.mktemp("gpt-oss") / "model")


@pytest.fixture(scope="module")
def packed(model: Path) -> Path:
    return pack_experts(model, model.with_name("packed"))


def options(original: Path, quantized: Path, samples: Path, out: Path) -> PackOptions:
    return PackOptions(
        original=original,
        quantized=quantized,
        samples=samples / "heldout.jsonl",
        out=out,
        device="cpu",
    )


@pytest.fixture(scope="module")
def pack(model: Path, packed: Path, example_samples: Path, shared: Shared) -> Path:
    """Of the BF16 model and its MXFP4 version."""

    def build(out: Path) -> None:
        wanted = options(model, packed, example_samples, out)
        write_pack(open_pair(wanted), wanted)

    return shared.directory("pack-gpt-oss", build)


def verdict_of(packed: Path, pack: Path, tmp_path: Path) -> Verdict:
    """What the pack says of a server of `packed`, computed by transformers alone."""
    decoded = unpacked(packed, tmp_path / "decoded")
    proofs: Proofs = load_proofs(pack)
    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.bfloat16)
    return judged(proofs, answered(model, proofs))


def test_a_right_server_is_admitted(pack: Path, packed: Path, tmp_path: Path) -> None:
    verdict = verdict_of(packed, pack, tmp_path)
    assert verdict.outcome == "as_expected", verdict.reason
    details = Manifest.load(pack, "pack").details
    assert (details["format"], details["weight_only"]) == ("mxfp4: mxfp4 weight-only", True)
    found = verify(pack)
    assert (found.exit_code, found.problems) == (0, [])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_loaders_fault_is_refused_and_named(
    fault: str, pack: Path, packed: Path, tmp_path: Path
) -> None:
    change, cause = FAULTS[fault]
    verdict = verdict_of(rewrite_model(packed, tmp_path / "wrong", change), pack, tmp_path)
    assert verdict.outcome == "worse" and verdict.cause is not None
    assert verdict.cause.name == cause, verdict.reason


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_refused(
    fault: str, model: Path, packed: Path, example_samples: Path, tmp_path: Path
) -> None:
    wrong = rewrite_model(packed, tmp_path / "wrong", FAULTS[fault][0])
    wanted = options(model, wrong, example_samples, tmp_path / "pack")
    with pytest.raises(CheckpointError) as refused:
        write_pack(open_pair(wanted), wanted)
    line = str(refused.value)
    assert "model.layers.0.mlp.experts.0.down_proj.blocks: SQNR" in line and "\n" not in line
    assert not wanted.out.exists()


def test_it_may_be_its_own_original(packed: Path, example_samples: Path, tmp_path: Path) -> None:
    wanted = options(packed, packed, example_samples, tmp_path / "pack")
    pair = open_pair(wanted)
    write_pack(pair, wanted)
    verdict = verdict_of(packed, wanted.out, tmp_path)
    assert verdict.outcome == "as_expected", verdict.reason
    expected = Manifest.load(wanted.out, "pack").details["expected_divergence"]
    assert expected["weights, float16, float32"]["mean"] < 1e-6


def test_a_model_of_another_shape_is_refused(
    model: Path, packed: Path, example_samples: Path, tmp_path: Path
) -> None:
    other = rewrite_model(model, tmp_path / "other", swiglu_limit=5.0)
    wanted = options(other, packed, example_samples, tmp_path / "pack")
    with pytest.raises(CheckpointError, match=r"swiglu_limit is 7\.0, and 5\.0 in the"):
        open_pair(wanted)
    assert open_pair(replace(wanted, original=model))
