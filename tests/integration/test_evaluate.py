"""`octet evaluate` through a real vLLM, by its log-probabilities of prompts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from octet.errors import UnsupportedError
from tests.integration.servers.launch import VllmServer
from verify.evaluation.comparison import compare
from verify.evaluation.evaluator import evaluate
from verify.evaluation.targets.checkpoint import CheckpointTarget
from verify.evaluation.targets.server import Server

EXAMPLE = Path(__file__).parents[2] / "examples" / "python-lm"


@pytest.fixture(scope="module")
def server(start_vllm: Callable[..., VllmServer]) -> Server:
    """The original weights, with an E5M2 cache."""
    return Server(start_vllm(EXAMPLE / "model").url)


def test_a_cache_in_e5m2_shows_in_the_divergence(server: Server) -> None:
    reference = CheckpointTarget(EXAMPLE / "model")
    samples = EXAMPLE / "samples" / "heldout.jsonl"
    sequences = reference.sequences(samples, count=16, max_length=256)
    assert server.identity["max_model_len"] == "1024" and "version" in server.identity
    bfloat16 = CheckpointTarget(EXAMPLE / "model", dtype="bfloat16")
    found = compare(evaluate([bfloat16, server], reference, sequences, k=20))
    noise, served = found.rows
    print(f"\nBF16 {noise.kl}, vLLM with an E5M2 cache {served.kl}, perplexity {served.change}")
    assert noise.kl and served.kl and served.kl_from_first and served.change
    assert served.kl_from_first.low > 0
    assert noise.kl.high < served.kl.low < served.kl.high < 0.05
    assert abs(served.change.mean) < 0.03


def test_more_than_vllm_returns_is_said(server: Server) -> None:
    with pytest.raises(UnsupportedError, match=r"return 30 log-probabilities.*--top-k") as caught:
        list(server.answers([(1, 2, 3)], 30))
    assert "\n" not in str(caught.value)
