"""Runs one load against one server with `vllm bench serve`, and reads its JSON.

The generator measures at the client: TTFT is the time to the first token of a request, ITL each
time between two of its tokens. It is vLLM's own, so figures compare with vLLM's. Prompts are random
tokens; end-of-sequence is ignored, so that every server generates the same number of tokens.
"""

import argparse
import json
import re
import shlex
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import BackendError, ConfigError
from serve.vllm.command import require_command
from serve.vllm.process import child_process, last_line

__all__ = ["FIGURES", "Generator", "Load", "Place", "Served"]

# Names of the figures in reports, and in the generator's JSON.
FIGURES = {
    "tokens_per_s": "output_throughput",
    "ttft_p50_ms": "p50_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_p50_ms": "p50_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
}
# vLLM's names of 8-bit caches.
_CACHES = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
_FORM = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")


@dataclass(frozen=True)
class Load:
    """`clients` concurrent requests, each with `prompt` tokens in and `output` tokens out."""

    clients: int
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> "Load":
        """Parses CONCURRENCYxINPUTxOUTPUT; raises ConfigError for anything else."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"--load {text}: write CONCURRENCYxINPUTxOUTPUT, such as 16x1024x128 for 16"
                " concurrent requests of 1024 tokens that generate 128 each"
            )
        clients, prompt, output = map(int, found.groups())
        if output < 2:
            raise ConfigError(f"--load {text}: one output token has no inter-token latency: give 2")
        return cls(clients, prompt, output)

    def __str__(self) -> str:
        return f"{self.clients}x{self.prompt}x{self.output}"


@dataclass(frozen=True)
class Place:
    """A model on a server: where requests go. `is_vllm` permits vLLM's own request fields."""

    name: str  # as the user gave it
    url: str
    model: str
    is_vllm: bool = False
    served: "Served | None" = None  # None: the server was running already


@dataclass(frozen=True)
class Served:
    """The recipe and cache that a started vLLM serves; `recipe` is None if not quantized."""

    recipe: str | None
    kv_cache: str
    tensor_parallel: int

    @classmethod
    def of(cls, checkpoint: Path, options: str) -> "Served":
        """Reads them from a checkpoint's manifest; `options` of `vllm serve` override it."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--kv-cache-dtype", default="")
        parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=0)
        given, _ = parser.parse_known_args(shlex.split(options))
        recipe, kv_cache, degree = None, "float16", 1
        if (checkpoint / MANIFEST_FILE).exists():
            manifest = Manifest.load(checkpoint, "checkpoint", verify=False)
            recipe, kv_cache = manifest.recipe.name, str(manifest.details.get("kv_cache"))
            degree = manifest.details.get("tensor_parallel") or 1
        if given.kv_cache_dtype and not (given.kv_cache_dtype == "auto" and kv_cache == "e4m3"):
            kv_cache = _CACHES.get(given.kv_cache_dtype, "float16")
        return cls(recipe, kv_cache, given.tensor_parallel_size or degree)


@dataclass(frozen=True)
class Generator:
    """The `vllm` command, and the tokenizer that makes the prompts."""

    command: str
    tokenizer: Path
    key: str | None = None

    def require_installed(self) -> None:
        """Raises ConfigError if there is no such command."""
        require_command(self.command)

    def run(self, place: Place, load: Load, *, requests: int, seed: int) -> dict[str, Any]:
        """Returns the generator's JSON of one run, and `ended`, the time at which it was written.

        Raises BackendError if the generator or one of the requests fails.
        """
        what = f"{place.name}, load {load}"
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.key is not None:
            environment["OPENAI_API_KEY"] = self.key
        with tempfile.TemporaryDirectory(prefix="octet-bench-") as folder:
            result, log = Path(folder, "result.json"), Path(folder, "log")
            words = self._words(place, load, requests, seed, result)
            code = self._execute(words, log, environment)
            if code != 0 or not result.exists():
                raise BackendError(
                    f"{what}: `{self.command} bench serve` ended with code {code}: {last_line(log)}"
                )
            try:
                found = json.loads(result.read_bytes())
                ended = result.stat().st_mtime
            except ValueError:
                raise BackendError(f"{what}: the load generator wrote no JSON") from None
        _require_complete(what, found, requests)
        return {**found, "ended": ended}

    def _execute(self, words: list[str], log: Path, environment: dict[str, str]) -> int:
        with log.open("wb") as output, child_process(words, output, environment) as process:
            return process.wait()

    def _words(self, place: Place, load: Load, requests: int, seed: int, result: Path) -> list[str]:
        words = [self.command, "bench", "serve", "--backend", "openai"]
        words += ["--base-url", place.url, "--endpoint", "/v1/completions"]
        words += ["--model", place.model, "--tokenizer", str(self.tokenizer.resolve())]
        words += ["--dataset-name", "random", "--random-input-len", str(load.prompt)]
        words += ["--random-output-len", str(load.output), "--num-prompts", str(requests)]
        words += ["--max-concurrency", str(load.clients), "--seed", str(seed)]
        words += ["--ignore-eos", "--temperature", "0", "--disable-tqdm"]
        words += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99"]
        words += ["--save-result", "--result-dir", str(result.parent)]
        words += ["--result-filename", result.name]
        if place.is_vllm:  # or its prefix cache would answer prompts of an earlier benchmark
            words += ["--extra-body", json.dumps({"cache_salt": uuid.uuid4().hex})]
        return words


def _require_complete(what: str, found: Any, requests: int) -> None:
    """Raises BackendError for a run with failed requests, or without one of the figures."""
    try:
        completed = int(found["completed"])
        failed = int(found.get("failed", requests - completed))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BackendError(f"{what}: the load generator's JSON does not say what failed") from None
    if failed or completed != requests:
        raise BackendError(
            f"{what}: {requests - completed} of {requests} requests failed, so there are no"
            " figures: see the server's log"
        )
    for name in FIGURES.values():
        value = found.get(name)
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise BackendError(
                f"{what}: the load generator reports no {name}: vLLM 0.24 or newer does"
            )
