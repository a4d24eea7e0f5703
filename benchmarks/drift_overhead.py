"""Measures the throughput of vLLM with one step in 100 counted for `octet drift`, and without.

Needs vLLM with Octet's packages on its path, and what `octet export checkpoint` wrote:

    python benchmarks/drift_overhead.py CHECKPOINT [--python VLLM/bin/python] [--output FILE]

Each engine runs in a process of its own, one after another: in each round one without the plugin
and one that counts, in alternating order. An engine computes the load twice and reports the second,
so that no compilation is timed. All prompts are random tokens, and wait from the start.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_offline import ENVIRONMENT

ROOT = Path(__file__).parent.parent
ENTRY = "[vllm.general_plugins]\noctet_counting = serve.vllm_counting:register\n"
RESULT = "octet-result "


def serve(given: argparse.Namespace) -> None:
    """Runs one engine, in this process; prints its figures."""
    import random

    import torch
    from vllm import LLM, SamplingParams, __version__

    model = LLM(
        str(given.checkpoint),
        kv_cache_dtype=given.kv,
        max_model_len=given.prompt + given.answer,
        max_num_seqs=given.requests,
        enforce_eager=given.eager,
        enable_prefix_caching=False,
        gpu_memory_utilization=given.memory,
        seed=0,
    )
    draw = random.Random(0)
    vocabulary = json.loads((given.checkpoint / "config.json").read_text())["vocab_size"]
    prompts = [
        {"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(given.prompt)]}
        for _ in range(given.requests)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=given.answer, ignore_eos=True)
    for _ in range(2):
        began = time.perf_counter()
        answers = model.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    assert tokens == given.requests * given.answer
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(
        RESULT + json.dumps({"tokens_s": tokens / seconds, "vllm": __version__, "gpu": gpu}),
        flush=True,
    )


def measure(given: argparse.Namespace, directory: Path | None) -> dict[str, Any]:
    """Returns the figures of a new engine, which counts into `directory` if there is one."""
    with tempfile.TemporaryDirectory() as plugins:
        info = Path(plugins) / "octet_counting-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octet-counting\nVersion: 0\n")
        (info / "entry_points.txt").write_text(ENTRY)
        paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), plugins]
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": ":".join(filter(None, paths))}
        environment |= {
            "VLLM_PLUGINS": "octet_counting",
            # The plugin turns it off: both engines then compile anew.
            "VLLM_DISABLE_COMPILE_CACHE": "1",
            "OCTET_COUNT": "" if directory is None else str(directory),
            "OCTET_COUNT_ONE_STEP_IN": str(given.one_step_in),
            "OCTET_COUNT_WINDOW_TOKENS": "128",  # so that writing is measured too
        }
        done = subprocess.run(
            [given.python, __file__, *sys.argv[1:], "--engine"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return dict(json.loads(line.removeprefix(RESULT)))
    raise SystemExit("the engine printed no result")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--kv", default="fp8_e4m3", help="vLLM's --kv-cache-dtype")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-step-in", type=int, default=100)
    parser.add_argument("--memory", type=float, default=0.8, help="share of the GPU's")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.engine:
        serve(given)
        return
    from card import conditions, report

    found: dict[str, list[float]] = {"none": [], "counting": []}
    engine: dict[str, Any] = {}
    windows = 0
    for number in range(given.rounds):
        for name in list(found)[:: 1 if number % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory() as live:
                engine = measure(given, None if name == "none" else Path(live))
                windows += len(list(Path(live).glob("*.safetensors")))
            found[name].append(engine["tokens_s"])
            print(name, engine, flush=True)
    if not windows:
        raise SystemExit("no window was written: nothing was counted")
    ratios = [a / b for a, b in zip(found["counting"], found["none"], strict=True)]
    rows = [
        {"engine": name, "tokens_s": statistics.median(x), "least": min(x), "most": max(x)}
        for name, x in found.items()
    ]
    rows.append(
        {
            "engine": "ratio",
            "tokens_s": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
    )
    options = ("kv", "requests", "prompt", "answer", "rounds", "one_step_in", "eager")
    facts = conditions(
        gpu=engine["gpu"],
        vllm=engine["vllm"],
        windows_written=windows,
        **{name: getattr(given, name) for name in options},
    )
    report("drift_overhead", facts, rows, given.output)


if __name__ == "__main__":
    main()
