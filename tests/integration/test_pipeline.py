"""The exported example on a real vLLM and a real Triton, behind the gateway, beside the embedded
engine; and its FP8 engine built by TensorRT-RTX. Run with -s to see the comparison."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from openai import OpenAI
from rich.console import Console
from rich.table import Table

from octet.artifacts.golden import GoldenRecord, GoldenSet
from octet.artifacts.manifest import Manifest
from tests.integration.conftest import octet
from tests.integration.servers.launch import GatewayServer, TritonServer, VllmServer
from tests.integration.servers.process import free_port
from tests.plain_divergence import plain_divergence

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self',
)
BACKENDS = ("embedded", "vllm", "triton")
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def client(
    exports: Path,
    vllm: VllmServer,
    triton: TritonServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OpenAI]:
    """The official client of a gateway before all three backends, each a model of its own."""
    directory = tmp_path_factory.mktemp("gateway")
    port = free_port()
    pools = {
        "embedded": {"type": "embedded", "path": str(exports / "onnx")},
        "vllm": {"type": "vllm", "url": vllm.url, "model": "python-lm-fp8"},
        "triton": {
            "type": "triton",
            "url": triton.grpc_address,
            "model": "python-lm",
            "tokenizer": str(exports / "onnx"),
        },
    }
    models = {name: {"pool": [pool]} for name, pool in pools.items()}
    config = directory / "gateway.yaml"
    config.write_text(yaml.safe_dump({"listen": {"port": port}, "models": models}))
    with GatewayServer(config=config, port=port, log=directory / "gateway.log") as gateway:
        yield OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120)


def stream(client: OpenAI, model: str, prompt: str) -> tuple[list[str], str | None]:
    pieces, reason = [], None
    for chunk in client.completions.create(
        model=model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=True
    ):
        if chunk.choices:
            pieces.append(chunk.choices[0].text)
            reason = chunk.choices[0].finish_reason or reason
    return pieces, reason


def divergence(client: OpenAI, model: str, record: GoldenRecord) -> float:
    """KL of the served next-token distribution from the reference's, in nats."""
    answer = client.completions.create(
        model=model,
        prompt=list(record.prompt_token_ids),
        max_tokens=1,
        temperature=0,
        logprobs=20,
        extra_body={"return_tokens_as_token_ids": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    served = {int(k.removeprefix("token_id:")): v for k, v in logprobs.top_logprobs[0].items()}
    return plain_divergence(record.top, served)


def test_vllm_really_stores_e5m2(vllm: VllmServer) -> None:
    with urllib.request.urlopen(f"{vllm.url}/metrics") as response:
        metrics = response.read().decode()
    assert re.search(r'[{,]cache_dtype="fp8_e5m2"', metrics)


def test_the_gateway_names_its_models(client: OpenAI) -> None:
    assert {model.id for model in client.models.list().data} == set(BACKENDS)


@pytest.mark.parametrize("model", BACKENDS)
def test_answers_a_conversation(client: OpenAI, model: str) -> None:
    """The example brings no chat template: all three use Octet's plain default."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "import os"}],
        max_tokens=8,
        temperature=0,
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None and answer.usage.completion_tokens <= 8
    by_hand = client.completions.create(
        model=model, prompt="### User:\nimport os\n\n### Assistant:\n", max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content == by_hand.choices[0].text


@pytest.mark.parametrize("model", BACKENDS)
def test_completes_the_demo_prompts_streamed(client: OpenAI, model: str) -> None:
    for prompt in PROMPTS:
        whole = client.completions.create(
            model=model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0
        )
        assert whole.usage is not None and whole.usage.completion_tokens == NEW_TOKENS
        pieces, reason = stream(client, model, prompt)
        assert "".join(pieces) == whole.choices[0].text != ""
        # How many depends on the load: what has queued up on the way is sent as one.
        assert sum(map(bool, pieces)) > 1, "the answer came in one piece"
        assert reason == whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("model", BACKENDS)
def test_stop_strings_end_an_answer(client: OpenAI, model: str) -> None:
    ask = {"model": model, "prompt": PROMPTS[0], "max_tokens": NEW_TOKENS, "temperature": 0}
    free = client.completions.create(**ask).choices[0].text
    stop = free[len(free) // 2 :][:3]
    answer = client.completions.create(**ask, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == free[: free.index(stop)]


def test_the_three_backends_side_by_side(client: OpenAI, exports: Path) -> None:
    """Their divergence from the BF16 model is what FP8 costs: small, and alike."""
    records = GoldenSet.load(exports / "onnx").records
    means = {
        name: sum(divergence(client, name, record) for record in records) / len(records)
        for name in BACKENDS
    }
    table = Table(title=f"next-token KL from BF16, mean of {len(records)} golden prompts")
    table.add_column("prompt")
    for name in BACKENDS:
        table.add_column(f"{name}\nKL {means[name]:.2e}")
    answers = {name: ["".join(stream(client, name, p)[0]) for p in PROMPTS] for name in BACKENDS}
    for index, prompt in enumerate(PROMPTS):
        table.add_row(prompt, *(answers[name][index] for name in BACKENDS), end_section=True)
    Console(width=140).print(table)
    assert answers["triton"] == answers["embedded"], "the Triton entry runs the same engine"
    assert means["triton"] == pytest.approx(means["embedded"], rel=1e-3)
    # FP8 and E5M2 show, so nobody serves BF16 in silence; and they cost no more than they must.
    # vLLM's CPU build truncates into the cache where the others round to nearest: 2.5 to 3 times.
    assert 1e-4 < means["embedded"] < 0.02
    assert 1e-4 < means["vllm"] < 5 * means["embedded"]


def test_tensorrt_rtx_builds_the_fp8_engine(
    exports: Path, tensorrt_rtx_python: Path, tmp_path: Path
) -> None:
    out = tmp_path / "engine"
    octet(
        *("build-engine", exports / "calibration-fp8-static", "--target", "sm89,sm120", "-o", out),
        python=tensorrt_rtx_python,
    )
    manifest = Manifest.load(out, "engine")
    print(json.dumps(manifest.details, indent=1))
    assert (out / "model.plan").stat().st_size > 5_000_000
    assert manifest.details["targets"] == ["sm89", "sm120"]
    assert "unproven" in manifest.details["status"]
