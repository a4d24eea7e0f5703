"""`rescale` gives what calibrating afresh would give, without the model being run."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from calibrate.drift import compare_live
from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.rescale import rescale
from calibrate.scales.weights import weight_scales
from octet.artifacts.calibration import MEAN_SQUARES_FILE, WEIGHTS_FILE, Calibration
from octet.artifacts.live import Counting, LiveCounts, read_live
from octet.artifacts.manifest import write_artifact
from octet.artifacts.scenarios import SCENARIOS_FILE
from octet.artifacts.serving_path import EXPECTED_FILE
from octet.errors import ArtifactError, ConfigError, OctetError
from octet.model.checkpoint import Checkpoint
from octet.numerics import scaling
from octet.numerics.bits import float32_to_bf16
from octet.numerics.formats import E4M3
from octet.recipe import PRESETS, Override, Recipe
from octet.storage.tensors import Tensor, write_tensors
from tests.calibrate.report_data import training
from tests.command import octet
from tests.shared import Shared

STATIC = PRESETS["fp8-static"]


def static_by(method: str) -> Recipe:
    activations = STATIC.activations.model_copy(update={"method": method})
    return STATIC.model_copy(update={"activations": activations})


RECIPES = {
    **PRESETS,
    **{f"fp8-static {method}": static_by(method) for method in ("mse", "percentile", "kl")},
    "fp8 e4m3": PRESETS["fp8"].model_copy(update={"kv_cache": "e4m3"}),
    "fp8 float16": PRESETS["fp8"].model_copy(update={"kv_cache": "float16"}),
    "mixed": PRESETS["nvfp4"].model_copy(
        update={
            "exclude": (*STATIC.exclude, "model.layers.0.mlp.gate_proj"),
            "overrides": (
                Override(
                    match="*.down_proj", weights=STATIC.weights, activations=STATIC.activations
                ),
            ),
        }
    ),
}
# Those that the pipeline itself is run with: a calibration takes a second or two.
FRESH = ["fp8-static", "fp8-block", "nvfp4", "fp8 e4m3", "mixed"]
PREDICTED = ["nvfp4", "fp8 e4m3"]  # which takes most of a test's time


def calibrated(
    model: Path, samples: Path, out: Path, recipe: Recipe, *, predict: bool = False
) -> Calibration:
    written = run(
        Options(
            model=model,
            samples=samples,
            out=out,
            recipe=recipe,
            count=40,
            dtype="float32",
            allow_few_samples=True,
            predict=predict,
        )
    )
    assert written is not None
    return written


@pytest.fixture(scope="module")
def origin(tiny_model: Path, tiny_samples: Path, shared: Shared) -> Calibration:
    """`fp8` with an E5M2 cache on 40 samples: nothing static that another recipe could inherit."""
    path = shared.directory(
        "rescale-origin", lambda path: calibrated(tiny_model, tiny_samples, path, PRESETS["fp8"])
    )
    return Calibration.load(path)


@pytest.fixture(scope="module")
def with_queries(tiny_model: Path, tiny_samples: Path, shared: Shared) -> Calibration:
    """With an E4M3 cache, for which queries are observed."""
    recipe = PRESETS["fp8-block"].model_copy(update={"kv_cache": "e4m3"})
    path = shared.directory(
        "rescale-queries", lambda path: calibrated(tiny_model, tiny_samples, path, recipe)
    )
    return Calibration.load(path)


def assert_same_scales(ours: Calibration, theirs: Calibration) -> None:
    assert ours.scales.keys() == theirs.scales.keys()
    for name, scale in ours.scales.items():
        np.testing.assert_array_equal(scale, theirs.scales[name], err_msg=name)


@pytest.mark.parametrize("name", FRESH)
def test_it_equals_calibrating_afresh(
    origin: Calibration,
    with_queries: Calibration,
    tiny_model: Path,
    tiny_samples: Path,
    tmp_path: Path,
    name: str,
) -> None:
    recipe = RECIPES[name]
    before = with_queries if recipe.kv_cache == "e4m3" else origin
    predict = name in PREDICTED
    derived = rescale(before.path, tmp_path / "derived", recipe=recipe, predict=predict)
    fresh = calibrated(tiny_model, tiny_samples, tmp_path / "fresh", recipe, predict=predict)
    assert_same_scales(derived, fresh)
    same = {
        file
        for file, sha in derived.manifest.files.items()
        if fresh.manifest.files.get(file) == sha
    }
    assert {
        "scales.safetensors",
        "histograms.safetensors",
        "observations.json",
        "golden.json",
        "mean_squares.safetensors",
        *((EXPECTED_FILE, SCENARIOS_FILE) if predict else ()),
    } <= same
    assert derived.manifest.details["predicted"] is predict
    reports = [json.loads((x.path / "report.json").read_text()) for x in (derived, fresh)]
    for part in ("tensors", "weights", "convergence", "distributions", "unknown", "warnings"):
        assert reports[0][part] == reports[1][part], part


def test_queries_that_were_not_observed_have_no_scale(origin: Calibration, tmp_path: Path) -> None:
    """The others have theirs, of both FP8 caches."""
    derived = rescale(origin.path, tmp_path / "derived", recipe=RECIPES["fp8 e4m3"], predict=False)
    layer = "model.layers.1.self_attn"
    assert derived.cache_scale(layer, "q", "e4m3") is None
    assert derived.cache_scale(layer, "k", "e4m3") == derived.scales[f"{layer}.k_scale"]
    assert derived.cache_scale(layer, "v", "e5m2") == 1.0


def test_mean_squares_of_earlier_releases_are_missed(origin: Calibration, tmp_path: Path) -> None:
    """Scales are then those of least error of the weights, and a warning says so."""
    old = tmp_path / "old"
    with write_artifact(old) as writer:
        for name in {*origin.manifest.files} - {MEAN_SQUARES_FILE}:
            shutil.copyfile(origin.path / name, writer.path / name)
        writer.finish(origin.manifest)
    derived = rescale(old, tmp_path / "plain", recipe=PRESETS["nvfp4"], predict=False)
    checkpoint = Checkpoint.open(Path(derived.manifest.details["source"]))
    for name, weight in weight_scales(checkpoint, PRESETS["nvfp4"]):
        np.testing.assert_array_equal(derived.scales[f"{name}.weight_scale"], weight.scale)
    (warning,) = (x for x in derived.manifest.details["warnings"] if "mean squares" in x)
    assert str(old) in warning and "calibrate again" in warning
    assert derived.mean_squares == {}


def test_through_every_recipe_and_back_again(origin: Calibration, tmp_path: Path) -> None:
    derived = origin
    others = {name: recipe for name, recipe in RECIPES.items() if name not in FRESH}
    for name, recipe in {**others, "back": PRESETS["fp8"]}.items():
        before, derived = (
            derived,
            rescale(derived.path, tmp_path / name, recipe=recipe, predict=False),
        )
        assert derived.manifest.recipe == recipe
        assert derived.manifest.details["rescaled_from"]["identity"] == before.manifest.identity
    for file in ("scales.safetensors", "histograms.safetensors", "golden.json"):
        assert (derived.path / file).read_bytes() == (origin.path / file).read_bytes(), file


def test_its_own_recipe_changes_no_byte(origin: Calibration, tmp_path: Path) -> None:
    again = rescale(origin.path, tmp_path / "again", recipe=PRESETS["fp8"], predict=False)
    assert again.manifest.files.keys() == origin.manifest.files.keys()
    for file in again.manifest.files:
        assert (again.path / file).read_bytes() == (origin.path / file).read_bytes(), file
    assert again.manifest.samples == origin.manifest.samples
    assert again.manifest.model == origin.manifest.model


def test_what_an_earlier_version_measured_with_other_scales_is_left_out(
    with_queries: Calibration, tmp_path: Path
) -> None:
    """Its blocks had scales of amax / 448."""
    recipe, measured = with_queries.manifest.recipe, training()
    for name, factor in (("now", 1.0), ("earlier", 0.7)):
        with write_artifact(tmp_path / name) as writer:
            for file in {*with_queries.manifest.files}:
                shutil.copyfile(with_queries.path / file, writer.path / file)
            report = json.loads((writer.path / "report.json").read_text())
            report["training"] = measured
            (writer.path / "report.json").write_text(json.dumps(report))
            scales = {
                key: Tensor.of(scale * np.float32(factor if "weight" in key else 1))
                for key, scale in with_queries.scales.items()
            }
            write_tensors(writer.path / "scales.safetensors", scales)
            writer.finish(with_queries.manifest)
        derived = rescale(tmp_path / name, tmp_path / f"{name}-2", recipe=recipe, predict=False)
        assert_same_scales(derived, with_queries)
        found = json.loads((derived.path / "report.json").read_text())["training"]
        assert found == (measured if name == "now" else None)


def test_what_cannot_be_known_is_named_with_a_reason(origin: Calibration, tmp_path: Path) -> None:
    derived = rescale(origin.path, tmp_path / "out", recipe=PRESETS["nvfp4"], predict=False)
    report = json.loads((derived.path / "report.json").read_text())
    inputs = {name for name, seen in derived.observations.items() if seen.kind == "input"}
    groups = next(item for item in report["unknown"] if set(item["tensors"]) == inputs)
    assert "e2m1 per 16" in groups["what"] and "histogram" in groups["why"]
    assert all(report["tensors"][name]["sqnr_db"] is None for name in inputs)
    assert report["sensitivity"] is None
    assert any("output" in item["what"] for item in report["unknown"])


def test_it_says_what_it_did(origin: Calibration, tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    new = {"recipe": PRESETS["nvfp4"], "predict": False}
    rescale(origin.path, tmp_path / "out", **new, console=console)
    text = console.export_text()
    assert "derived nvfp4 from" in text and "no sample was run" in text
    assert "tensors over" not in text  # nothing was observed


# Weights that a calibration changed


def doubled(checkpoint: Checkpoint) -> dict[str, NDArray[np.uint16]]:
    """A weight in BF16, twice as large."""
    name = "model.layers.0.mlp.down_proj.weight"
    return {name: float32_to_bf16(checkpoint.read(name).float32() * 2)}


def changed(
    origin: Calibration, to: Path, algorithm: str, codes: dict[str, NDArray[np.uint16]]
) -> Calibration:
    """A copy of the calibration in which `algorithm` made these of some weights."""
    weights = to.with_suffix(".weights")
    write_tensors(weights, {name: Tensor("BF16", x) for name, x in codes.items()})
    details = {**origin.manifest.details, "algorithm": {"name": algorithm}}
    return Calibration.save(
        to,
        origin.manifest.model_copy(update={"details": details}),
        origin.observations,
        origin.histograms,
        origin.scales,
        origin.golden,
        extra_files={WEIGHTS_FILE: weights},
    )


def test_changed_weights_are_used_and_passed_on(
    origin: Calibration, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    smooth = changed(origin, tmp_path / "smooth", "smoothquant", doubled(checkpoint))
    derived = rescale(smooth.path, tmp_path / "out", recipe=PRESETS["fp8"], predict=False)
    name = "model.layers.0.mlp.down_proj.weight_scale"
    np.testing.assert_array_equal(derived.scales[name], 2 * origin.scales[name])
    other = "model.layers.1.mlp.down_proj.weight_scale"
    np.testing.assert_array_equal(derived.scales[other], origin.scales[other])
    assert (derived.path / WEIGHTS_FILE).read_bytes() == (smooth.path / WEIGHTS_FILE).read_bytes()


def test_weights_fitted_to_one_recipe_start_no_other(
    origin: Calibration, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    gptq = changed(origin, tmp_path / "gptq", "gptq", doubled(checkpoint))
    with pytest.raises(ConfigError, match=r"fitted to recipe fp8 by gptq; calibrate again .*nvfp4"):
        rescale(gptq.path, tmp_path / "out", recipe=PRESETS["nvfp4"])
    cache = PRESETS["fp8"].model_copy(update={"kv_cache": "float16"})
    derived = rescale(gptq.path, tmp_path / "out", recipe=cache, predict=False)
    name = "model.layers.0.mlp.down_proj.weight_scale"  # as it was stored, not as derived
    np.testing.assert_array_equal(derived.scales[name], origin.scales[name])


def test_the_error_of_weights_on_the_grid_is_that_against_the_originals(
    origin: Calibration, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """GPTQ's weights are what their scales can say: compared with themselves they have no error."""
    linear = "model.layers.0.mlp.down_proj"
    weight, scale = checkpoint.read(f"{linear}.weight"), origin.scales[f"{linear}.weight_scale"]
    on_grid = scaling.fake_quantize(weight.float32(), scale, E4M3, scaling.CHANNEL)
    gptq = changed(
        origin, tmp_path / "gptq", "gptq", {f"{linear}.weight": float32_to_bf16(on_grid)}
    )
    reports = []
    for recipe in (PRESETS["fp8"], PRESETS["fp8"].model_copy(update={"kv_cache": "float16"})):
        derived = rescale(gptq.path, tmp_path / recipe.kv_cache, recipe=recipe, predict=False)
        reports.append(json.loads((derived.path / "report.json").read_text())["weights"])
    before = json.loads((origin.path / "report.json").read_text())["weights"]
    for weights in reports:
        for name in (linear, "model.layers.1.mlp.down_proj"):
            assert weights[name]["sqnr_db"] == pytest.approx(before[name]["sqnr_db"], abs=0.01)


# What is refused


def refused(kind: type[OctetError], match: str, origin: Path, out: Path, **options: Any) -> None:
    options.setdefault("recipe", PRESETS["nvfp4"])
    with pytest.raises(kind, match=match) as error:
        rescale(origin, out, **options)
    assert "\n" not in str(error.value)
    assert not out.exists()


def test_an_altered_calibration_is_refused(origin: Calibration, tmp_path: Path) -> None:
    copy = shutil.copytree(origin.path, tmp_path / "copy")
    path = copy / "histograms.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    refused(ArtifactError, r"histograms\.safetensors: altered", copy, tmp_path / "out")


def test_a_changed_checkpoint_is_refused(
    origin: Calibration, tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    rescale(origin.path, tmp_path / "same", recipe=PRESETS["nvfp4"], model=model, predict=False)
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    match = r"model\.safetensors has changed since calibration"
    refused(ArtifactError, match, origin.path, tmp_path / "out", model=model)


def test_a_checkpoint_that_moved_is_asked_for(origin: Calibration, tmp_path: Path) -> None:
    details = {**origin.manifest.details, "source": str(tmp_path / "gone")}
    moved = Calibration.save(
        tmp_path / "moved",
        origin.manifest.model_copy(update={"details": details}),
        origin.observations,
        origin.histograms,
        origin.scales,
        origin.golden,
    )
    refused(ArtifactError, "gone is not there; say where", moved.path, tmp_path / "out")


def test_a_pattern_that_matches_nothing_is_refused(origin: Calibration, tmp_path: Path) -> None:
    recipe = PRESETS["fp8"].model_copy(update={"exclude": ("*.qproj",)})
    refused(ConfigError, r"did you mean '\*\.q_proj'", origin.path, tmp_path / "out", recipe=recipe)


def test_it_replaces_neither_its_source_nor_what_exists(
    origin: Calibration, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match="exists already; add --force"):
        rescale(origin.path, origin.path, recipe=PRESETS["fp8"])
    with pytest.raises(ArtifactError, match="which is read"):
        rescale(origin.path, origin.path, recipe=PRESETS["fp8"], force=True)


def test_a_dead_input_is_refused_by_name(origin: Calibration, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.input"
    dead = np.zeros_like(origin.histograms[name])
    dead[0] = 100
    copy = Calibration.save(
        tmp_path / "dead",
        origin.manifest,
        origin.observations,
        {**origin.histograms, name: dead},
        origin.scales,
        origin.golden,
    )
    refused(OctetError, r"layers\.1\.mlp\.down_proj was zero", copy.path, tmp_path / "out")


# Live histograms in place of the samples'


def count_live(origin: Calibration, directory: Path, *, octaves: int, windows: int = 8) -> None:
    """Writes windows of 1,000 tokens as a server does: magnitudes are 2^`octaves` times larger."""
    exported = origin.manifest.model_copy(
        update={"kind": "checkpoint", "calibration": origin.manifest.identity}
    )
    counts = LiveCounts(Counting(directory, 1, 1000), exported)
    for _ in range(windows):
        for name, seen in origin.histograms.items():
            counts.add(name, np.roll(seen, 128 * octaves))
        counts.end_step(1000)
    counts.close()


def test_scales_are_derived_for_live_traffic(origin: Calibration, tmp_path: Path) -> None:
    """Of twice the magnitudes they are twice as large, and later traffic is compared with them."""
    static = rescale(origin.path, tmp_path / "static", recipe=STATIC, predict=False)
    count_live(static, tmp_path / "live", octaves=1)
    arguments = ["rescale", str(static.path), "--histograms", str(tmp_path / "live")]
    done = octet(*arguments, "--no-predict", "--out", str(tmp_path / "today"))
    assert done.returncode == 0, done.stderr
    today = Calibration.load(tmp_path / "today")
    for name, scale in today.scales.items():
        factor = 2 if name.endswith((".input_scale", "_e4m3")) else 1
        np.testing.assert_array_equal(scale, factor * static.scales[name], err_msg=name)
    assert any("8,000 tokens of live traffic" in x for x in today.manifest.details["warnings"])

    with pytest.raises(ArtifactError, match="another calibration of the same model and recipe"):
        read_live(tmp_path / "live", today)
    # Its counts are those of the traffic, and so are scales that another recipe derives from them.
    block = rescale(today.path, tmp_path / "again", recipe=PRESETS["nvfp4"], predict=False)
    assert any("8,000 tokens of live traffic" in x for x in block.manifest.details["warnings"])
    count_live(today, tmp_path / "later", octaves=0)
    assert not compare_live(today, read_live(tmp_path / "later", today)).drifted


def test_few_live_windows_are_refused(origin: Calibration, tmp_path: Path) -> None:
    count_live(origin, tmp_path / "live", octaves=0, windows=7)
    with pytest.raises(ConfigError, match=r"7,000 live tokens in 7 windows are too few"):
        rescale(origin.path, tmp_path / "out", recipe=STATIC, histograms=tmp_path / "live")
    assert not (tmp_path / "out").exists()
