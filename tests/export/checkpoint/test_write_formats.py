"""Each layout's tensors, scales and configuration, as its readers expect them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from export.checkpoint.write import CheckpointFormat, export_checkpoint
from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError, ConfigError, ExportError, UnsupportedError
from octet.recipe import KvCacheDtype, Override, Recipe, ScaleMethod
from octet.storage.tensors import Tensor, TensorFile
from tests.export.conftest import calibration_in_blocks, make_calibration
from tests.models import KNOWN, write_model

ATTENTION = "model.layers.0.self_attn"
K_PROJ = f"{ATTENTION}.k_proj"  # [128, 256]
E4M3, F32, U8 = torch.float8_e4m3fn, torch.float32, torch.uint8

# (recipe, format) -> what there is of a linear [128, 256]
TENSORS: dict[tuple[str, CheckpointFormat], dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
    ("fp8", "compressed-tensors"): {"weight": (E4M3, (128, 256)), "weight_scale": (F32, (128, 1))},
    ("fp8-static", "compressed-tensors"): {
        "weight": (E4M3, (128, 256)),
        "weight_scale": (F32, (1,)),
        "input_scale": (F32, (1,)),
    },
    ("fp8-block", "compressed-tensors"): {
        "weight": (E4M3, (128, 256)),
        "weight_scale": (F32, (1, 2)),
    },
    ("mxfp8", "compressed-tensors"): {"weight": (E4M3, (128, 256)), "weight_scale": (U8, (128, 8))},
    ("mxfp4", "compressed-tensors"): {
        "weight_packed": (U8, (128, 128)),
        "weight_scale": (U8, (128, 8)),
    },
    ("nvfp4", "compressed-tensors"): {
        "weight_packed": (U8, (128, 128)),
        "weight_scale": (E4M3, (128, 16)),
        "weight_global_scale": (F32, (1,)),
        "input_global_scale": (F32, (1,)),
    },
    ("fp8-static", "modelopt"): {
        "weight": (E4M3, (128, 256)),
        "weight_scale": (F32, ()),
        "input_scale": (F32, ()),
    },
    ("fp8", "modelopt"): {"weight": (E4M3, (128, 256)), "weight_scale": (F32, (128,))},
    ("fp8-block", "modelopt"): {"weight": (E4M3, (128, 256)), "weight_scale": (F32, (1, 1, 2, 1))},
    ("nvfp4", "modelopt"): {
        "weight": (U8, (128, 128)),
        "weight_scale": (E4M3, (128, 16)),
        "weight_scale_2": (F32, ()),
        "input_scale": (F32, ()),
    },
    ("fp8-block", "fp8"): {"weight": (E4M3, (128, 256)), "weight_scale_inv": (F32, (1, 2))},
    ("fp8-static", "fp8"): {
        "weight": (E4M3, (128, 256)),
        "weight_scale": (F32, (1,)),
        "input_scale": (F32, (1,)),
    },
}
ALGORITHMS = {
    "fp8": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8-static": "FP8",
    "fp8-block": "FP8_PB_WO",
    "nvfp4": "NVFP4",
}


def read(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and `quantization_config` of an export."""
    config = json.loads((directory / "config.json").read_text())
    return load_file(directory / "model.safetensors"), config["quantization_config"]


@pytest.mark.parametrize(("recipe", "format"), TENSORS, ids=" ".join)
def test_a_linear_has_the_tensors_of_its_format(
    recipe: str, format: CheckpointFormat, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    kv_cache = "e5m2" if format == "compressed-tensors" else "float16"
    export_checkpoint(calibrations[recipe], tmp_path / "out", format=format, kv_cache=kv_cache)
    tensors, _ = read(tmp_path / "out")
    found = {
        name.removeprefix(f"{K_PROJ}."): (tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
        if name.startswith(f"{K_PROJ}.")
    }
    assert found == TENSORS[recipe, format]
    assert Manifest.load(tmp_path / "out").files  # whose hashes are those of the files


def test_global_scales_divide_in_compressed_tensors_and_multiply_in_modelopt(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    scales = Calibration.load(calibrations["nvfp4"]).scales
    export_checkpoint(calibrations["nvfp4"], tmp_path / "ct")
    export_checkpoint(calibrations["nvfp4"], tmp_path / "mo", format="modelopt", kv_cache="float16")
    divide, multiply = read(tmp_path / "ct")[0], read(tmp_path / "mo")[0]
    for ours, theirs in (("weight", "weight_scale_2"), ("input", "input_scale")):
        scale = float(scales[f"{K_PROJ}.{ours}_global_scale"])
        assert float(multiply[f"{K_PROJ}.{theirs}"]) == scale
        assert float(divide[f"{K_PROJ}.{ours}_global_scale"]) == pytest.approx(1 / scale, rel=1e-7)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_powers_of_two_are_stored_as_biased_exponents(
    recipe: str, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    export_checkpoint(calibrations[recipe], tmp_path / "out")
    stored = read(tmp_path / "out")[0][f"{K_PROJ}.weight_scale"]
    scales = torch.from_numpy(
        Calibration.load(calibrations[recipe]).scales[f"{K_PROJ}.weight_scale"]
    )
    assert torch.equal(torch.exp2(stored.float() - 127), scales)


@pytest.mark.parametrize(
    ("format", "names"),
    [
        ("compressed-tensors", {"k": "k_scale", "v": "v_scale", "q": "q_scale"}),
        ("modelopt", {"k": "k_proj.k_scale", "v": "v_proj.v_scale", "q": "q_scale"}),
        (
            "fp8",
            {"k": "k_proj.output_scale", "v": "v_proj.output_scale", "q": "q_proj.output_scale"},
        ),
    ],
)
def test_an_e4m3_cache_has_its_scales_under_the_names_of_the_format(
    format: CheckpointFormat, names: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    values = {"k": 0.5, "v": 1.0, "q": 0.25}  # all are written, 1 too
    scales = {
        f"model.layers.{index}.self_attn.{which}_scale_e4m3": value
        for index in range(2)
        for which, value in values.items()
    }
    recipe = Recipe.load("fp8-static")
    make_calibration(tmp_path / "cal", tiny_model, recipe, scales=scales)
    manifest = export_checkpoint(tmp_path / "cal", tmp_path / "out", format=format, kv_cache="e4m3")
    tensors, config = read(tmp_path / "out")
    for which, name in names.items():
        assert tensors[f"{ATTENTION}.{name}"].tolist() == [values[which]]
    assert manifest.details["serve_with"] == "--kv-cache-dtype fp8_e4m3"
    assert manifest.details["query_scale"] == "calibrated"
    if format == "compressed-tensors":
        assert config["kv_cache_scheme"] == {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "symmetric": True,
            "dynamic": False,
        }
    elif format == "modelopt":
        assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}


def test_without_a_query_scale_the_manifest_says_what_engines_take(
    tiny_model: Path, tmp_path: Path
) -> None:
    recipe = Recipe.load("fp8").model_copy(update={"kv_cache": "e4m3"})
    make_calibration(tmp_path / "cal", tiny_model, recipe)
    manifest = export_checkpoint(tmp_path / "cal", tmp_path / "out")
    assert "not observed" in manifest.details["query_scale"]
    assert not [name for name in read(tmp_path / "out")[0] if "q_scale" in name]


def test_a_float16_cache_leaves_no_trace(tiny_model: Path, tmp_path: Path) -> None:
    name = f"{ATTENTION}.k_scale"
    make_calibration(tmp_path / "cal", tiny_model, Recipe.load("fp8"), scales={name: 2.0})
    manifest = export_checkpoint(tmp_path / "cal", tmp_path / "out", kv_cache="float16")
    tensors, config = read(tmp_path / "out")
    assert not [name for name in tensors if name.endswith(("k_scale", "v_scale"))]
    assert config["kv_cache_scheme"] is None and "serve_with" not in manifest.details


@pytest.mark.parametrize("format", ["modelopt", "fp8"])
def test_where_vllm_refuses_an_e5m2_cache_it_is_refused_first(
    format: CheckpointFormat, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    match = rf"refuses an e5m2 cache with an? {format} checkpoint; use --kv e4m3"
    with pytest.raises(UnsupportedError, match=match):
        export_checkpoint(calibrations["fp8-static"], tmp_path / "out", format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "format"),
    [("mxfp4", "modelopt"), ("fp8", "fp8"), ("nvfp4", "fp8"), ("mxfp8", "modelopt")],
)
@pytest.mark.parametrize("kv_cache", ["float16", "e5m2"])
def test_a_recipe_that_the_format_cannot_hold_is_refused_whatever_the_cache(
    kv_cache: KvCacheDtype,
    recipe: str,
    format: CheckpointFormat,
    calibrations: dict[str, Path],
    tmp_path: Path,
) -> None:
    """It comes first: another cache, as its refusal says to use, would be no better."""
    held = {"modelopt": "fp8, fp8-static, fp8-block or nvfp4", "fp8": "fp8-block or fp8-static"}
    match = (
        rf"recipe {recipe}: {ATTENTION}\.q_proj has .* cannot hold; use --format"
        rf" compressed-tensors, or the schemes of {held[format]}$"
    )
    with pytest.raises(UnsupportedError, match=match):
        export_checkpoint(calibrations[recipe], tmp_path / "out", format=format, kv_cache=kv_cache)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-static", "fp8-block", "nvfp4"])
def test_modelopt_holds_the_recipes_that_its_refusal_names(
    recipe: str, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export_checkpoint(calibrations[recipe], out, format="modelopt", kv_cache="float16")
    assert read(out)[1]["quant_method"] == "modelopt"


def test_of_experts_modelopt_holds_fewer_recipes(tmp_path: Path) -> None:
    kind, settings = KNOWN["mixtral"]
    model = write_model(tmp_path / "model", kind, **settings)
    calibration = make_calibration(tmp_path / "calibration", model, Recipe.load("fp8"))
    match = r"experts\.0\..* cannot hold of experts; .* or the schemes of fp8-static or nvfp4$"
    with pytest.raises(UnsupportedError, match=match):
        export_checkpoint(calibration, tmp_path / "out", format="modelopt")


def test_an_unknown_format_is_named(calibrations: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gptq'"):
        export_checkpoint(calibrations["fp8"], tmp_path / "out", format="gptq")  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ALGORITHMS)
def test_modelopt_says_the_same_in_both_of_its_files(
    recipe: str, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    export_checkpoint(calibrations[recipe], tmp_path / "out", format="modelopt", kv_cache="float16")
    _, config = read(tmp_path / "out")
    other = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_method"] == "modelopt"
    assert config["quant_algo"] == other["quant_algo"] == ALGORITHMS[recipe]
    assert config["ignore"] == other["exclude_modules"] == ["lm_head"]
    assert config["kv_cache_scheme"] is other["kv_cache_quant_algo"] is None
    assert (other.get("group_size") == 16) == (recipe == "nvfp4")


def mixed(**overrides: str) -> Recipe:
    """fp8, but for the linears that match a pattern, which take another preset's schemes."""
    found = [
        Override(match=pattern.replace("__", "*"), weights=x.weights, activations=x.activations)
        for pattern, x in ((key, Recipe.load(name)) for key, name in overrides.items())
    ]
    return Recipe.load("fp8").model_copy(update={"name": "mixed", "overrides": tuple(found)})


def test_a_mixture_becomes_groups_that_name_their_linears(tiny_model: Path, tmp_path: Path) -> None:
    recipe = mixed(__down_proj="nvfp4").model_copy(update={"exclude": ("lm_head", "*.0.*.o_proj")})
    make_calibration(tmp_path / "cal", tiny_model, recipe)
    manifest = export_checkpoint(tmp_path / "cal", tmp_path / "out")
    tensors, config = read(tmp_path / "out")
    assert manifest.details["format"] == "compressed-tensors mixed-precision"
    groups = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert groups == {
        "float-quantized": ["Linear"],
        "nvfp4-pack-quantized": [f"model.layers.{index}.mlp.down_proj" for index in range(2)],
    }
    assert config["ignore"] == ["lm_head", f"{ATTENTION}.o_proj"]
    assert tensors["model.layers.1.mlp.down_proj.weight_packed"].dtype == U8
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == E4M3
    assert tensors[f"{ATTENTION}.o_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("format", ["modelopt", "fp8"])
def test_a_format_of_one_scheme_refuses_a_mixture(
    format: CheckpointFormat, tiny_model: Path, tmp_path: Path
) -> None:
    recipe = mixed(__self_attn__="fp8-static", __mlp__="fp8-block")
    make_calibration(tmp_path / "cal", tiny_model, recipe)
    match = r"mixes fp8 tensor .*q_proj\) and fp8 block .*gate_proj\)"
    with pytest.raises(UnsupportedError, match=match):
        export_checkpoint(tmp_path / "cal", tmp_path / "out", format=format, kv_cache="float16")


def test_linears_of_one_kernel_must_have_one_scheme(tiny_model: Path, tmp_path: Path) -> None:
    make_calibration(tmp_path / "cal", tiny_model, mixed(__up_proj="nvfp4"))
    match = re.escape(
        "gives model.layers.0.mlp.gate_proj fp8 channel weights with token inputs and"
        " model.layers.0.mlp.up_proj nvfp4 group weights with group inputs"
    )
    with pytest.raises(UnsupportedError, match=match):
        export_checkpoint(tmp_path / "cal", tmp_path / "out")


def test_the_method_of_a_scale_makes_no_other_scheme(tiny_model: Path, tmp_path: Path) -> None:
    mse = Recipe.load("fp8").weights.model_copy(update={"method": "mse"})
    other = Override(match="*.up_proj", weights=mse, activations=Recipe.load("fp8").activations)
    recipe = Recipe.load("fp8").model_copy(update={"overrides": (other,)})
    make_calibration(tmp_path / "cal", tiny_model, recipe)
    export_checkpoint(tmp_path / "cal", tmp_path / "out")
    assert len(read(tmp_path / "out")[1]["config_groups"]) == 1


@pytest.mark.parametrize("kind", ["weight_global_scale", "input_global_scale"])
def test_global_scales_of_one_kernel_must_be_one(
    kind: str, tiny_model: Path, tmp_path: Path
) -> None:
    scales = {f"{K_PROJ}.{kind}": 0.125}
    make_calibration(tmp_path / "cal", tiny_model, Recipe.load("nvfp4"), scales=scales)
    with pytest.raises(ArtifactError, match=rf"{kind} is .*q_proj and 0\.125 of {K_PROJ}"):
        export_checkpoint(tmp_path / "cal", tmp_path / "out")


def test_two_exports_are_the_same_bytes(calibrations: dict[str, Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        export_checkpoint(calibrations["nvfp4"], tmp_path / name)
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


def test_room_is_needed_for_what_is_written_and_no_more(
    calibrations: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_checkpoint(calibrations["fp8"], tmp_path / "first")
    written = (tmp_path / "first" / "model.safetensors").stat().st_size
    usage = shutil.disk_usage(tmp_path)
    spare = 64 << 20
    monkeypatch.setattr(
        "export.source.shutil.disk_usage", lambda _: usage._replace(free=written + spare)
    )
    export_checkpoint(calibrations["fp8"], tmp_path / "second")
    monkeypatch.setattr(
        "export.source.shutil.disk_usage", lambda _: usage._replace(free=written + spare - 1)
    )
    with pytest.raises(ExportError, match="the export needs"):
        export_checkpoint(calibrations["fp8"], tmp_path / "third")


@pytest.mark.parametrize("code", [0x7FC0, 0x3F80], ids=["a NaN", "a number"])
def test_an_altered_shard_is_found_by_its_hash_whatever_it_holds(
    code: int, tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    make_calibration(tmp_path / "cal", model, Recipe.load("fp8"))
    shard = model / "model.safetensors"
    start, _ = TensorFile.open(shard).span(f"{K_PROJ}.weight")
    with shard.open("r+b") as file:
        file.seek(start)
        file.write(code.to_bytes(2, "little"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ArtifactError, match="has changed since calibration"):
        export_checkpoint(tmp_path / "cal", tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_tensors_that_an_algorithm_changed_are_taken_from_the_calibration(
    tiny_model: Path, tmp_path: Path
) -> None:
    names = (f"{K_PROJ}.weight", "model.layers.0.input_layernorm.weight")
    original = TensorFile.open(tiny_model / "model.safetensors")
    same = {name: Tensor("BF16", original.read(name).codes * 0 + 0x3D80) for name in names}  # 2^-4
    make_calibration(tmp_path / "cal", tiny_model, Recipe.load("fp8"), changed=same)
    export_checkpoint(tmp_path / "cal", tmp_path / "out")
    tensors, _ = read(tmp_path / "out")
    assert (tensors[names[1]] == 2**-4).all()
    real = tensors[names[0]].float() * tensors[f"{K_PROJ}.weight_scale"]
    assert torch.allclose(real, torch.tensor(2**-4), rtol=0.07)


def test_what_octet_does_not_know_of_a_model_is_told(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "olmo2", hidden_size=256, intermediate_size=384)
    make_calibration(tmp_path / "cal", model, Recipe.load("fp8"))
    manifest = export_checkpoint(tmp_path / "cal", tmp_path / "out")
    (warning,) = manifest.details["warnings"]
    assert "an architecture that Octet does not know" in warning
    groups = read(tmp_path / "out")[1]["config_groups"]
    assert "model.layers.1.mlp.down_proj" in groups["group_0"]["targets"]


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_an_engine_that_cannot_tie_the_head_of_a_format_is_named(
    tiny_model: Path, tmp_path: Path, format: CheckpointFormat
) -> None:
    make_calibration(tmp_path / "cal", tiny_model, Recipe.load("fp8-static"))
    manifest = export_checkpoint(
        tmp_path / "cal", tmp_path / "out", format=format, kv_cache="float16"
    )
    told = manifest.details.get("warnings", [])
    assert ["vLLM 0.24" in x and "tied embeddings" in x for x in told] == (
        [True] if format == "modelopt" else []
    )


@pytest.mark.parametrize("format", ["compressed-tensors", "fp8", "modelopt"])
@pytest.mark.parametrize("method", ["max", "mse"])
def test_an_export_says_whether_an_engine_changes_its_blocks(
    tiny_model: Path, tmp_path: Path, method: ScaleMethod, format: CheckpointFormat
) -> None:
    calibration_in_blocks(tmp_path / "cal", tiny_model, method)
    manifest = export_checkpoint(
        tmp_path / "cal", tmp_path / "out", format=format, kv_cache="float16"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    told = " ".join(manifest.details.get("warnings", []))
    assert ("VLLM_USE_DEEP_GEMM_E8M0=0" in told) == (method == "mse")
    assert config["quantization_config"].get("scale_fmt") == ("ue8m0" if method == "max" else None)


def test_scales_of_no_blocks_are_not_described(tiny_model: Path, tmp_path: Path) -> None:
    make_calibration(tmp_path / "cal", tiny_model, Recipe.load("fp8"))
    manifest = export_checkpoint(tmp_path / "cal", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "scale_fmt" not in config["quantization_config"]
    assert "DEEP_GEMM" not in " ".join(manifest.details.get("warnings", []))
