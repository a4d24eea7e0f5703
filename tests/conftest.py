"""Fixtures of every package's tests: a tiny random checkpoint, and samples to go with it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from octet.hardware.cores import THREADS, usable_cores, wait_briefly
from tests.patient_loop import PatientLoop
from tests.shared import Shared

# Before torch is imported. Where several processes run tests, each computes on a core of its own.
wait_briefly()
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault(THREADS, "1")

# A shell without job control starts what it puts in the background with SIGINT ignored, and
# children inherit that: tests that interrupt one would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, and as much time for each as it takes: neither chance nor a busy
# machine makes a test fail. `--scenario-profile default` looks at others.
settings.register_profile(
    "octet", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("octet")

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns one process per core, and one more because tests wait; each needs 2 GB of memory."""
    return max(1, min(usable_cores() + 1, memory_gb() // 2, 8))


def memory_gb() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], PatientLoop]]:
    """What runs asynchronous tests."""
    return {"patient": PatientLoop}


@pytest.fixture(scope="session")
def example_model() -> Path:
    """The trained example checkpoint, as committed."""
    return EXAMPLE / "model"


@pytest.fixture(scope="session")
def example_samples() -> Path:
    return EXAMPLE / "samples"


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Shares directories through pytest's cache; without a cache, within this process."""
    elsewhere = tmp_path_factory.mktemp("shared")
    if not pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        return Shared(elsewhere, elsewhere)
    root = pytestconfig.rootpath / str(pytestconfig.getini("cache_dir"))
    return Shared(root / "d" / "octet", elsewhere)


@pytest.fixture(scope="session")
def tiny_model(shared: Shared) -> Path:
    """A two-layer Llama with random weights and the example's tokenizer, saved in BF16."""
    return shared.directory("tiny-model", write_tiny_model)


def write_tiny_model(path: Path) -> None:
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=4096,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.06,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    for file in (EXAMPLE / "model").glob("tokenizer*"):
        shutil.copy(file, path)


@pytest.fixture(scope="session")
def example_calibration(example_model: Path, example_samples: Path, shared: Shared) -> Path:
    """The example calibrated for `fp8` on 128 samples of up to 256 tokens, without predictions."""

    def build(path: Path) -> None:
        from calibrate.options import Options
        from calibrate.pipeline import run
        from octet.recipe import Recipe

        run(
            Options(
                model=example_model,
                samples=example_samples / "calibration.jsonl",
                out=path,
                recipe=Recipe.load("fp8"),
                held_out=example_samples / "heldout.jsonl",
                count=128,
                max_length=256,
                predict=False,
            )
        )

    return shared.directory("example-calibration", build)


@pytest.fixture(scope="session")
def tiny_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130 short texts as JSONL: enough to calibrate without `--allow-few-samples`."""
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    lines = (
        json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * (1 + i % 7)})
        for i in range(130)
    )
    path.write_text("\n".join(lines) + "\n")
    return path
