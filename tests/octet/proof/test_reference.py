"""Tests which directories can prove a server, and the errors for the others."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from octet.artifacts.golden import GOLDEN_FILE, GoldenSet
from octet.artifacts.manifest import Manifest, software, write_artifact
from octet.artifacts.provenance import ModelIdentity
from octet.artifacts.scenarios import SCENARIOS_FILE, ScenarioSet
from octet.errors import ArtifactError
from octet.model.spec import ModelSpec
from octet.proof.reference import load_proofs
from octet.recipe import PRESETS
from tests.octet.proof.worlds import make_world

WORLD = make_world(0, records=3, positions=2)


CONFIG = Path(__file__).parents[3] / "examples" / "python-lm" / "model" / "config.json"


@pytest.fixture(scope="module")
def identity() -> ModelIdentity:
    return ModelIdentity(
        name="python-lm",
        spec=ModelSpec.from_config(json.loads(CONFIG.read_text()), "the example"),
        files={"config.json": "0", "model.safetensors": "1"},
        tokenizer={},
    )


def golden_of(identity: ModelIdentity) -> GoldenSet:
    model = hashlib.sha256(json.dumps(identity.files, sort_keys=True).encode()).hexdigest()
    return WORLD.golden.model_copy(update={"weights_sha256": model})


def write(
    path: Path,
    identity: ModelIdentity,
    golden: GoldenSet | None,
    scenarios: ScenarioSet | None = None,
    **details: Any,
) -> Path:
    manifest = Manifest(
        kind="checkpoint",
        model=identity,
        recipe=PRESETS["fp8"],
        details=details,
        software=software(),
    )
    with write_artifact(path) as writer:
        (writer.path / "model.safetensors").write_bytes(b"weights")
        if golden is not None:
            golden.save(writer.path)
        if scenarios is not None:
            scenarios.save(writer.path)
        writer.finish(manifest)
    return path


def scenarios_of(golden: GoldenSet) -> ScenarioSet:
    made = WORLD.scenarios(0)
    return ScenarioSet(golden.weights_sha256, made.recipe, made.logprobs)


def test_an_export_brings_all_that_a_judge_needs(tmp_path: Path, identity: ModelIdentity) -> None:
    golden = golden_of(identity)
    path = write(tmp_path / "a", identity, golden, scenarios_of(golden), kv_cache="e4m3")
    (path / "model.safetensors").unlink()  # which is the server's, and not read
    found = load_proofs(path)
    assert found.golden == golden and found.scenarios is not None
    assert len(found.scenarios.paths) == 4
    assert (found.kv_cache, found.recipe, found.weights) == ("e4m3", PRESETS["fp8"], "quantized")
    assert found.identity == Manifest.load(path, verify=False).identity


def test_an_engine_and_an_unquantized_export(tmp_path: Path, identity: ModelIdentity) -> None:
    engine = write(tmp_path / "a", identity, golden_of(identity), kv_cache={"dtype": "e5m2"})
    assert load_proofs(engine).kv_cache == "e5m2"
    assert load_proofs(engine).scenarios is None
    plain = write(tmp_path / "b", identity, golden_of(identity), quantized=False)
    assert load_proofs(plain).weights == "original"


def test_golden_records_of_another_model(tmp_path: Path, identity: ModelIdentity) -> None:
    path = write(tmp_path / "a", identity, WORLD.golden)
    with pytest.raises(ArtifactError, match=f"{GOLDEN_FILE}: golden records of another model"):
        load_proofs(path)


def test_scenarios_of_other_golden_records(tmp_path: Path, identity: ModelIdentity) -> None:
    path = write(tmp_path / "a", identity, golden_of(identity), WORLD.scenarios(0))
    with pytest.raises(ArtifactError, match="belongs to other golden records"):
        load_proofs(path)


@pytest.mark.parametrize("name", [GOLDEN_FILE, SCENARIOS_FILE])
def test_a_truncated_file(tmp_path: Path, identity: ModelIdentity, name: str) -> None:
    golden = golden_of(identity)
    path = write(tmp_path / "a", identity, golden, scenarios_of(golden))
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError, match=rf"{name}: altered") as error:
        load_proofs(path)
    assert "\n" not in str(error.value)
    (path / name).unlink()
    with pytest.raises(ArtifactError, match=rf"{name}: missing"):
        load_proofs(path)


def test_an_artifact_without_golden_records(tmp_path: Path, identity: ModelIdentity) -> None:
    path = write(tmp_path / "a", identity, None)
    with pytest.raises(ArtifactError, match="nothing to prove by"):
        load_proofs(path)
    empty = golden_of(identity).model_copy(update={"records": ()})
    with pytest.raises(ArtifactError, match="holds no golden record"):
        load_proofs(write(tmp_path / "b", identity, empty))


def test_a_directory_that_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not an Octet artifact"):
        load_proofs(tmp_path)


@pytest.mark.parametrize(
    "details",
    [{"predicted": True}, {"expected_divergence": {}}, {"prediction": {"device": "cpu"}}],
    ids=["recorded", "an export of release 0.2", "a calibration of release 0.2"],
)
def test_predictions_that_were_removed_with_their_entry(
    tmp_path: Path, identity: ModelIdentity, details: dict[str, Any]
) -> None:
    """Whoever deletes them and hashes the manifest again gets no weaker test."""
    golden = golden_of(identity)
    path = write(tmp_path / "whole", identity, golden, scenarios_of(golden), **details)
    assert load_proofs(path).scenarios is not None
    path = write(tmp_path / "without", identity, golden, **details)
    with pytest.raises(ArtifactError) as error:
        load_proofs(path)
    assert str(error.value) == (
        f"{path / SCENARIOS_FILE}: missing; manifest.json does not list it, but the artifact was"
        " written with it; copy it again from where it was made, or make it again with octet export"
        " checkpoint"
    )


@pytest.mark.parametrize("details", [{"predicted": False}, {}], ids=["recorded", "of release 0.2"])
def test_an_artifact_that_predicts_nothing_is_whole(
    tmp_path: Path, identity: ModelIdentity, details: dict[str, Any]
) -> None:
    path = write(tmp_path / "plain", identity, golden_of(identity), **details)
    assert load_proofs(path).scenarios is None
