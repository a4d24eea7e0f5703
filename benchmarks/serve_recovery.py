"""Serves a model with `octet serve`, kills its engine under load, and forces each way to serve it.

    python benchmarks/serve_recovery.py --python PYTHON [--model MODEL] [--output FILE] [-- FLAGS]

Each case is one command, from an unquantized model to the first answer of a proven server. In the
first, the engine is killed (SIGKILL) when the first of 48 requests has a token. The others make
native FP8 give up, then start with the original, and then with options that vLLM refuses. Exits 1
if a request without a token is lost, or a case is served in another way than it should be.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import aiohttp
from card import conditions, report
from vllm_cases import EXAMPLE

from serve.vllm.command import WEIGHT_ONLY
from serve.vllm.process import child_process, free_port

REQUESTS = 48
BODY = {"model": "model", "prompt": "def f(", "max_tokens": 400, "ignore_eos": True}


@dataclass(frozen=True)
class Case:
    name: str
    serves: str  # the way that should serve it in the end
    words: tuple[str, ...] = ("--fallback",)
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()


CASES = (
    Case("native", "native", words=()),
    Case("native runs weight-only", "weight-only", environment=tuple(WEIGHT_ONLY.items())),
    Case("original", "original", words=("--way", "original", "--fallback")),
    Case("vLLM does not start", "onnx", options=("--no-such-option",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="that has vLLM")
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--only", default="", help="cases whose name this pattern is found in")
    parser.add_argument("--directory", type=Path, help="keep exports and logs here")
    parser.add_argument("--seconds", type=float, default=500.0, help="that a case may take")
    parser.add_argument("--output", type=Path)
    parser.add_argument("flags", nargs="*", help="of vLLM")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octet-") as name:
        directory = options.directory or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        cases = [case for case in CASES if re.search(options.only, case.name)]
        found = [run(case, directory, options) for case in cases]
    facts = {"model": str(options.model), "recipe": options.recipe, "flags": options.flags}
    card = conditions(gpu=_gpu(), **facts)
    report("serve_recovery", card, found, options.output)
    wrong = [row["case"] for row in found if not row["as it should be"]]
    if wrong:
        sys.exit(f"not served as it should be: {', '.join(wrong)}")


def run(case: Case, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Serves the model as `case` says; returns what was seen."""
    log = directory / f"{case.name.replace(' ', '-')}.log"
    row: dict[str, Any] = {"case": case.name}
    with serving(case, directory, log, options) as (url, started):
        row |= {"serves": None, "given up": None, "ready s": None, "first answer s": None}
        row |= {"whole": None, "broken": None, "lost": None, "back s": None, "starts": None}
        if until_ready(url, options.seconds):
            row["ready s"] = round(time.monotonic() - started, 1)
            row["serves"], row["given up"] = ask(url)
            row["first answer s"] = round(time.monotonic() - started, 1)
            if case.name == "native":
                row |= asyncio.run(kill_under_load(url, log))
                row["starts"] = log.read_text("utf-8", "replace").count(" is proven")
        else:
            row["given up"] = log.read_text("utf-8", "replace").strip()[-400:]
    served = row["serves"] is not None and row["serves"].endswith(case.serves)
    return row | {"as it should be": served and not row["lost"]}


@contextmanager
def serving(
    case: Case, directory: Path, log: Path, options: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """While active, runs `octet serve`; yields its URL, and when it was started."""
    port = free_port()
    words = [sys.executable, "-m", "octet", "serve", options.model, *case.words]
    words += ["--recipe", options.recipe]
    words += ["--samples", EXAMPLE / "samples" / "calibration.jsonl", "--out", directory / "kept"]
    words += ["--python", options.python, "--port", port, "--", *options.flags]
    words += case.options
    environment = {**dict(case.environment), "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    with log.open("wb") as out, child_process(list(map(str, words)), out, environment):
        yield f"http://127.0.0.1:{port}", started


def until_ready(url: str, seconds: float) -> bool:
    """Returns whether a proven backend serves within this time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(URLError, OSError), urlopen(f"{url}/ready", timeout=5):
            return True
        time.sleep(0.2)
    return False


def ask(url: str) -> tuple[str, str | None]:
    """Asks for one token; returns which precision answered, and which ways were given up."""
    headers = {"content-type": "application/json"}
    body = json.dumps({**BODY, "max_tokens": 1}).encode()
    with urlopen(Request(f"{url}/v1/completions", body, headers), timeout=120) as answer:
        precision = answer.headers["x-octet-precision"] or "native"
        # The pool of native FP8 has the recipe's name alone.
        way = precision if "-" in precision or precision == "original" else "native"
        return way, answer.headers["x-octet-fallback"]


async def kill_under_load(url: str, log: Path) -> dict[str, Any]:
    """Kills the engine once a request has a token; returns what became of all requests."""
    begun = asyncio.Event()

    async def one(session: aiohttp.ClientSession, stream: bool) -> str:
        text = ""
        body = {**BODY, "stream": stream}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for piece in answer.content.iter_any():
                text += piece.decode()
                begun.set()
        if answer.status == 200 and '"error"' not in text:
            return "whole"
        return "broken" if stream and '"text"' in text else f"lost: {answer.status} {text}"

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        sent = [asyncio.create_task(one(session, bool(i % 2))) for i in range(REQUESTS)]
        await begun.wait()
        os.kill(engine_of(server_in(log)), signal.SIGKILL)
        killed = time.monotonic()
        outcomes = Counter(await asyncio.gather(*sent))
    lost = {text: count for text, count in outcomes.items() if text.startswith("lost")}
    for text, count in lost.items():
        print(f"{count} x {text}")
    back = round(time.monotonic() - killed, 1)
    found = {"whole": outcomes["whole"], "broken": outcomes["broken"]}
    return {**found, "lost": sum(lost.values()), "back s": back}


def server_in(log: Path) -> int:
    """Returns the process id of vLLM's server that was started last."""
    return int(re.findall(r"APIServer pid=(\d+)", log.read_text("utf-8", "replace"))[-1])


def engine_of(server: int) -> int:
    """Returns the process id of the engine that a server of vLLM started."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            name = (path / "cmdline").read_bytes()
            if int(parent) == server and name.startswith(b"VLLM::Engine"):
                return int(path.name)
    raise LookupError(f"{server} has no engine")


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
