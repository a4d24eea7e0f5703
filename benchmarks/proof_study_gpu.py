"""Records what vLLM answers on a GPU to the pool of prompts of the proof study, offline.

    python benchmarks/proof_study_gpu.py DIRECTORY OUT     writes OUT/answers-<server>.jsonl.gz

DIRECTORY holds the checkpoints that `proof_study_servers.py` makes (`under`, `under-model`,
`plain`; of broken ones the tensors are changed here) and `inputs/pool.json`, the prompts. The first
engine runs alone, for it compiles kernels; the others run together. `proof_study.py` scores the
answers, put beside those simulations.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_offline import ENVIRONMENT, engine

TOP, POSITIONS = 20, 8
LAYER = 3
MODEL = Path(__file__).parents[1] / "examples" / "python-lm" / "model"
# name: checkpoint, cache; the first is right
SERVERS = {
    "under-correct": ("under", "fp8_e5m2"),
    "under-nokscale": ("under-nokscale", "fp8_e5m2"),
    "under-halved": ("under-halved", "fp8_e5m2"),
    "under-bf16-e5m2": ("under-model", "fp8_e5m2"),
    "under-bf16-auto": ("under-model", "auto"),
    "under-e4m3": ("under", "fp8_e4m3"),
    "plain-correct": ("plain", "fp8_e5m2"),
    "plain-bf16-e5m2": (str(MODEL), "fp8_e5m2"),
    "plain-e4m3": ("plain", "fp8_e4m3"),
}


def main() -> None:
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
        return
    directory, out = map(Path, sys.argv[1:3])
    break_(directory)
    first, *others = SERVERS
    print(first, run(first, directory, out).wait(), flush=True)
    running = {name: run(name, directory, out) for name in others}
    for name, process in running.items():
        print(name, process.wait(), flush=True)


def break_(directory: Path) -> None:
    """`under` without its k_scale, and with half the weight scales of one layer."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "under" / "model.safetensors")
    halved = {
        name: x / 2 if f".layers.{LAYER}." in name and name.endswith(".weight_scale") else x
        for name, x in tensors.items()
    }
    kept = {name: x for name, x in tensors.items() if not name.endswith(".k_scale")}
    assert len(kept) < len(tensors)
    for name, changed in (("halved", halved), ("nokscale", kept)):
        shutil.copytree(directory / "under", directory / f"under-{name}", dirs_exist_ok=True)
        path = directory / f"under-{name}" / "model.safetensors"
        path.unlink()
        save_file(changed, path, {"format": "pt"})


def run(name: str, directory: Path, out: Path) -> "subprocess.Popen[bytes]":
    checkpoint, cache = SERVERS[name]
    log = (out / f"{name}.log").open("wb")
    answers = out / f"answers-{name}.jsonl.gz"
    prompts = directory / "inputs" / "pool.json"
    command = [sys.executable, __file__, "--serve", directory / checkpoint, cache, prompts, answers]
    return subprocess.Popen(
        list(map(str, command)), stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT}
    )


def serve(checkpoint: str, cache: str, prompts: str, answers: str) -> None:
    """Records, in a process of its own, every prompt's greedy answer, with its likeliest tokens."""
    from vllm import SamplingParams, TokensPrompt

    started = time.perf_counter()
    llm = engine(checkpoint, cache, memory=0.08)
    sampling = SamplingParams(max_tokens=POSITIONS, temperature=0, logprobs=TOP, detokenize=False)
    pool = json.loads(Path(prompts).read_text())
    asked = [TokensPrompt(prompt_token_ids=ids) for draw in pool for _, ids in draw]
    with gzip.open(answers, "wt") as file:
        for output in llm.generate(asked, sampling, use_tqdm=False):
            print(json.dumps(_answer(output.outputs[0])), file=file)
    print(f"{time.perf_counter() - started:.0f} s")


def _answer(output: Any) -> dict[str, Any]:
    tops = [
        {token: round(x.logprob, 6) for token, x in position.items()}
        for position in output.logprobs
    ]
    return {"tokens": list(output.token_ids), "tops": tops}


if __name__ == "__main__":
    main()
