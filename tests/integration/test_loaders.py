"""The real vLLM loads every checkpoint format, bit for bit, with or without a kernel for it here.

Its own classes build the model and its own loader fills it (see vllm_loader.py); kernels alone are
left out. Each tensor of the export must be in its place, each parameter of the model filled by one,
and what vLLM's own functions dequantize must be what Octet says that the weights have become.
"""

import json
import os
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.decoder.rounding import fake_quantize
from calibrate.scales.weights import scale_of_weight
from calibrate.simulate.model import rounded_inputs, with_power_scales
from export.checkpoint.write import CheckpointFormat, export_checkpoint
from export.source import Source
from octet.artifacts.serving_path import ServingPath
from octet.model.spec import Linear
from octet.numerics import formats, microscaling, scaling
from octet.numerics.bits import unpack_e2m1
from octet.recipe import Override, Recipe
from octet.storage.tensors import Tensor
from tests.export.conftest import make_calibration
from tests.integration.conftest import require
from tests.integration.servers import layout
from tests.models import write_model

SCRIPT = Path(__file__).parent / "vllm_loader.py"
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "python-lm" / "model"
# Blocks of 128 and groups of 32 fit; two KV heads, one head's size not hidden / heads.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "num_attention_heads": 8,
    "moe_intermediate_size": 128,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"head_dim": 32}),  # vLLM takes hidden / heads, whatever head_dim says
    "qwen3": ("qwen3", {}),  # tied embeddings
    "gemma": ("gemma", {}),
    "phi3": ("phi3", {"num_attention_heads": 4}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmo2": ("olmo2", {}),  # unknown to Octet
    "granite": ("granite", {}),
}
CACHE_DTYPES = {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto"}
CACHE_SCALES = {
    "model.layers.0.self_attn.k_scale": 0.5,
    "model.layers.1.self_attn.v_scale": 0.25,
    "model.layers.0.self_attn.q_scale_e4m3": 0.125,
}


@dataclass(frozen=True)
class Case:
    model: str
    recipe: str
    format: CheckpointFormat = "compressed-tensors"
    kv_cache: str = "e5m2"

    def __str__(self) -> str:
        return f"{self.model} {self.recipe} {self.format} {self.kv_cache}"


GROUPED = ("mxfp8", "mxfp4", "nvfp4")
PRESETS = ("fp8", "fp8-static", "fp8-block", *GROUPED)
CASES = [
    *(Case("llama", recipe) for recipe in (*PRESETS, "mixed", "channel-static")),
    *(Case("llama", recipe, kv_cache="e4m3") for recipe in ("fp8", "fp8-block", "nvfp4")),
    Case("llama", "fp8-static", "modelopt", "e4m3"),
    Case("llama", "fp8", "modelopt", "float16"),
    Case("llama", "fp8-block", "modelopt", "e4m3"),
    Case("llama", "nvfp4", "modelopt", "e4m3"),
    Case("llama", "fp8-block", "fp8", "e4m3"),
    Case("llama", "fp8-static", "fp8", "float16"),
    *(Case(model, "fp8") for model in ("mistral", "llama-biases", "olmo2", "granite", "example")),
    *(
        Case(model, recipe)
        for model in ("qwen2", "qwen3", "gemma")
        for recipe in ("fp8", "fp8-static", "nvfp4")
    ),
    *(Case("phi3", recipe, kv_cache="e4m3") for recipe in PRESETS),
    Case("phi3", "fp8-static", "modelopt", "e4m3"),
    Case("phi3", "nvfp4", "modelopt", "e4m3"),
    Case("phi3", "fp8-block", "fp8", "e4m3"),
    *(Case("qwen3_moe", recipe) for recipe in (*PRESETS, "mixed")),
    *(Case("mixtral", recipe) for recipe in ("fp8", "fp8-static", "fp8-block", "nvfp4")),
    Case("mixtral", "fp8-static", "modelopt", "float16"),
    Case("qwen3_moe", "nvfp4", "modelopt", "float16"),
    Case("qwen3_moe", "fp8-block", "fp8", "float16"),
    Case("example", "nvfp4"),
]


def recipe_of(case: Case) -> Recipe:
    if case.recipe == "mixed":  # attention in FP8, the rest in NVFP4; one MLP in MXFP8, one kept
        fp8, mxfp8 = Recipe.load("fp8"), Recipe.load("mxfp8")
        found = Recipe.load("nvfp4").model_copy(
            update={
                "name": "mixed",
                "overrides": (
                    Override(
                        match="*.self_attn.*", weights=fp8.weights, activations=fp8.activations
                    ),
                    Override(
                        match="*layers.0.mlp.*",
                        weights=mxfp8.weights,
                        activations=mxfp8.activations,
                    ),
                ),
                "exclude": ("lm_head", "*.gate", "*.1.self_attn.o_proj"),
            }
        )
    elif case.recipe == "channel-static":
        static = Recipe.load("fp8-static").activations
        found = Recipe.load("fp8").model_copy(update={"activations": static})
    else:
        found = Recipe.load(case.recipe)
    return found.model_copy(update={"kv_cache": case.kv_cache})


@dataclass(frozen=True)
class Loaded:
    """What was exported, and what vLLM made of it."""

    case: Case
    source: Source
    written: dict[str, torch.Tensor]
    error: str | None
    parameters: dict[str, torch.Tensor]
    dequantized: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Loaded]:
    """Every case, loaded by one process."""
    require(layout.VLLM)
    root = tmp_path_factory.mktemp("loaders")
    models = {"example": EXAMPLE}
    for name, (kind, settings) in MODELS.items():
        sizes = SIZES if "moe" in kind else {k: v for k, v in SIZES.items() if "moe" not in k}
        models[name] = write_model(root / "models" / name, kind, **(sizes | settings))
    sources, jobs = {}, []
    for number, case in enumerate(CASES):
        calibration, out = root / f"calibration-{number}", root / f"checkpoint-{number}"
        make_calibration(calibration, models[case.model], recipe_of(case), scales=CACHE_SCALES)
        export_checkpoint(calibration, out, format=case.format)
        sources[case] = (out, Source.open(calibration))
        jobs.append(job(out, root / f"answer-{number}", CACHE_DTYPES[case.kv_cache]))
    run(jobs, root)
    found = {}
    for number, (case, (out, source)) in enumerate(sources.items()):
        error, tensors = answer(root / f"answer-{number}")
        prefix = "dequantized/"
        found[case] = Loaded(
            case,
            source,
            {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()},
            error,
            {k: v for k, v in tensors.items() if not k.startswith(prefix)},
            {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)},
        )
    return found


def job(checkpoint: Path, answer: Path, kv_cache_dtype: str, **more: Any) -> dict[str, Any]:
    paths = {"checkpoint": str(checkpoint), "answer": str(answer)}
    return paths | {"kv_cache_dtype": kv_cache_dtype} | more


def run(jobs: list[dict[str, Any]], root: Path) -> None:
    (root / "jobs.json").write_text(json.dumps(jobs))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CACHE_ROOT": str(layout.VLLM / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [str(layout.python(layout.VLLM)), "-P", str(SCRIPT), str(root / "jobs.json")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def answer(path: Path) -> tuple[str | None, dict[str, torch.Tensor]]:
    error = json.loads(path.with_suffix(".json").read_text())["error"]
    return error, load_file(path.with_suffix(".safetensors"))


@pytest.mark.vllm
@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllm_puts_every_tensor_in_its_place(case: Case, loaded: dict[Case, Loaded]) -> None:
    found = loaded[case]
    assert found.error is None
    expected = as_vllm_names_them(found.written, found.parameters)
    for name, tensor in expected.items():
        there = found.parameters[name]
        if name.endswith(("k_scale", "v_scale", "q_scale")):  # in bfloat16 in two of the formats
            assert torch.equal(there.flatten(), tensor.to(there.dtype).flatten()), name
        else:
            assert there.dtype == tensor.dtype, name
            assert torch.equal(bytes_of(there), bytes_of(tensor)), name
    cache = ("q_scale", "k_scale", "v_scale", "prob_scale", "zero_point")
    unfilled = found.parameters.keys() - expected.keys()
    assert all(".attn." in name and name.endswith(cache) for name in unfilled), unfilled


@pytest.mark.vllm
@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllm_dequantizes_to_the_weights_that_octet_means(
    case: Case, loaded: dict[Case, Loaded]
) -> None:
    found = loaded[case]
    groups: dict[str, list[Linear]] = defaultdict(list)
    for name, linear in found.source.quantized_linears().items():
        if ".experts." not in name:  # those are compared code by code
            groups[fused_name(name)[0]].append(linear)
    assert found.dequantized.keys() == groups.keys() and groups
    for name, linears in groups.items():
        meant = np.concatenate([dequantized(found.source, linear) for linear in linears])
        there = found.dequantized[name].numpy()
        if case.recipe in ("mxfp8", "mixed"):  # vLLM's function rounds them to bfloat16
            assert np.abs(there - meant).max() <= np.abs(meant).max() * 2**-8, name
            continue
        # A divisor is rounded, and its reciprocal is rounded again: two units in the last place.
        np.testing.assert_allclose(there, meant, rtol=3e-7, atol=0, err_msg=name)


def dequantized(source: Source, linear: Linear) -> np.ndarray:
    """float32 [N, K]: codes times scales, as `octet` multiplies them."""
    schemes = source.schemes(linear)
    assert schemes is not None
    fmt = formats.format_named(schemes[0].format)
    granularity = scaling.Granularity.of(schemes[0].granularity, schemes[0].group_size)
    codes = source.weight_codes(linear)
    codes = codes if fmt.bits == 8 else unpack_e2m1(codes)
    scale = source.weight_scale(linear)
    factor = microscaling.combined(scale, source.weight_global_scale(linear))
    return scaling.dequantize(codes, factor, fmt, granularity)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def as_vllm_names_them(
    written: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parameters that the tensors of a checkpoint make: q/k/v, gate/up and experts joined."""
    parts: dict[str, dict[Any, torch.Tensor]] = defaultdict(dict)
    expected = {}
    for name, tensor in written.items():
        module, _, kind = name.rpartition(".")
        if ".self_attn." in name and kind in ("q_scale", "k_scale", "v_scale", "output_scale"):
            attention, _, projection = module.partition(".self_attn")
            which = projection[1] if kind == "output_scale" else kind[0]
            expected[f"{attention}.self_attn.attn.{which}_scale"] = tensor
            continue
        if ".experts." in name:
            experts, _, inside = module.partition(".experts.")
            index, _, projection = inside.partition(".")
            part = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.get(
                projection, projection
            )
            joined = "w2" if part == "w2" else "w13"
            full = f"{experts}.experts.routed_experts.{joined}_{kind}"
            parts[full][int(index), part] = tensor
            continue
        fused, part = fused_name(module)
        parts[f"{fused}.{kind}"][part] = tensor
    for name, found in parts.items():
        if ".routed_experts." in name:
            expected[name] = join_experts(found, parameters[name])
        else:
            expected[name] = join([found[key] for key in sorted(found)], parameters[name])
    return expected


def fused_name(module: str) -> tuple[str, str]:
    """The module that vLLM joins `module` into, and which part it is, in order."""
    parent, _, projection = module.rpartition(".")
    for joined, names in (("qkv_proj", "q k v"), ("gate_up_proj", "gate up")):
        for index, part in enumerate(names.split()):
            if projection == f"{part}_proj":
                return f"{parent}.{joined}", str(index)
    return module, ""


def join(found: list[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    """Rows after one another; scales of whole tensors, one for each part that vLLM knows."""
    if all(tensor.numel() == 1 for tensor in found) and parameter.ndim <= 1:
        flat = torch.cat([tensor.reshape(1) for tensor in found])
        return flat if len(flat) == parameter.numel() else flat.expand(parameter.numel())
    return torch.cat(found).reshape(parameter.shape)


def join_experts(found: dict[Any, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    rows = []
    for index in sorted({index for index, _ in found}):
        own = [tensor for (expert, _), tensor in sorted(found.items()) if expert == index]
        scalar = own[0].numel() == 1
        whole = torch.cat([tensor.reshape(1) for tensor in own]) if scalar else torch.cat(own)
        if scalar and parameter.ndim == 1:  # one for both; they are equal
            assert (whole == whole[0]).all()
            whole = whole[:1]
        rows.append(whole)
    return torch.stack(rows).reshape(parameter.shape)


DEEP_GEMM = """
import sys
import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
given = load_file(sys.argv[1])
codes, scales = given["codes"].view(torch.float8_e4m3fn), given["scales"]
fp8_utils.requant_weight_ue8m0_inplace(codes, scales)
with set_current_vllm_config(VllmConfig()):
    quantize = QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=True)
    inputs, of_inputs = quantize.forward_native(given["inputs"])
save_file({"codes": codes.float(), "scales": scales, "inputs": inputs.float(),
           "of_inputs": of_inputs.contiguous()}, sys.argv[2])
"""


@pytest.mark.vllm
@pytest.mark.parametrize("powers", [False, True], ids=["another tool's scales", "ours"])
def test_vllm_rounds_scales_of_blocks_for_deep_gemm_as_simulated(
    tmp_path: Path, powers: bool
) -> None:
    require(layout.VLLM)
    generator = torch.Generator().manual_seed(5)
    weights, inputs = Recipe.load("fp8-block").pairs[0]
    weight = torch.randn(384, 512, generator=generator) * torch.logspace(-4, 1, 512)
    x = torch.randn(64, 512, generator=generator) * torch.logspace(-2, 2, 512)
    scale = weight.reshape(3, 128, 4, 128).abs().amax((1, 3)) / 448
    if powers:
        scale = torch.from_numpy(scale_of_weight("x", Tensor.of(weight.numpy()), weights).scale)
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    save_file({"codes": codes.view(torch.uint8), "scales": scale, "inputs": x}, tmp_path / "given")
    files = [str(tmp_path / name) for name in ("given", "found")]
    command = [str(layout.python(layout.VLLM)), "-P", "-c", DEEP_GEMM, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = load_file(tmp_path / "found")
    again = theirs["scales"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    schemes = {"x": (weights, inputs)}
    ours = with_power_scales({"x": codes.float() * spread}, schemes)["x"]
    assert torch.equal(theirs["codes"] * again, ours)
    assert torch.equal(codes.float() * spread, ours) == powers
    (_, rounded) = rounded_inputs(schemes, ServingPath(kv_cache="e5m2", power_scales=True))["x"]
    of_inputs = theirs["of_inputs"].repeat_interleave(128, 1)
    assert torch.equal(theirs["inputs"] * of_inputs, fake_quantize(x, rounded))
