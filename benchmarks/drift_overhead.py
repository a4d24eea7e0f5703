"""Measures the throughput of vLLM with one step in 100 counted for `octet drift`, and without.

Needs vLLM with Octet's packages on its path, and what `octet export checkpoint` wrote:

    python benchmarks/drift_overhead.py CHECKPOINT [--python VLLM/bin/python] [--output FILE]

An engine without the plugin and one that counts are started, each in a process of its own, and
share the GPU's memory. They compute the same load in turn, in alternating order, while the other
one waits; the first time is not reported. All prompts are random tokens, and wait from the start.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_offline import ENVIRONMENT

ROOT = Path(__file__).parent.parent
ENTRY = "[vllm.general_plugins]\noctet_counting = serve.vllm_counting:register\n"
RESULT = "octet-result "


def serve(given: argparse.Namespace) -> None:
    """Runs one engine, in this process: computes the load for each line that it reads."""
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
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    say({"vllm": __version__, "gpu": gpu})
    for _ in sys.stdin:
        began = time.perf_counter()
        answers = model.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        assert tokens == given.requests * given.answer
        say({"tokens_s": tokens / seconds})


def say(result: dict[str, Any]) -> None:
    print(RESULT + json.dumps(result), flush=True)


class Engine:
    """A process with an engine, which counts into `live` if that is a directory."""

    def __init__(self, given: argparse.Namespace, plugins: Path, live: Path | None) -> None:
        paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), str(plugins)]
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": ":".join(filter(None, paths))}
        environment |= {
            "VLLM_PLUGINS": "octet_counting",
            # The plugin turns it off: both engines then compile anew.
            "VLLM_DISABLE_COMPILE_CACHE": "1",
            "OCTET_COUNT": "" if live is None else str(live),
            "OCTET_COUNT_ONE_STEP_IN": str(given.one_step_in),
            "OCTET_COUNT_WINDOW_TOKENS": "128",  # so that writing is measured too
        }
        self.process = subprocess.Popen(
            [given.python, __file__, *sys.argv[1:], "--engine"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts = self._result()

    def measure(self) -> float:
        """Computes the load; returns output tokens per second."""
        assert self.process.stdin is not None
        print("again", file=self.process.stdin, flush=True)
        return float(self._result()["tokens_s"])

    def _result(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(RESULT):
                return dict(json.loads(line.removeprefix(RESULT)))
        raise SystemExit("the engine ended without a result")


def install(directory: Path) -> None:
    """Writes the entry point that vLLM finds Octet's plugin by."""
    info = directory / "octet_counting-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octet-counting\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--kv", default="fp8_e4m3", help="vLLM's --kv-cache-dtype")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--one-step-in", type=int, default=100)
    parser.add_argument("--memory", type=float, default=0.4, help="of the GPU, for each engine")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.engine:
        serve(given)
        return
    from card import conditions, report

    found: dict[str, list[float]] = {"none": [], "counting": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        live, plugins = Path(name) / "live", Path(name) / "plugins"
        live.mkdir()
        plugins.mkdir()
        install(plugins)
        engines = {}
        for name, directory in (("none", None), ("counting", live)):
            engines[name] = Engine(given, plugins, directory)
            stack.callback(engines[name].process.terminate)
            engines[name].measure()
        for number in range(given.rounds):
            for name in list(found)[:: 1 if number % 2 == 0 else -1]:
                found[name].append(engines[name].measure())
                print(name, found[name][-1], flush=True)
        windows = len(list(live.glob("*.safetensors")))
        facts = engines["none"].facts
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
    card = conditions(
        **facts,
        windows_written=windows,
        **{name: getattr(given, name) for name in options},
    )
    report("drift_overhead", card, rows, given.output)


if __name__ == "__main__":
    main()
