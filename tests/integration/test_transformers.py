"""transformers loads compressed-tensors exports by its own quantizer, and computes as Octet does.

Its quantizer decompresses the weights and rounds each linear's input, by compressed-tensors' own
code. Octet's side is the original model with its dequantized weights in place and the inputs of its
linears rounded by `calibrate.decoder.rounding`: the logits must be the same numbers.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from calibrate.decoder.rounding import fake_quantize
from export.checkpoint.write import export_checkpoint
from export.source import Source
from octet.recipe import TensorScheme
from tests.export.conftest import make_calibration
from tests.integration.conftest import require
from tests.integration.servers import layout
from tests.integration.test_loaders import MODELS, PRESETS, SIZES, Case, dequantized, recipe_of
from tests.models import write_model

SCRIPT = Path(__file__).parent / "transformers_loader.py"
TOKENS = list(range(5, 29))
CASES = [
    *(Case("llama", recipe) for recipe in (*PRESETS, "mixed")),
    Case("qwen3", "fp8"),
    Case("qwen2", "fp8-static"),
    Case("gemma", "nvfp4"),
    Case("phi3", "mxfp4"),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Source, Path]]:
    """Each case's source, and what transformers answered; by one process."""
    require(layout.VLLM)  # its environment has compressed-tensors
    root = tmp_path_factory.mktemp("transformers")
    sizes = {key: value for key, value in SIZES.items() if "moe" not in key}
    found, jobs = {}, []
    for number, case in enumerate(CASES):
        kind, settings = MODELS[case.model]
        if not (model := root / case.model).exists():
            write_model(model, kind, **(sizes | settings))
        calibration, out = root / f"calibration-{number}", root / f"checkpoint-{number}"
        make_calibration(calibration, model, recipe_of(case))
        export_checkpoint(calibration, out)
        answer = root / f"answer-{number}"
        found[case] = (Source.open(calibration), answer.with_suffix(".safetensors"))
        jobs.append({"checkpoint": str(out), "answer": str(answer), "tokens": TOKENS})
    (root / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [str(layout.python(layout.VLLM)), "-P", str(SCRIPT), str(root / "jobs.json")],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "UNEXPECTED" not in done.stderr and "MISSING" not in done.stderr, done.stderr[-4000:]
    return found


@pytest.mark.vllm
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_logits_are_those_of_the_rounded_model(
    case: Case, loaded: dict[Case, tuple[Source, Path]]
) -> None:
    source, answer = loaded[case]
    there = load_file(answer)
    model = AutoModelForCausalLM.from_pretrained(source.checkpoint.path, dtype=torch.float32)
    with torch.no_grad():
        original = model(torch.tensor([TOKENS])).logits[0]
    for name, linear in source.quantized_linears().items():
        schemes = source.schemes(linear)
        assert schemes is not None
        weight = torch.from_numpy(dequantized(source, linear))
        if schemes[0].kind == "nvfp4":  # which compressed-tensors decompresses to bfloat16
            weight = weight.bfloat16().float()
        assert torch.equal(there[f"{name}.weight"], weight), name
        module = model.get_submodule(name)
        module.weight.data = weight
        module.register_forward_pre_hook(rounding(source, linear.name, schemes[1]))
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    distance = (there["logits"] - expected).abs().max()
    # The same arithmetic but for the order of sums; quantization itself moves logits far more.
    assert distance < 1e-3 < (expected - original).abs().max()


def rounding(source: Source, name: str, scheme: TensorScheme) -> Callable[..., Any]:
    """A hook that gives a linear its input as an engine rounds it."""

    def scale(kind: str) -> torch.Tensor:
        return torch.from_numpy(np.asarray(source.calibration.scales[f"{name}.{kind}"]))

    static = None if scheme.dynamic else scale("input_scale")
    shared = scale("input_global_scale") if scheme.two_level else None
    return lambda _, inputs: (fake_quantize(inputs[0], scheme, static, shared),)
