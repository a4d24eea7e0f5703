"""The vLLM engines whose divergence is measured, and what is expected of each."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octet.artifacts.serving_path import Expectation, ServingPath
from octet.hardware.devices import find_device
from octet.proof.declared import vllm_path
from octet.recipe import PRESETS, KvCacheDtype, Recipe

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"
Machine = Literal["cpu", "sm90"]
# The device and the version of vLLM that each machine stands for.
MACHINES: dict[Machine, tuple[str, str]] = {"cpu": ("cpu-avx512", "0.32"), "sm90": ("9.0", "0.24")}
UNTIED = "untied"  # a copy of the example whose head has a tensor of its own


@dataclass(frozen=True)
class Case:
    """One engine: a checkpoint of `recipe` (None: the original) in `format`, and a cache."""

    recipe: str | None
    cache: KvCacheDtype
    format: Literal["compressed-tensors", "modelopt", "fp8"] = "compressed-tensors"
    attention: Literal["FLASHINFER", "FLASH_ATTN"] | None = None

    @property
    def name(self) -> str:
        what = "bfloat16" if self.recipe is None else f"{self.recipe}, {self.format}"
        return f"{what}, {self.cache}{f', {self.attention}' if self.attention else ''}"

    @property
    def untied(self) -> bool:
        """vLLM does not tie the head of a ModelOpt checkpoint: NotImplementedError."""
        return self.format == "modelopt"

    @property
    def directory(self) -> str:
        return f"{self.recipe}-{self.format}-{self.cache}"

    def path(self, machine: Machine) -> ServingPath:
        recipe = None if self.recipe is None else PRESETS[self.recipe]
        pair = None if recipe is None else (recipe.weights, recipe.activations)
        device, version = MACHINES[machine]
        return vllm_path(pair, self.cache, find_device(device), version, attention=self.attention)


CASES: dict[Machine, tuple[Case, ...]] = {
    "sm90": (
        Case("fp8", "e5m2"),
        Case("fp8-static", "e5m2"),
        Case("fp8", "e4m3"),
        Case("fp8", "float16"),
        Case("fp8", "e4m3", attention="FLASHINFER"),
        Case("nvfp4", "e5m2"),
        Case("mxfp4", "e5m2"),
        Case("mxfp8", "e5m2"),
        Case("fp8-block", "e5m2"),
        Case(None, "float16"),
        Case(None, "e5m2"),
        Case("nvfp4", "float16"),
        Case("fp8-static", "e4m3", "modelopt"),
        Case("nvfp4", "e4m3", "modelopt"),
        Case("fp8", "e4m3", "modelopt"),
        Case("fp8-block", "e4m3", "fp8"),
        Case("mxfp8", "e4m3"),
        Case("mxfp4", "e4m3"),
    ),
    "cpu": (
        Case("fp8", "e5m2"),
        Case("fp8", "e4m3"),
        Case("fp8", "float16"),
        Case(None, "float16"),
        Case(None, "e5m2"),
        Case("fp8", "e4m3", "modelopt"),
    ),
}


def prepare(
    cases: list[Case], machine: Machine, directory: Path, device: Any
) -> dict[Case, Expectation]:
    """Calibrates the example, exports every checkpoint and predicts every case."""
    import torch

    from calibrate.simulate.predict import predict
    from export.checkpoint.write import export_checkpoint
    from octet.model.checkpoint import Checkpoint

    place = "cuda" if machine != "cpu" and torch.cuda.is_available() else "cpu"
    found: dict[Case, Expectation] = {}
    for name, untied in dict.fromkeys((case.recipe, case.untied) for case in cases):
        mine = [case for case in cases if (case.recipe, case.untied) == (name, untied)]
        recipe = PRESETS[name or "fp8"]
        calibration = calibrated(recipe, directory, device, untied=untied)
        model = Path(calibration.manifest.details["source"])
        paths = tuple(dict.fromkeys(case.path(machine) for case in mine))
        predicted = predict(
            Checkpoint.open(model),
            recipe,
            calibration.scales,
            calibration.golden,
            paths,
            device=place,
        )
        for case in mine:
            expectation = predicted.find(case.path(machine))
            assert expectation is not None
            found[case] = expectation
            if case.recipe is not None and not (directory / case.directory).exists():
                export_checkpoint(
                    calibration.path,
                    directory / case.directory,
                    format=case.format,
                    kv_cache=case.cache,
                )
    return found


def calibrated(recipe: Recipe, directory: Path, device: Any, *, untied: bool) -> Any:
    """The Calibration of the example for `recipe`: observed once, and derived."""
    from calibrate.options import Options
    from calibrate.pipeline import run
    from calibrate.rescale import rescale
    from octet.artifacts.calibration import Calibration

    model, suffix = EXAMPLE / "model", ""
    if untied:
        model, suffix = directory / UNTIED, f"-{UNTIED}"
        if not model.exists():
            untie(EXAMPLE / "model", model)
    first, samples = directory / f"calibration{suffix}", EXAMPLE / "samples"
    if not first.exists():  # with an E4M3 cache, so that queries are observed
        run(
            Options(
                model=model,
                samples=samples / "calibration.jsonl",
                out=first,
                recipe=PRESETS["fp8"].model_copy(update={"kv_cache": "e4m3"}),
                held_out=samples / "heldout.jsonl",
                device=device,
                predict=False,
            )
        )
    derived = directory / f"calibration-{recipe.name}{suffix}"
    if not derived.exists():
        rescale(first, derived, recipe=recipe, predict=False)
    return Calibration.load(derived)


def untie(model: Path, out: Path) -> None:
    """A copy of `model` whose head is a tensor of its own, equal to the embeddings."""
    from octet.storage.tensors import TensorFile, write_tensors

    shutil.copytree(model, out)
    file = TensorFile.open(model / "model.safetensors")
    tensors = {name: file.read(name) for name in file.names}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_tensors(out / "model.safetensors", tensors, {"format": "pt"})
    config = json.loads((out / "config.json").read_text()) | {"tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
