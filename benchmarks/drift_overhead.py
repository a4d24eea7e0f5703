"""Measures the throughput of vLLM with one step in 100 counted for `octet drift`, and without.

Needs vLLM, and what `octet export checkpoint` wrote:

    python benchmarks/drift_overhead.py CHECKPOINT [--python VLLM/bin/python] [--output FILE]

Engines are started one after the other, each in a process of its own, and share the GPU's memory:
one as vLLM starts by itself, one that counts, and one with the model runner that counting takes.
They compute the same load in turn, in alternating order, while the others wait; the first time is
not reported. All prompts are random tokens, and wait from the start. What is measured so far is
written after each round.

On a CPU, give VLLM_CPU_KVCACHE_SPACE=1, --eager, and a small load. One with AMX also needs
tests/integration/servers/no_mkldnn on PYTHONPATH.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_offline import ENVIRONMENT

ROOT = Path(__file__).parent.parent
ENTRY = "[vllm.general_plugins]\noctet_counting = serve.vllm_counting:register\n"
PLAIN, COUNTS, RUNNER = "by itself", "counting", "first model runner"
WINDOW_TOKENS = 1024  # a quarter of the default, so that writing is measured too
ERROR = re.compile(
    r"\bValidationError: .+(?:\n  .+|\n\w+\n  .+)"  # pydantic's
    r"|\b\w+(?:Error|Exception): .+"
    r"|Worker proc .+ died .+"
)
ENDING_S = 15.0  # that an idle engine may take to end


def serve(given: argparse.Namespace) -> None:
    """Runs one engine, in this process: computes the load for each line that it reads."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout

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
    sampling = SamplingParams(
        temperature=0, max_tokens=given.answer, ignore_eos=True, detokenize=False
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(json.dumps({"vllm": __version__, "gpu": gpu}), file=results, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        answers = model.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        assert tokens == given.requests * given.answer
        print(json.dumps({"tokens_s": tokens / seconds}), file=results, flush=True)


class Engine:
    """A process with an engine, and with `variables` in its environment."""

    def __init__(
        self, name: str, given: argparse.Namespace, plugins: Path, variables: dict[str, str]
    ) -> None:
        paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), str(plugins)]
        environment = dict(os.environ) | ENVIRONMENT
        environment |= {
            "PYTHONPATH": ":".join(filter(None, paths)),
            "VLLM_PLUGINS": "octet_counting",
            "OCTET_COUNT": "",
        }
        environment |= variables
        self.name = f"the engine {name!r}"
        self.failed = False
        descriptor, log = tempfile.mkstemp(prefix="drift_overhead-", suffix=".log")
        self.log = Path(log)
        try:
            self.process = subprocess.Popen(
                [given.python, __file__, *sys.argv[1:], "--kv", given.kv, "--engine"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=descriptor,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self.log.unlink()
            raise SystemExit(f"{given.python}: {error.strerror}; give a Python with vLLM") from None
        finally:
            os.close(descriptor)
        threading.Thread(target=self._end_group, daemon=True).start()

    def measure(self) -> float:
        """Computes the load; returns output tokens per second."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, as `result` says
            print("again", file=self.process.stdin, flush=True)
        return float(self.result()["tokens_s"])

    def result(self) -> dict[str, Any]:
        """Waits for the next result of the engine."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self.failed = True  # its log stays
        found = ERROR.search(self.log.read_text(errors="replace"))  # others follow from the first
        reason = " ".join(found[0].split()) if found else f"exit status {self.process.wait()}"
        raise SystemExit(f"{self.name} ended: {reason} (log: {self.log})")

    def close(self) -> None:
        """Ends the engine and all its processes."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if not self.failed:
            self.log.unlink()

    def _end_group(self) -> None:
        """Waits for the engine's end, then ends what it started, which holds its pipes open."""
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            os.killpg(self.process.pid, signal.SIGKILL)


def install(directory: Path) -> None:
    """Writes the entry point that vLLM finds Octet's plugin by."""
    info = directory / "octet_counting-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octet-counting\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY)


def cache_of(checkpoint: Path) -> str:
    """Returns the cache that `checkpoint` is served with; ends if its activations can't be counted.

    An engine would say the same, after it has loaded.
    """
    from octet.artifacts.manifest import Manifest
    from octet.errors import OctetError

    try:
        manifest = Manifest.load(checkpoint, "checkpoint", verify=False)
    except OctetError as error:
        raise SystemExit(str(error)) from None
    if manifest.calibration is None:
        raise SystemExit(f"{checkpoint}: names no calibration to compare live activations with")
    return str(manifest.details.get("serve_with", "")).rpartition(" ")[2] or "auto"


def results(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Returns the rows of the report: tokens per second of each engine, and ratios of a round."""
    ratios = {
        f"{COUNTS}, to {other}": [a / b for a, b in zip(found[COUNTS], found[other], strict=True)]
        for other in (PLAIN, RUNNER)
    }
    return [
        {
            "engine": name,
            "tokens_s or ratio": statistics.median(x),
            "least": min(x),
            "most": max(x),
            "each": x,
        }
        for name, x in (found | ratios).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--kv", help="vLLM's --kv-cache-dtype (default: the checkpoint's)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=240.0, help="after which none begins")
    parser.add_argument("--one-step-in", type=int, default=100)
    parser.add_argument("--memory", type=float, default=0.28, help="of the GPU, for each engine")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.engine:
        serve(given)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends the engines
    began = time.monotonic()
    cache = cache_of(given.checkpoint)
    given.kv = given.kv or cache
    from card import conditions, report

    options = ("kv", "requests", "prompt", "answer", "one_step_in", "eager")
    facts = {name: getattr(given, name) for name in options}
    card = conditions(**facts, window_tokens=WINDOW_TOKENS)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        live, plugins = Path(directory) / "live", Path(directory) / "plugins"
        install(plugins)
        variables = {
            PLAIN: {},
            COUNTS: {
                "OCTET_COUNT": str(live),
                "OCTET_COUNT_ONE_STEP_IN": str(given.one_step_in),
                "OCTET_COUNT_WINDOW_TOKENS": str(WINDOW_TOKENS),
            },
            RUNNER: {"VLLM_USE_V2_MODEL_RUNNER": "0"},
        }
        engines: dict[str, Engine] = {}
        for name, own in variables.items():
            engine = engines[name] = Engine(name, given, plugins, own)
            stack.callback(engine.close)
            card |= engine.result()
            if name == COUNTS and not live.is_dir():  # the plugin makes it
                raise SystemExit(f"{engine.name} does not count: vLLM has not loaded the plugin")
            print(f"{name}: started after {time.monotonic() - began:.0f} s", flush=True)
            engine.measure()
        found: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(given.rounds):
            if number and time.monotonic() - began > given.seconds:
                break
            for name in list(found)[:: 1 if number % 2 == 0 else -1]:
                found[name].append(engines[name].measure())
            card["rounds"] = number + 1
            card["windows_written"] = len(list(live.glob("*.safetensors")))
            report("drift_overhead", card, results(found), given.output)


if __name__ == "__main__":
    main()
