"""Many rollouts of correct and corrupted checkpoints: how each ends, and which tokens clients get.

    python benchmarks/rollouts.py EXPORT [--good EXPORT ...] [--count N] [--workers N]

EXPORT is an ONNX export of the example. It serves as the main pool and, proven on its golden
records, as the judge's reference. Every second candidate is a correct export, one of `--good`
(default: EXPORT itself). The others have a fault, drawn by the seed of the row. The candidates'
proof is switched off, so that only the judge can see a fault. Each is written into the
configuration file, reloaded, and rolled out by shares of 0.25 and 1 under clients without end, who
ask for greedy answers. `client_tokens` counts what the candidate sent them.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from card import conditions, report
from onnx import numpy_helper

from octet.artifacts.manifest import MANIFEST_FILE, ArtifactWriter, Manifest
from serve.config.checks import load_config
from serve.gateway.reload import reload_from
from serve.gateway.state import Gateway
from tests.serve.in_process import Client

HELD_OUT = Path(__file__).parents[1] / "examples/python-lm/samples/heldout.jsonl"
STEPS = (0.25, 1.0)
JUDGE = {
    "reference": "reference",
    "max_kl": 0.05,
    "share": 1.0,
    "answer_tokens": 16,
    "tokens_per_minute": 10**9,
    "max_in_flight": 8,
}
CLIENTS, TOKENS, PROMPT = 6, 2, 96  # requests at once, tokens of an answer, characters of a prompt
FAULTS = ("halved scales", "permuted embedding", "swapped layers", "random codes", "one linear")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("--good", type=Path, nargs="*", default=[])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--correct-every", type=int, default=2, help="other candidates are not")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which none begins")
    parser.add_argument("--workers", type=int, default=2, help="gateways at once, each one process")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    good = options.good or [options.export]
    began = time.monotonic()
    parts = [range(n, options.count, options.workers) for n in range(options.workers)]
    with ProcessPoolExecutor(options.workers) as pool:
        until = time.time() + options.seconds
        runs = [
            pool.submit(work, options.export, good, options.correct_every, seeds, until)
            for seeds in parts
        ]
        rows = sorted((row for run in runs for row in run.result()), key=lambda row: row["seed"])
    corrupted = [row for row in rows if row["fault"]]
    card = conditions(
        rollouts=len(rows),
        promoted_of_correct=f"{count(rows, '', 'promoted')} of {len(rows) - len(corrupted)}",
        rolled_back_of_corrupted=f"{count(corrupted, None, 'rolled_back')} of {len(corrupted)}",
        client_tokens_of_corrupted=sum(row["client_tokens"] for row in corrupted),
        client_answers=sum(row["client_answers"] for row in rows),
        failed_client_requests=sum(row["failed"] for row in rows),
        judge={key: JUDGE[key] for key in ("max_kl", "answer_tokens")},
        steps=STEPS,
        workers=options.workers,
        seconds=round(time.monotonic() - began),
    )
    report("rollouts", card, rows, options.output)


def count(rows: list[dict[str, Any]], fault: str | None, outcome: str) -> int:
    return sum(row["outcome"] == outcome and fault in (None, row["fault"]) for row in rows)


def work(
    export: Path, good: list[Path], every: int, seeds: range, until: float
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="octet-") as name:
        return asyncio.run(_work(export, good, every, seeds, until, Path(name)))


async def _work(
    export: Path, good: list[Path], every: int, seeds: range, until: float, directory: Path
) -> list[dict[str, Any]]:
    file = directory / "gateway.yaml"
    write(file, export, export, directory)
    gateway = Gateway.from_config(load_config(file))
    gateway.path = file
    await gateway.start(patience_s=600)
    try:
        rows = []
        for seed in seeds:
            if time.time() > until:
                break
            correct = good[seed % len(good)] if seed % every == every - 1 else None
            rows.append(await rolled_out(gateway, export, correct, seed, directory))
            print(rows[-1], flush=True)
        return rows
    finally:
        await gateway.close()


async def rolled_out(
    gateway: Gateway, export: Path, correct: Path | None, seed: int, directory: Path
) -> dict[str, Any]:
    fault, candidate = "", correct
    if candidate is None:
        fault, candidate = plant(export, directory / f"candidate-{seed}", seed)
    write(directory / "gateway.yaml", export, candidate, directory)
    await reload_from(gateway, gateway.path)
    counts = {"candidate": 0, "answers": 0, "failed": 0}
    began = time.monotonic()
    async with asking(gateway, counts):
        gateway.rollouts.start("m", "next", STEPS, 600.0)
        while (state := gateway.rollouts.state("m"))["outcome"] == "running":
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
    judgement = gateway.pools["next"].judgement
    assert judgement is not None
    if fault:
        shutil.rmtree(candidate)
    return {
        "seed": seed,
        "fault": fault,
        "export": "" if fault else candidate.name,
        "outcome": state["outcome"],
        "kl_low": judgement.kl.low,
        "copies": judgement.outcomes["judged"],
        "client_tokens": counts["candidate"],
        "client_answers": counts["answers"],
        "failed": counts["failed"],
        "seconds": round(time.monotonic() - began, 1),
    }


def write(file: Path, export: Path, candidate: Path, directory: Path) -> None:
    """Writes the configuration. A candidate by a name of its own: the same path is no change."""

    def pool(path: Path, **more: Any) -> dict[str, Any]:
        backend = {"type": "embedded", "path": str(path.resolve()), "threads": 1, "context": 256}
        return {"backends": [backend], "health": {"probe_after_s": None}, **more}

    content = {
        "models": {"m": {"pool": "main", "canary": [{"pool": "next", "fraction": 0}]}},
        "pools": {
            "main": pool(export, proof={"enabled": False}),
            "reference": pool(export),
            "next": pool(candidate, proof={"enabled": False}, judge=JUDGE),
        },
        "admin": {"rollouts_file": str(directory / "rollouts.json")},
    }
    file.write_text(yaml.safe_dump(content))


@contextlib.asynccontextmanager
async def asking(gateway: Gateway, counts: dict[str, int]) -> Any:
    """Clients who ask again as soon as they have their answer."""
    texts = [json.loads(line)["text"] for line in HELD_OUT.read_text().splitlines()]
    client = Client(gateway)

    async def ask(turn: int) -> None:
        while True:
            text = texts[turn % len(texts)][:PROMPT] or "import"
            body = {"model": "m", "prompt": text, "max_tokens": TOKENS, "temperature": 0}
            reply = await client.request("/v1/completions", body)
            counts["answers"] += 1
            counts["failed"] += reply.status != 200
            if reply.headers.get("x-octet-backend", "").startswith("next/"):
                counts["candidate"] += reply.json()["usage"]["completion_tokens"]
            turn += CLIENTS
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(ask(n)) for n in range(CLIENTS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while gateway.background:
            await asyncio.sleep(0.02)


def plant(export: Path, out: Path, seed: int) -> tuple[str, Path]:
    """Writes `export` with a fault, and hashes that fit it, as a botched conversion leaves it."""
    random = np.random.default_rng(seed)
    fault = FAULTS[seed % len(FAULTS)]
    model = onnx.load(export / "model.onnx")
    arrays = {entry.name: entry for entry in model.graph.initializer}
    for name, value in changed(fault, arrays, random):
        arrays[name].CopyFrom(value)
    out.mkdir()
    files = Manifest.load(export).files
    data = {entry.location for entry in _external(export)}
    for name in files:
        if name not in ("model.onnx", MANIFEST_FILE) and name not in data:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(export / name, out / name)
    onnx.save(
        *(model, out / "model.onnx"),
        save_as_external_data=True,
        location=next(iter(data), "model.data"),
    )
    ArtifactWriter(out).finish(Manifest.load(export))
    return fault, out


def _external(export: Path) -> Iterator[Any]:
    from onnx.external_data_helper import ExternalDataInfo

    for entry in onnx.load(export / "model.onnx", load_external_data=False).graph.initializer:
        if entry.external_data:
            yield ExternalDataInfo(entry)


def changed(
    fault: str, arrays: dict[str, onnx.TensorProto], random: np.random.Generator
) -> Iterator[tuple[str, onnx.TensorProto]]:
    scales = sorted(name for name in arrays if name.endswith("weight_scale"))
    layers = sorted({name.split("layers.")[1].split(".")[0] for name in scales}, key=int)
    if fault == "halved scales":
        layer = random.choice(layers)
        for name in scales:
            if f"layers.{layer}." in name:
                yield name, _array(name, numpy_helper.to_array(arrays[name]) * np.float32(0.5))
    elif fault == "one linear":
        name = str(random.choice([n for n in scales if "down_proj" in n or "o_proj" in n]))
        factor = np.float32(random.choice([0.0, -1.0, 4.0]))
        yield name, _array(name, numpy_helper.to_array(arrays[name]) * factor)
    elif fault == "permuted embedding":
        name = next(n for n in arrays if "embed" in n)
        table = numpy_helper.to_array(arrays[name])
        yield name, _array(name, table[random.permutation(len(table))])
    else:
        codes = sorted(name.removesuffix("_scale") for name in scales)
        one, other = random.choice(layers, 2, replace=False)
        for name in codes:
            if f"layers.{one}." not in name:
                continue
            entry = onnx.TensorProto()
            entry.CopyFrom(arrays[name])
            if fault == "swapped layers":
                entry.raw_data = arrays[name.replace(f"layers.{one}.", f"layers.{other}.")].raw_data
            else:
                shuffled = np.frombuffer(entry.raw_data, np.uint8)
                entry.raw_data = random.permutation(shuffled).tobytes()
            yield name, entry


def _array(name: str, value: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(value), name)


if __name__ == "__main__":
    main()
