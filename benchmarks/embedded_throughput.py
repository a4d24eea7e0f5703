"""Tokens a second of the embedded engine beside transformers' `generate` on the same model.

The claim it checks: the engine is at least as fast with 1 request and with 16 at a time, in the
same run, on the same prompts, with the same number of new tokens, greedy and ignoring the end
token. The engine gets its requests one by one, as a server would, and detokenizes; the peer is
given all prompts as one batch, which is the best that it can do, in FP32 and in BF16, and the
faster one counts. Runs alternate; the median of `--rounds` is reported. Prefill is included on
both sides.

    python benchmarks/embedded_throughput.py EXPORT [--model DIR] [--output FILE]

EXPORT is an ONNX export of the model (default: the example, calibrated and exported here). Run it
on an idle machine: two OpenMP threads of the peer that wait for a busy core slow it down many times
over, which flatters the engine.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from card import conditions, report

from serve.backends.embedded import EmbeddedBackend
from serve.engine.request import Finished, GenerateRequest
from serve.engine.tokenizer import Tokenizer

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"
CONCURRENCY = (1, 4, 16)
PROMPT_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path, nargs="?")
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        export = options.export or export_example(Path(scratch))
        prompts = held_out_prompts(options.model, max(CONCURRENCY))
        rows = asyncio.run(measure(export, options, prompts))
    card = conditions(
        model="examples/python-lm, fp8 ONNX export with an E5M2 cache",
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=options.new_tokens,
        rounds=options.rounds,
        figures="tokens a second, median; prefill included",
        threads=torch.get_num_threads(),
    )
    report("embedded_throughput", card, rows, options.output)


def export_example(scratch: Path) -> Path:
    """The example through the first two stages, as `octet calibrate` and `octet export` would."""
    from calibrate.options import Options
    from calibrate.pipeline import run
    from export.onnx.write import export_onnx
    from octet.recipe import Recipe

    samples = EXAMPLE / "samples"
    run(
        Options(
            model=EXAMPLE / "model",
            samples=samples / "calibration.jsonl",
            out=scratch / "calibration",
            recipe=Recipe.load("fp8"),
            held_out=samples / "heldout.jsonl",
        )
    )
    export_onnx(scratch / "calibration", scratch / "onnx", kv_cache="e5m2")
    return scratch / "onnx"


def held_out_prompts(model: Path, count: int) -> list[list[int]]:
    """The first tokens of held-out samples: [count][PROMPT_TOKENS]."""
    tokenizer = Tokenizer.load(model)
    prompts = []
    for line in (EXAMPLE / "samples" / "heldout.jsonl").read_text().splitlines():
        ids = tokenizer.encode(json.loads(line)["text"])
        if len(ids) >= PROMPT_TOKENS:
            prompts.append(ids[:PROMPT_TOKENS])
    assert len(prompts) >= count, "too few held-out samples are long enough"
    return prompts[:count]


async def measure(
    export: Path, options: argparse.Namespace, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """One row for each concurrency."""
    backend = EmbeddedBackend(export, slots=max(CONCURRENCY))
    await backend.start()
    peers = {
        "generate fp32": load_peer(options.model, torch.float32),
        "generate bf16": load_peer(options.model, torch.bfloat16),
    }
    rows = []
    for concurrency in CONCURRENCY:
        batch = prompts[:concurrency]
        seconds: dict[str, list[float]] = {"embedded": [], **{name: [] for name in peers}}
        for _ in range(options.rounds + 1):  # the first is the warm-up
            seconds["embedded"].append(await run_engine(backend, batch, options.new_tokens))
            for name, peer in peers.items():
                start = time.perf_counter()
                peer(batch, options.new_tokens)
                seconds[name].append(time.perf_counter() - start)
        total = concurrency * options.new_tokens
        speed = {name: total / statistics.median(times[1:]) for name, times in seconds.items()}
        rows.append(
            {
                "concurrency": concurrency,
                **speed,
                "embedded over the faster": speed["embedded"] / max(speed[name] for name in peers),
            }
        )
    await backend.close()
    return rows


async def run_engine(backend: EmbeddedBackend, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds until the last of the requests, sent together, is answered."""

    async def one(index: int) -> int:
        request = GenerateRequest(
            request_id=str(index),
            model=backend.models[0],
            prompt=tuple(prompts[index]),
            max_tokens=new_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        async for event in backend.generate(request):
            if isinstance(event, Finished):
                return event.usage.completion_tokens
        raise AssertionError("the stream ended without Finished")

    start = time.perf_counter()
    counts = await asyncio.gather(*(one(index) for index in range(len(prompts))))
    elapsed = time.perf_counter() - start
    assert counts == [new_tokens] * len(prompts)
    return elapsed


def load_peer(model: Path, dtype: torch.dtype) -> Callable[[list[list[int]], int], None]:
    """`generate` of transformers on a batch of prompts of one length."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, trust_remote_code=False
    )
    loaded.eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        assert out.shape[1] == len(prompts[0]) + new_tokens

    return generate


if __name__ == "__main__":
    main()
