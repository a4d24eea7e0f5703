"""Every architecture: biases, experts, fused projections, tied heads, unknown decoders."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.golden import golden_set
from export.checkpoint.write import export_checkpoint
from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest, write_artifact
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from tests.export.conftest import make_calibration
from tests.models import GENERIC, KNOWN, write_model
from verify.artifact import verify
from verify.next_tokens import add_divergence

ROOT = Path(__file__).parents[2]
MODELS = KNOWN | GENERIC


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def exported(name: str, models: Path, recipe: str, out: Path) -> tuple[Path, Path]:
    """The calibration and the export of a model, which is written once."""
    kind, settings = MODELS[name]
    model = models / name
    if not model.exists():
        write_model(model, kind, **settings)
    calibration = make_calibration(out / "cal", model, Recipe.load(recipe))
    export_checkpoint(calibration, out / "out")
    return calibration, out / "out"


@pytest.mark.filterwarnings("default")  # an unknown architecture is exported with a warning
@pytest.mark.parametrize("name", MODELS)
def test_an_export_of_every_architecture_is_read_back(
    name: str, models: Path, tmp_path: Path
) -> None:
    calibration, out = exported(name, models, "fp8", tmp_path)
    found = verify(out, calibration=calibration)
    assert found.problems == [] and found.exit_code == 0
    checkpoint = Checkpoint.open(models / name)
    assert len(found.rows) == len(list(checkpoint.spec.linears()))
    assert len(found.rows) + found.copied == len(checkpoint.tensor_names)


@pytest.mark.filterwarnings("default")
def test_next_tokens_of_an_unknown_architecture_are_held_to_a_bound(
    models: Path, tmp_path: Path
) -> None:
    calibration, _ = exported("olmo2", models, "fp8", tmp_path)
    checkpoint, plain = Checkpoint.open(models / "olmo2"), Calibration.load(calibration)
    golden = golden_set(checkpoint, [("", [5, 7, 11, 13]), ("", [3, 2, 1])])
    saved = tmp_path / "saved"
    Calibration.save(saved, plain.manifest, {}, {}, plain.scales, golden)
    export_checkpoint(saved, tmp_path / "again")
    found = verify(tmp_path / "again", calibration=saved)
    add_divergence(found)
    assert found.exit_code == 0 and found.divergence is not None
    assert found.divergence.source == "the bound of fp8, without a prediction"
    assert "float16" in found.divergence.path  # nobody says that its cache was rounded
    assert any("the cache is not rounded" in note for note in found.notes)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3_moe", "phi3"])
def test_four_bits_of_biases_experts_and_fused_projections(
    name: str, models: Path, tmp_path: Path
) -> None:
    calibration, out = exported(name, models, "nvfp4", tmp_path)
    found = verify(out, calibration=calibration)
    assert found.problems == [] and all(row.sqnr > 19 for row in found.rows)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama-biases", "model.layers.1.mlp.down_proj.bias"),
        ("qwen3_moe", "model.layers.1.mlp.gate.weight"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("mixtral", "lm_head.weight"),
    ],
)
def test_what_is_not_quantized_is_compared_in_every_bit(
    name: str, tensor: str, models: Path, tmp_path: Path
) -> None:
    calibration, out = exported(name, models, "fp8", tmp_path)
    manifest = Manifest.load(out)
    tensors = load_file(out / "model.safetensors")
    tensors[tensor].view(torch.int16).reshape(-1)[5] ^= 1
    with write_artifact(out, force=True) as writer:
        for file in manifest.files:
            (writer.path / file).write_bytes((out / file).read_bytes())
        save_file(tensors, writer.path / "model.safetensors", {"format": "pt"})
        writer.finish(manifest)
    (problem,) = verify(out, calibration=calibration).problems
    assert problem.where == tensor and problem.what.startswith("1 of ")


PEAK = """
import sys
from pathlib import Path
from verify.artifact import verify
assert verify(Path(sys.argv[1]), calibration=Path(sys.argv[2])).exit_code == 0
lines = Path("/proc/self/status").read_text().splitlines()
print(*[int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """600 MB of originals and exports are compared in half of that, most of it libraries."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 24_000}
    model = write_model(tmp_path / "model", "llama", num_hidden_layers=2, **sizes)
    calibration = make_calibration(tmp_path / "cal", model, Recipe.load("nvfp4"))
    export_checkpoint(calibration, tmp_path / "out")
    total = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    command = [sys.executable, "-c", PEAK, str(tmp_path / "out"), str(calibration)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert total > 550e6
    assert int(done.stdout) < 300e6
