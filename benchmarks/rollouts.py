"""Many rollouts of correct and corrupted checkpoints: how each ends, and which tokens clients get.

    PYTHONPATH=. python benchmarks/rollouts.py ONNX [--good EXPORT ...] [--python PYTHON]
        [--count N] [--each N]

ONNX is an ONNX export of the example. Proven on its golden records, it is the judge's reference.
`--good` lists correct exports (default: ONNX itself); the first of them serves as the main pool.
An ONNX export runs in the embedded engine. A checkpoint is served by a vLLM that the gateway starts
with `--python`.

Every second candidate is a correct export. The others are correct exports with a fault, drawn by
the candidate's number. Each candidate is written into the configuration file, reloaded, and rolled
out `--each` times by shares of 0.25 and 1, under clients without end. With `--proof`, half of its
rollouts need its proof, and in the others only the judge can see a fault. The seed of a rollout
draws the order and the length of the prompts, and the clients' temperature; half of the clients
stream. `client_tokens` counts what the candidate sent them.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from card import conditions, report
from onnx import numpy_helper

from octet.artifacts.manifest import MANIFEST_FILE, ArtifactWriter, Manifest
from octet.errors import OctetError
from octet.storage.tensors import Tensor, TensorFile, write_tensors
from serve.config.checks import load_config
from serve.gateway.reload import reload_from
from serve.gateway.state import Gateway
from tests.integration.servers.launch import VllmServer
from tests.serve.in_process import Client, Reply

HELD_OUT = Path(__file__).parents[1] / "examples/python-lm/samples/heldout.jsonl"
STEPS = (0.25, 1.0)
JUDGE = {
    "reference": "reference",
    "share": 1.0,
    "answer_tokens": 16,
    "tokens_per_minute": 10**9,
    "max_in_flight": 16,
}
CLIENTS, TOKENS = 12, 2  # requests at once, tokens of an answer
PROMPTS = (48, 96, 192)  # characters
FAULTS = ("halved scales", "permuted embedding", "swapped layers", "random codes", "one linear")
WEIGHTS = "model.safetensors"

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    export: Path
    good: list[Path]
    python: Path
    count: int
    each: int
    each_correct: int | None
    proof: bool
    correct_every: int
    seconds: float
    workers: int
    answer_tokens: int
    max_kl: float
    output: Path | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("--good", type=Path, nargs="*", default=[])
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="has vLLM")
    parser.add_argument("--count", type=int, default=200, help="of candidates")
    parser.add_argument("--each", type=int, default=1, help="rollouts of a candidate")
    parser.add_argument("--each-correct", type=int, help="those of a correct one (default: EACH)")
    parser.add_argument("--proof", action="store_true", help="half of them need the proof")
    parser.add_argument("--correct-every", type=int, default=2, help="other candidates are not")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which none begins")
    parser.add_argument("--workers", type=int, default=2, help="gateways at once, each one process")
    parser.add_argument("--answer-tokens", type=int, default=16, help="of a judged copy")
    parser.add_argument("--max-kl", type=float, default=0.05, help="the judge's limit")
    parser.add_argument("--output", type=Path)
    options = Options(**vars(parser.parse_args()))
    began = time.monotonic()
    parts = [range(n, options.count, options.workers) for n in range(options.workers)]
    with ProcessPoolExecutor(options.workers) as pool:
        until = time.time() + options.seconds
        runs = [pool.submit(work, options, part, until) for part in parts]
        rows = sorted((row for run in runs for row in run.result()), key=lambda row: row["seed"])
    card = conditions(
        **summary(rows),
        good=[path.name for path in options.good],
        servers={path.name: backend(path, options)["type"] for path in good(options)},
        reference=options.export.name,
        judge={"max_kl": options.max_kl, "answer_tokens": options.answer_tokens},
        steps=STEPS,
        clients=CLIENTS,
        varied={
            "per candidate": "correct export, or the fault and where it is",
            "per rollout": "proof on or off, order of the prompts, their length, temperature",
            "per client": "streams, or does not",
        },
        workers=options.workers,
        seconds=round(time.monotonic() - began),
    )
    report("rollouts", card, rows, options.output)


def summary(rows: list[Row]) -> dict[str, Any]:
    """Counts how the rollouts ended."""

    def share(group: list[Row], field: str, value: str) -> str:
        return f"{sum(row[field] == value for row in group)} of {len(group)}"

    correct = [row for row in rows if not row["fault"]]
    corrupted = [row for row in rows if row["fault"]]
    proven = [row for row in corrupted if row["proof"]]
    judged = [row for row in corrupted if not row["proof"]]
    return {
        "rollouts": len(rows),
        "candidates": len({row["candidate"] for row in rows}),
        "corrupted_candidates": len({row["candidate"] for row in corrupted}),
        "promoted_of_correct": share(correct, "outcome", "promoted"),
        "rolled_back_of_corrupted": share(corrupted, "outcome", "rolled_back"),
        "refused_by_proof": share(proven, "by", "proof"),
        "ruled_out_by_judge_alone": share(judged, "by", "judge"),
        "client_tokens_of_corrupted": sum(row["client_tokens"] for row in corrupted),
        "client_tokens_of_correct": sum(row["client_tokens"] for row in correct),
        "client_answers": sum(row["client_answers"] for row in rows),
        "failed_client_requests": sum(row["failed"] for row in rows),
    }


def good(options: Options) -> list[Path]:
    return options.good or [options.export]


def work(options: Options, numbers: range, until: float) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="octet-") as name:
        return asyncio.run(_work(options, numbers, until, Path(name)))


async def _work(options: Options, numbers: range, until: float, directory: Path) -> list[Row]:
    file = directory / "gateway.yaml"
    write(file, options, options.export, proof=False)  # the first candidate is quickly ready
    gateway = Gateway.from_config(load_config(file))
    gateway.path = file
    await gateway.start(patience_s=600)
    rows: list[Row] = []
    try:
        for number in numbers:
            correct = number % options.correct_every == options.correct_every - 1
            source = good(options)[number // options.correct_every % len(good(options))]
            fault, candidate = "", source
            if not correct:
                fault, candidate = plant(source, directory / f"candidate-{number}", number)
            # Each way comes first for every second pair of candidates.
            each = (options.each_correct or options.each) if correct else options.each
            ways = sorted(options.proof and n % 2 == 1 for n in range(each))
            ways = ways if number // options.correct_every % 2 else ways[::-1]
            for n, proof in enumerate(ways):
                if time.time() > until:
                    return rows
                began = time.monotonic()
                if n == 0 or proof != ways[n - 1]:
                    write(file, options, candidate, proof)
                    await reload_from(gateway, file)
                seed = number * 1000 + n
                about = {
                    "seed": seed,
                    "candidate": number,
                    "export": source.name,
                    "fault": fault,
                    "proof": proof,
                    "reload_s": round(time.monotonic() - began, 1),
                }
                rows.append(about | await rolled_out(gateway, seed))
                print(rows[-1], flush=True)
            if fault:
                shutil.rmtree(candidate)
        return rows
    except OctetError as error:  # the rollouts so far count all the same
        print(f"ended early: {error}", flush=True)
        return rows
    finally:
        await gateway.close()


async def rolled_out(gateway: Gateway, seed: int) -> Row:
    """Rolls the candidate out, and sends it back if it is promoted."""
    counts = {"candidate": 0, "answers": 0, "failed": 0}
    judgement = gateway.pools["next"].judgement
    assert judgement is not None
    before = judgement.outcomes["judged"]
    began = time.monotonic()
    async with asking(gateway, counts, np.random.default_rng(seed)):
        gateway.rollouts.start("m", "next", STEPS, 300.0)
        while (state := gateway.rollouts.state("m"))["outcome"] == "running":
            await asyncio.sleep(0.02)
        ended_at = counts["answers"]
        while counts["answers"] < ended_at + 2 * CLIENTS:
            await asyncio.sleep(0.02)
    if state["outcome"] == "promoted":
        gateway.rollouts.back("m")
    whys = {"its proof refuses it": "proof", "it exceeds its limit": "judge"}
    why = state["reason"].partition(":")[0]
    stages = [event["text"] for event in state["events"] if event["text"].startswith("gets ")]
    return {
        "outcome": state["outcome"],
        "by": whys.get(why, state["reason"]),
        "reached": stages[-1].removeprefix("gets ") if stages else "proof",
        "kl_low": judgement.kl.low,
        "copies": judgement.outcomes["judged"] - before,
        "client_tokens": counts["candidate"],
        "client_answers": counts["answers"],
        "failed": counts["failed"],
        "seconds": round(time.monotonic() - began, 1),
    }


def write(file: Path, options: Options, candidate: Path, proof: bool) -> None:
    """Writes the configuration. A candidate by a name of its own: the same path is no change."""

    def pool(path: Path, **more: Any) -> dict[str, Any]:
        return {
            "backends": [backend(path, options)],
            "health": {"probe_after_s": None},
            "proof": {"enabled": True},
            **more,
        }

    judge = JUDGE | {"answer_tokens": options.answer_tokens, "max_kl": options.max_kl}
    content = {
        "models": {"m": {"pool": "main", "canary": [{"pool": "next", "fraction": 0}]}},
        "pools": {
            "main": pool(good(options)[0], proof={"enabled": False}),
            "reference": pool(options.export),
            "next": pool(candidate, proof={"enabled": proof}, judge=judge),
        },
        "admin": {"rollouts_file": str(file.with_name("rollouts.json"))},
    }
    file.write_text(yaml.safe_dump(content))


def backend(path: Path, options: Options) -> dict[str, Any]:
    if (path / "model.onnx").exists():
        return {"type": "embedded", "path": str(path.resolve()), "threads": 1, "context": 256}
    return {
        "type": "vllm",
        "artifact": str(path.resolve()),
        "python": str(options.python.absolute()),
        "options": ["--enforce-eager", "--max-model-len", "512"],
        "environment": VllmServer(model=path, log=path).environment(),
    }


@contextlib.asynccontextmanager
async def asking(gateway: Gateway, counts: dict[str, int], random: np.random.Generator) -> Any:
    """Clients who ask again as soon as they have their answer."""
    length, temperature = int(random.choice(PROMPTS)), int(random.choice(2))
    lines = random.permutation(HELD_OUT.read_text().splitlines())
    texts = [json.loads(line)["text"][:length] or "import" for line in lines]
    client = Client(gateway)

    async def ask(turn: int) -> None:
        body = {"model": "m", "max_tokens": TOKENS, "temperature": temperature}
        if turn % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        while True:
            prompt = {"prompt": texts[turn % len(texts)]}
            reply = await client.request("/v1/completions", body | prompt)
            tokens = tokens_of(reply)
            counts["answers"] += 1
            counts["failed"] += tokens is None
            if reply.headers.get("x-octet-backend", "").startswith("next/"):
                counts["candidate"] += len(reply.body) if tokens is None else tokens
            turn += CLIENTS
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(ask(n)) for n in range(CLIENTS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        counts["failed"] += sum(not isinstance(end, asyncio.CancelledError) for end in ended)
        while gateway.background:
            await asyncio.sleep(0.02)


def tokens_of(reply: Reply) -> int | None:
    """Returns the tokens of an answer, or None if the request failed."""
    if reply.status != 200:
        return None
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return int(reply.json()["usage"]["completion_tokens"])
    events = [json.loads(event) for event in reply.events if event != "[DONE]"]
    usages = [event["usage"] for event in events if event.get("usage")]
    return int(usages[-1]["completion_tokens"]) if usages else None


def plant(export: Path, out: Path, seed: int) -> tuple[str, Path]:
    """Writes `export` with a fault, and hashes that fit it, as a botched conversion leaves it."""
    random = np.random.default_rng(seed)
    fault = FAULTS[seed % len(FAULTS)]
    shutil.copytree(export, out, ignore=shutil.ignore_patterns(MANIFEST_FILE))
    rewrite = _rewrite_onnx if (export / "model.onnx").exists() else _rewrite_checkpoint
    rewrite(export, out, lambda arrays: changed(fault, arrays, random))
    ArtifactWriter(out).finish(Manifest.load(export))
    return fault, out


Arrays = dict[str, np.ndarray]  # float32, or codes
Change = Callable[[Arrays], Iterator[tuple[str, np.ndarray]]]


def _rewrite_checkpoint(export: Path, out: Path, change: Change) -> None:
    file = TensorFile.open(export / WEIGHTS)
    tensors = {name: file.read(name) for name in file.names}
    for name, value in change({name: tensor.codes for name, tensor in tensors.items()}):
        tensors[name] = Tensor(tensors[name].dtype, value)
    write_tensors(out / WEIGHTS, tensors, {"format": "pt"})


def _rewrite_onnx(export: Path, out: Path, change: Change) -> None:
    data = {entry.location for entry in _external(export)}
    model = onnx.load(export / "model.onnx")
    entries = {entry.name: entry for entry in model.graph.initializer}
    arrays = {
        name: np.frombuffer(entry.raw_data, np.uint8)
        if entry.data_type == onnx.TensorProto.FLOAT8E4M3FN
        else numpy_helper.to_array(entry)
        for name, entry in entries.items()
    }
    for name, value in change(arrays):
        entries[name].raw_data = value.tobytes()
    for name in ("model.onnx", *data):
        (out / name).unlink()
    onnx.save(
        *(model, out / "model.onnx"),
        save_as_external_data=True,
        location=next(iter(data), "model.data"),
    )


def _external(export: Path) -> Iterator[Any]:
    from onnx.external_data_helper import ExternalDataInfo

    for entry in onnx.load(export / "model.onnx", load_external_data=False).graph.initializer:
        if entry.external_data:
            yield ExternalDataInfo(entry)


def changed(
    fault: str, arrays: Arrays, random: np.random.Generator
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a linear layer or an embedding that the fault changes."""
    scales = sorted(name for name in arrays if name.endswith("weight_scale"))
    layers = sorted({name.split("layers.")[1].split(".")[0] for name in scales}, key=int)
    if fault == "halved scales":
        layer = random.choice(layers)
        for name in scales:
            if f"layers.{layer}." in name:
                yield name, arrays[name] * np.float32(0.5)
    elif fault == "one linear":
        name = str(random.choice([n for n in scales if "down_proj" in n or "o_proj" in n]))
        yield name, arrays[name] * np.float32(random.choice([0.0, -1.0, 4.0]))
    elif fault == "permuted embedding":
        name = next(n for n in arrays if "embed" in n)
        yield name, arrays[name][random.permutation(len(arrays[name]))]
    else:
        one, other = random.choice(layers, 2, replace=False)
        for name in (scale.removesuffix("_scale") for scale in scales):
            if f"layers.{one}." not in name:
                continue
            if fault == "swapped layers":
                yield name, arrays[name.replace(f"layers.{one}.", f"layers.{other}.")]
            else:
                yield name, random.permutation(arrays[name].reshape(-1)).reshape(arrays[name].shape)


if __name__ == "__main__":
    main()
