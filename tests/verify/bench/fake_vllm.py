"""A `vllm` command whose `bench serve` writes the JSON of the real one, without any load.

The keys are those that vLLM 0.32 wrote. Each call is added to the file $FAKE_VLLM_CALLS. The
throughput of a URL is in $FAKE_VLLM_SPEEDS (JSON); $FAKE_VLLM_FAULT misbehaves.
"""

import json
import os
import stat
import sys
from itertools import pairwise
from pathlib import Path


def install(folder: Path) -> Path:
    """Writes the command into `folder`."""
    command = folder / "vllm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).resolve()} "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return command


def main(words: list[str]) -> int:
    assert words[:2] == ["bench", "serve"] and "--ignore-eos" in words
    given = {word.removeprefix("--"): value for word, value in pairwise(words)}
    given["key"] = os.environ.get("OPENAI_API_KEY", "")
    calls = Path(os.environ["FAKE_VLLM_CALLS"])
    with calls.open("a") as file:
        file.write(json.dumps(given) + "\n")
    turn = len(calls.read_text().splitlines())
    fault = os.environ.get("FAKE_VLLM_FAULT", "")
    if fault.startswith("dies at") and turn == int(fault.split()[-1]):
        print("Traceback ...\nValueError: no such thing", file=sys.stderr)
        return 1
    requests, output = int(given["num-prompts"]), int(given["random-output-len"])
    failed = 1 if fault == "fails" else 0
    speed = json.loads(os.environ.get("FAKE_VLLM_SPEEDS", "{}")).get(given["base-url"], 100.0)
    speed *= 1 + int(given["seed"]) % 3 / 10  # rounds differ
    result = {
        "model_id": given["model"],
        "num_prompts": requests,
        "max_concurrency": int(given["max-concurrency"]),
        "duration": 0.1,
        "completed": requests - failed,
        "failed": failed,
        "total_input_tokens": requests * int(given["random-input-len"]),
        "total_output_tokens": requests * (output - (fault == "short")),
        "output_throughput": speed,
    }
    for name, scale in (("ttft", 50.0), ("tpot", 10.0), ("itl", 10.0)):
        for percentile, factor in (("p50", 1.0), ("p99", 2.0)):
            result[f"{percentile}_{name}_ms"] = scale * factor * 100 / speed
    if fault == "lacks":
        del result["p99_itl_ms"]
    Path(given["result-dir"], given["result-filename"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
