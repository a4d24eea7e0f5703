"""The division of a GPU's memory, and its blocks against those that vLLM reported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octet.hardware.devices import find_device
from octet.plan.sizes import Sizes
from octet.plan.vllm_memory import (
    BLOCK,
    UTILIZATION,
    Engine,
    default_batched_tokens,
    divide,
    usable_memory,
)
from octet.recipe import Recipe
from tests.layout import ROOT
from tests.octet.plan.shapes import LLAMA_8B, QWEN3_MOE, spec_of

# Benchmarks with a case for each server that was started.
MEASURED = sorted((ROOT / "benchmarks/results").glob("plan_check*.json"))
H200 = find_device("h200")
assert H200.memory is not None
MEMORY = usable_memory(H200.memory)


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.name)
def test_blocks_are_within_2_percent_of_vllm(file: Path) -> None:
    """Predicts again: its own figures in the file may be those of an older estimate."""
    words = [sys.executable, "benchmarks/plan_check.py", "--compare", str(file)]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" blocks, ") == len(json.loads(file.read_text())["results"]) > 0


def test_the_parts_add_up_to_the_share_of_the_gpu() -> None:
    memory = divide(Sizes(spec_of(LLAMA_8B), None), "float16", Engine(1, 64, 8192), MEMORY)
    parts = memory.weights + memory.activations + memory.graphs + memory.other + memory.cache
    assert parts == pytest.approx(UTILIZATION * MEMORY, abs=1)
    assert memory.tokens == BLOCK * memory.blocks <= memory.cache // memory.token_bytes


def test_the_differences_between_caches_that_vllm_reported_on_an_h200() -> None:
    """What docs/LOG.md has of 20 November, whose share of memory fits 0.88; 512 requests."""
    spec = spec_of(LLAMA_8B | {"max_position_embeddings": 8192})
    engine = Engine(1, 512, 16384, 0.88)
    fp8, static = (Sizes(spec, Recipe.load(name)) for name in ("fp8", "fp8-static"))
    seen = {
        "bf16": (divide(Sizes(spec, None), "float16", engine, MEMORY).tokens, 868_864),
        "fp8": (divide(fp8, "float16", engine, MEMORY).tokens, 921_776),
        "e5m2": (divide(fp8, "e5m2", engine, MEMORY).tokens, 1_843_568),
        "static": (divide(static, "e5m2", engine, MEMORY).tokens, 1_843_648),
    }
    for planned, reported in seen.values():
        assert planned == pytest.approx(reported, rel=0.002)
    assert seen["static"][0] - seen["e5m2"][0] == 80


def test_more_tokens_a_batch_and_more_sequences_leave_less() -> None:
    for config in (LLAMA_8B, QWEN3_MOE):
        sizes = Sizes(spec_of(config), Recipe.load("fp8"))
        few, long, many = (
            divide(sizes, "e4m3", Engine(1, sequences, tokens), MEMORY).blocks
            for sequences, tokens in ((8, 2048), (8, 16384), (2048, 2048))
        )
        assert few > long and few > many


def test_the_defaults_of_vllm_serve_depend_on_the_gpu() -> None:
    tokens = {
        name: default_batched_tokens(device.memory or 0, device.name)
        for name in ("h100", "h200", "a100", "l40s", "t4")
        for device in [find_device(name)]
    }
    assert tokens == {"h100": 8192, "h200": 8192, "a100": 2048, "l40s": 2048, "t4": 2048}
