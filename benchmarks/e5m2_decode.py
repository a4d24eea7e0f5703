"""Decode speed of attention backends and caches in vLLM, with the kernels of one decode step.

For each variant an engine of its own, all on one GPU, which are measured one after the other: the
time of a token by batch and context length, that of a prompt, the kernels of a step from torch's
profiler, and how far the log-probabilities of a prompt are from those of the first variant.
`CUSTOM` is `serve.vllm_attention`, which vLLM finds if Octet is installed beside it. Its writer and
kernel are also compared with float32, and the kernel timed alone.

    python benchmarks/e5m2_decode.py --model DIR [--output FILE] [--only FLASH_ATTN:auto,...]
"""

import argparse
import fcntl
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from card import conditions, report

from octet.artifacts.manifest import software

VARIANTS = (
    "FLASH_ATTN:auto",
    "FLASHINFER:auto",
    "FLASH_ATTN:fp8_e4m3",
    "FLASHINFER:fp8_e5m2",
    "CUSTOM:fp8_e5m2",
)
CELLS = ((1, 512), (1, 7900), (16, 2048))  # batch, tokens of context
KERNEL_CELLS = ((1, 512), (1, 8192), (16, 2048), (64, 1024))
TOKENS, REPEATS = 64, 5
PROFILED = 4  # steps, or one more: vLLM stops after the step that follows
LONGEST = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--cache-gib", type=float, default=6.0)
    parser.add_argument("--timeout", type=float, default=400.0)
    parser.add_argument("--variant", help="measure this one, into --output, and end")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.variant == "check":
        options.output.write_text(json.dumps(check()))
    elif options.variant:
        options.output.write_text(json.dumps(measure(options)))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    names = options.only.split(",")
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, "--model", str(options.model)]
        command += ["--cache-gib", str(options.cache_gib)]
        running = {}
        for number, variant in enumerate([*names, "check"]):
            out, log = Path(name, f"{number}.json"), Path(name, f"{number}.log")
            words = [*command, "--variant", variant, "--output", str(out)]
            with log.open("w") as file:
                process = subprocess.Popen(
                    words, stdout=file, stderr=file, env=os.environ | {"OCTET_LOCK": f"{name}/lock"}
                )
            running[variant] = process, out, log
        end = time.monotonic() + options.timeout
        found: dict[str, Any] = {}
        for variant, (process, out, log) in running.items():
            try:
                process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
            if out.exists():
                found[variant] = json.loads(out.read_text())
            else:
                lines = [x for x in log.read_text().splitlines() if "Error" in x]
                found[variant] = {"failed": lines[-6:] or log.read_text()[-500:]}
                print(variant, found[variant], flush=True)
    checked = found.pop("check")
    write(found, checked, options)


def write(found: dict[str, Any], checked: Any, options: argparse.Namespace) -> None:
    import torch

    base = next(iter(found.values())).get("prompt logprobs")
    rows, profiles, failures = [], {}, {}
    for variant, result in found.items():
        if "failed" in result:
            failures[variant] = result["failed"]
            continue
        row: dict[str, Any] = {"variant": variant}
        for batch, context in CELLS:
            times = result["times"][f"{batch}x{context}"]
            row[f"{batch}x{context} ms a step"] = statistics.median(times)
            row[f"{batch}x{context} low"] = min(times)
            row[f"{batch}x{context} high"] = max(times)
            row[f"{batch}x{context} prompt ms"] = result["prompt ms"][f"{batch}x{context}"]
        own = result["prompt logprobs"]
        row["mean |difference| of log-probability"] = (
            sum(abs(x - y) for x, y in zip(own, base, strict=True)) / len(own) if base else None
        )
        rows.append(row)
        profiles[variant] = result["profile"]
    card = conditions(
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        cuda=torch.version.cuda,
        peers=software("vllm", "flashinfer-python", "triton"),
        model=options.model.name,
        tokens_generated=TOKENS,
        repeats=REPEATS,
        environment={k: v for k, v in os.environ.items() if k.startswith("VLLM_")},
        check=checked,
        profiles=profiles,
        failures=failures,
    )
    report("e5m2_decode", card, rows or [{"variant": "none"}], options.output)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    backend, cache = options.variant.split(":")
    with tempfile.TemporaryDirectory() as traces:
        llm = LLM(
            str(options.model),
            attention_config={"backend": backend},
            kv_cache_dtype=cache,
            max_model_len=LONGEST,
            max_num_seqs=32,
            gpu_memory_utilization=0.02,
            kv_cache_memory_bytes=int(options.cache_gib * 2**30),
            enable_prefix_caching=False,
            seed=0,
            profiler_config={
                "profiler": "torch",
                "torch_profiler_dir": traces,
                "torch_profiler_with_stack": False,
                "ignore_frontend": True,
                "delay_iterations": 20,
                "max_iterations": PROFILED,
            },
        )
        with open(os.environ["OCTET_LOCK"], "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

            def generate(batch: int, context: int, tokens: int) -> float:
                prompts = [
                    {"prompt_token_ids": [(7 * i + 31 * row) % 4000 + 1 for i in range(context)]}
                    for row in range(batch)
                ]
                sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
                started = time.perf_counter()
                llm.generate(prompts, sampling, use_tqdm=False)
                return time.perf_counter() - started

            times, prompts = {}, {}
            for batch, context in CELLS:
                generate(batch, context, 4)
                found, shorts = [], []
                for _ in range(REPEATS):
                    shorts.append(generate(batch, context, 1))
                    whole = generate(batch, context, TOKENS + 1)
                    found.append((whole - shorts[-1]) / TOKENS * 1e3)
                times[f"{batch}x{context}"] = found
                prompts[f"{batch}x{context}"] = statistics.median(shorts) * 1e3
            profile = {}
            for batch, context in CELLS[:2]:
                before = set(Path(traces).rglob("*.json.gz"))
                llm.start_profile()
                generate(batch, context, TOKENS)
                llm.stop_profile()
                files = sorted(set(Path(traces).rglob("*.json.gz")) - before)
                profile[f"{batch}x{context}"] = kernels(files[0]) if files else None
            prompt = {"prompt_token_ids": [(13 * i) % 4000 + 1 for i in range(500)]}
            answer = llm.generate(
                [prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
            )[0]
            logprobs = [next(iter(x.values())).logprob for x in answer.prompt_logprobs[1:]]
    return {
        "times": times,
        "prompt ms": prompts,
        "profile": profile,
        "prompt logprobs": logprobs,
    }


def kernels(trace: Path) -> dict[str, Any]:
    """Sums the GPU's kernels of a trace by name: calls and microseconds over all steps in it."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not found:
        return {}
    total: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in found:
        total[event["name"][:120]][0] += 1
        total[event["name"][:120]][1] += event["dur"]
    start = min(e["ts"] for e in found)
    stop = max(e["ts"] + e["dur"] for e in found)
    busy = sum(e["dur"] for e in found)
    most = sorted(total.items(), key=lambda item: -item[1][1])[:25]
    return {
        "us, first kernel to last": stop - start,
        "us, kernels": busy,
        "kernels": [{"name": name, "calls": calls, "us": us} for name, (calls, us) in most],
    }


def check() -> dict[str, Any]:
    """Compares the backend's writer and decode kernel with torch: heads 32/8, size 128."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    from serve.vllm_attention.backend import E5m2Impl
    from serve.vllm_attention.decode_kernel import Buffers, attend

    torch.manual_seed(0)
    device, tokens, heads, queries, size, block = "cuda", 3000, 8, 32, 128, 16
    blocks = tokens // block + 2
    key, value = (torch.randn(tokens, heads, size, device=device).bfloat16() * 3 for _ in "kv")
    key[0, 0, :4] = torch.tensor([1e6, -1e6, 1e-9, 0.0])
    cache = torch.zeros(blocks, 2, block, heads, size, dtype=torch.uint8, device=device)
    slots = torch.randperm(blocks * block, device=device)[:tokens]
    order = torch.randperm(blocks, device=device).int()
    slots = order.long()[torch.arange(tokens, device=device) // block] * block
    slots += torch.arange(tokens, device=device) % block
    k_scale, v_scale = (torch.tensor(x, device=device) for x in (0.75, 1.5))
    with set_current_vllm_config(VllmConfig()):
        impl = E5m2Impl(queries, size, size**-0.5, heads, None, None, "fp8_e5m2")

    class Layer:
        _k_scale, _v_scale = k_scale, v_scale

    impl.do_kv_cache_update(Layer, key, value, cache, slots)
    limit = torch.finfo(torch.float8_e5m2).max
    wrong, stored = {}, []
    for side, (x, scale) in enumerate(((key, k_scale), (value, v_scale))):
        expected = (x.float() / scale).clamp(-limit, limit).to(torch.float8_e5m2)
        found = cache[:, side].reshape(-1, heads, size)[slots]
        wrong["kv"[side]] = int((found != expected.view(torch.uint8)).sum())
        stored.append(found.view(torch.float8_e5m2).float() * scale)
    query = torch.randn(1, queries, size, device=device).bfloat16()
    out = torch.empty_like(query)
    table = order[None, :].contiguous()
    segments = 16
    shape = (8, queries, segments)
    unified_attention(
        q=query,
        k=cache[:, 0].view(torch.float8_e5m2),
        v=cache[:, 1].view(torch.float8_e5m2),
        out=out,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=device),
        max_seqlen_q=1,
        seqused_k=torch.tensor([tokens], dtype=torch.int32, device=device),
        max_seqlen_k=tokens,
        softmax_scale=size**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=table,
        softcap=0,
        q_descale=None,
        k_descale=k_scale.expand(1, heads),
        v_descale=v_scale.expand(1, heads),
        seq_threshold_3D=8,
        num_par_softmax_segments=segments,
        softmax_segm_output=torch.empty(*shape, size, device=device),
        softmax_segm_max=torch.empty(shape, device=device),
        softmax_segm_expsum=torch.empty(shape, device=device),
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
    )
    keys, values = (x.repeat_interleave(queries // heads, 1) for x in stored)
    weights = torch.einsum("hd,thd->ht", query[0].float(), keys).mul(size**-0.5).softmax(-1)
    exact = torch.einsum("ht,thd->hd", weights, values)
    own = torch.empty_like(query)
    lengths = torch.tensor([tokens], dtype=torch.int32, device=device)
    buffers = Buffers(64, queries, heads, size, device)
    keys8, values8 = cache[:, 0], cache[:, 1]
    attend(query, keys8, values8, table, lengths, k_scale, v_scale, size**-0.5, own, buffers)
    errors = [float((x[0].float() - exact).norm() / exact.norm()) for x in (out, own)]
    return {
        "bytes that differ": wrong,
        "relative error of the output, vLLM's kernel": errors[0],
        "relative error of the output": errors[1],
        "kernel, us": {f"{b}x{n}": timed(b, n) for b, n in KERNEL_CELLS},
    }


def timed(batch: int, tokens: int) -> dict[str, float]:
    """Times the kernel alone by the number of splits: microseconds, median of 50."""
    import torch

    from serve.vllm_attention.decode_kernel import Buffers, attend, splits_of

    heads, queries, size, block, device = 8, 32, 128, 16, "cuda"
    pages = -(-tokens // block)
    cache = torch.randint(0, 0x7B, (batch * pages, 2, block, heads, size), device=device)
    key, value = cache.to(torch.uint8).unbind(1)
    table = torch.randperm(batch * pages, device=device).int().reshape(batch, pages)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    query = torch.randn(batch, queries, size, device=device).bfloat16()
    out, one = torch.empty_like(query), torch.ones((), device=device)
    buffers = Buffers(8192, queries, heads, size, device)
    found = {}
    for splits in sorted({8, 16, 32, 64, splits_of(batch, heads)}):
        times = []
        for _ in range(60):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            attend(query, key, value, table, lengths, one, one, size**-0.5, out, buffers, splits)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        found[str(splits)] = statistics.median(times[10:])
    return found | {"chosen": float(splits_of(batch, heads))}


if __name__ == "__main__":
    main()
