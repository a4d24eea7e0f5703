"""lm-evaluation-harness' tasks, by its own command, against a running server.

Its `local-completions` model asks for the log-probabilities of a prompt (`echo`), as vLLM and
Octet's own server give them. The data sets of its tasks are its own affair.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octet.errors import BackendError, ConfigError
from octet.intervals import Interval

__all__ = ["run_tasks"]

NORMAL = 1.959964  # 97.5 % quantile: the harness gives a standard error, of many independent items


def run_tasks(
    url: str,
    model: str,
    tasks: Sequence[str],
    *,
    tokenizer: Path | None,
    include: Path | None,
    limit: int | None,
    concurrency: int,
    api_key_env: str | None,
) -> dict[str, Interval]:
    """ "task metric" -> the figure, with its 95 % interval where the harness gives an error.

    `tokenizer` is the reference's directory; without one the harness asks the server. Raises
    ConfigError where the harness is not installed, with the command that would do, or fails.
    """
    with tempfile.TemporaryDirectory(prefix="octet-") as scratch:
        asked = {"model": model, "base_url": f"{url}/v1/completions"}
        asked |= {"num_concurrent": str(concurrency), "max_retries": "3"}
        if tokenizer is not None:
            asked |= {"tokenizer": str(tokenizer.resolve()), "tokenizer_backend": "huggingface"}
        arguments = ["run", "--model", "local-completions", "--tasks", ",".join(tasks)]
        arguments += ["--model_args", ",".join(f"{key}={value}" for key, value in asked.items())]
        arguments += ["--include_path", str(include)] if include else []
        arguments += ["--limit", str(limit)] if limit else []
        command = _command(arguments)
        environment = dict(os.environ)
        if api_key_env is not None:
            environment["OPENAI_API_KEY"] = environment.get(api_key_env, "")
        done = subprocess.run(
            [*command, *arguments, "--output_path", scratch],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        found = sorted(Path(scratch).rglob("results*.json"))
        if done.returncode or not found:
            said = [line for line in done.stdout.splitlines() if line.strip()][-1:]
            raise BackendError(
                f"lm_eval ended with {done.returncode}: {said[0] if said else 'it said nothing'};"
                f" try it yourself: {shlex.join(['lm_eval', *arguments])}"
            )
        return _figures(json.loads(found[-1].read_text())["results"])


def _command(arguments: Sequence[str]) -> list[str]:
    """The harness in this environment, or else the one on the path."""
    if importlib.util.find_spec("lm_eval") is not None:
        return [sys.executable, "-m", "lm_eval"]
    if (path := shutil.which("lm_eval")) is not None:
        return [path]
    raise ConfigError(
        "--tasks needs lm-evaluation-harness: pip install 'octet[evaluate]', or run"
        f" elsewhere: {shlex.join(['lm_eval', *arguments])}"
    )


def _figures(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Interval]:
    """Its `results`: {task: {"acc,none": 0.5, "acc_stderr,none": 0.01, "alias": ...}}."""
    found = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            reach = NORMAL * error if isinstance(error, int | float) else float("nan")
            name = f"{task} {metric}" if kind == "none" else f"{task} {metric} ({kind})"
            found[name] = Interval(float(value), value - reach, value + reach)
    return found
