"""Checkpoints of compressed-tensors and of ModelOpt, the real ones, read by `octet verify`."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from octet.proof.reference import load_proofs
from tests.integration.conftest import require
from tests.integration.servers import layout
from tests.verify.packs import changed, drop_scales, judged, served, swap_nibbles
from verify.artifact import verify
from verify.proof_pack import PackOptions, open_pair, write_pack
from verify.reader.checkpoint import Written

REPOSITORY = Path(__file__).parents[2]
# Of compressed-tensors' presets, what reading back costs: its NVFP4 is decompressed to BF16.
PRESETS = {"FP8": 0, "FP8_DYNAMIC": 0, "FP8_BLOCK": 0, "NVFP4": 2**-8, "MXFP4": 0, "MXFP8": 0}
CONFIGS = {
    "FP8_DEFAULT_CFG": "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": "FP8_PB_WO",
    "NVFP4_DEFAULT_CFG": "NVFP4",
    "MXFP8_DEFAULT_CFG": "MXFP8",
}


def write(python: Path, *arguments: object) -> None:
    command = [python, "-m", "tests.integration.checkpoint_peers", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def of_compressed_tensors(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(layout.VLLM)
    out = tmp_path_factory.mktemp("compressed-tensors")
    write(layout.python(layout.VLLM), "compressed-tensors", tiny_model, out, *PRESETS)
    return out


@pytest.fixture(scope="module")
def of_modelopt(
    modelopt_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("modelopt")
    write(modelopt_python, "modelopt", tiny_model, out, *CONFIGS)
    return out


@pytest.mark.parametrize("preset", PRESETS)
def test_what_compressed_tensors_writes_is_read_as_it_reads_it(
    preset: str, of_compressed_tensors: Path, tiny_model: Path
) -> None:
    out = of_compressed_tensors / preset
    found = verify(out, model=tiny_model)
    assert found.problems == [] and found.exit_code == 0 and len(found.rows) == 14
    assert all(abs(row.margin) < 0.3 and row.unrounded == 0 for row in found.rows)
    written, real = Written.open(out), np.load(out / "decompressed.npz")
    for module in real.files:
        mine = written.dequantized(module)
        assert mine is not None
        np.testing.assert_allclose(mine, real[module], rtol=PRESETS[preset], atol=0)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_modelopt_exports_is_read_and_found_right(
    config: str, of_modelopt: Path, tiny_model: Path
) -> None:
    found = verify(of_modelopt / config, model=tiny_model)
    assert found.problems == [] and found.exit_code == 0 and len(found.rows) == 14
    assert found.format == f"modelopt: modelopt {CONFIGS[config]}"
    assert all(abs(row.margin) < 0.3 for row in found.rows)


def test_modelopts_two_files_have_to_agree(
    of_modelopt: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(of_modelopt / "NVFP4_DEFAULT_CFG", out)
    file = out / "hf_quant_config.json"
    content = json.loads(file.read_text())
    content["quantization"]["kv_cache_quant_algo"] = "FP8"
    file.write_text(json.dumps(content))
    (problem,) = verify(out, model=tiny_model).problems
    assert problem.what == "hf_quant_config.json alone declares an FP8 cache"


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("of_compressed_tensors", "FP8_DYNAMIC"),
        ("of_compressed_tensors", "FP8"),
        ("of_compressed_tensors", "NVFP4"),
        ("of_modelopt", "FP8_DEFAULT_CFG"),
        ("of_modelopt", "NVFP4_DEFAULT_CFG"),
    ],
)
def test_a_pack_admits_a_right_server_and_names_a_loaders_fault(
    tool: str,
    name: str,
    request: pytest.FixtureRequest,
    tiny_model: Path,
    example_samples: Path,
    tmp_path: Path,
) -> None:
    theirs = request.getfixturevalue(tool) / name
    options = PackOptions(
        original=tiny_model,
        quantized=theirs,
        samples=example_samples / "heldout.jsonl",
        out=tmp_path / "pack",
    )
    write_pack(open_pair(options), options)
    proofs = load_proofs(tmp_path / "pack")
    right = judged(proofs, served(tiny_model, theirs, proofs))
    assert right.outcome == "as_expected", right.reason
    fault, cause = (drop_scales, "weight_scale was taken as 1")
    if "NVFP4" in name:
        fault, cause = (swap_nibbles, "codes are read in the wrong order")
    wrong = changed(theirs, tmp_path / "wrong", fault)
    verdict = judged(proofs, served(tiny_model, wrong, proofs))
    # Next tokens of random weights hardly differ, so other causes may be named beside it.
    assert verdict.outcome == "worse" and cause in verdict.reason
