"""Runs lm-evaluation-harness' tasks against a server, by the harness' own command.

Its `local-completions` model requests the log-probabilities of a prompt (`echo`), as vLLM and
Octet's own server return them. The harness obtains the data sets of its tasks itself.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octet.errors import BackendError, ConfigError
from octet.statistics import Interval
from verify.evaluation.target import ServedTarget

__all__ = ["Harness"]

NORMAL = 1.959964  # 97.5 % quantile: the harness gives a standard error over many independent items


@dataclass(frozen=True)
class Harness:
    """Options of the harness, the same for each server.

    `tokenizer` is the reference's directory; without one, the harness queries the server.
    """

    tasks: tuple[str, ...]
    tokenizer: Path | None = None
    include: Path | None = None
    limit: int | None = None
    concurrency: int = 4
    api_key_env: str | None = None

    def require_installed(self, target: ServedTarget) -> None:
        """Raises ConfigError if the harness is not installed.

        The message has the command that evaluates `target` from elsewhere.
        """
        if not _command():
            raise ConfigError(
                "--tasks needs lm-evaluation-harness: pip install 'octet-llm[evaluate]', or run"
                f" elsewhere: {shlex.join(['lm_eval', *self._arguments(target)])}"
            )

    def figures(self, target: ServedTarget) -> dict[str, Interval]:
        """Returns "task metric" -> result, with a 95 % interval if the harness reports an error.

        Raises BackendError if the harness fails, with the command that would show more.
        """
        arguments = self._arguments(target)
        with tempfile.TemporaryDirectory(prefix="octet-") as scratch:
            done = subprocess.run(
                [*_command(), *arguments, "--output_path", scratch],
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            found = sorted(Path(scratch).rglob("results*.json"))
            if done.returncode or not found:
                said = [line for line in done.stdout.splitlines() if line.strip()] or ["nothing"]
                raise BackendError(
                    f"lm_eval ended with code {done.returncode}, and its last line is: {said[-1]};"
                    f" run it yourself to see more: {shlex.join(['lm_eval', *arguments])}"
                )
            return _figures(json.loads(found[-1].read_text("utf-8"))["results"])

    def _arguments(self, target: ServedTarget) -> list[str]:
        model_args = {"model": target.model, "base_url": f"{target.url}/v1/completions"}
        model_args |= {"num_concurrent": str(self.concurrency), "max_retries": "3"}
        if target.longest is not None:  # else it silently cuts prompts at 2,047 tokens
            model_args["max_length"] = str(target.longest + 1)
        if self.tokenizer is not None:
            model_args |= {
                "tokenizer": str(self.tokenizer.resolve()),
                "tokenizer_backend": "huggingface",
            }
        arguments = ["run", "--model", "local-completions", "--tasks", ",".join(self.tasks)]
        arguments += [
            "--model_args",
            ",".join(f"{key}={value}" for key, value in model_args.items()),
        ]
        arguments += ["--include_path", str(self.include)] if self.include else []
        return arguments + (["--limit", str(self.limit)] if self.limit else [])

    def _environment(self) -> dict[str, str]:
        """Returns this process's environment, with only the named key as OPENAI_API_KEY.

        The harness would send any OPENAI_API_KEY to any server.
        """
        environment = dict(os.environ)
        environment.pop("OPENAI_API_KEY", None)
        if self.api_key_env is not None:
            environment["OPENAI_API_KEY"] = os.environ.get(self.api_key_env, "")
        return environment


def _command() -> list[str]:
    """Returns the command of the harness in this environment or on the path; empty if none."""
    if importlib.util.find_spec("lm_eval") is not None:
        return [sys.executable, "-m", "lm_eval"]
    path = shutil.which("lm_eval")
    return [] if path is None else [path]


def _figures(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Interval]:
    """Parses `results`: {task: {"acc,none": 0.5, "acc_stderr,none": 0.01, "alias": ...}}."""
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
