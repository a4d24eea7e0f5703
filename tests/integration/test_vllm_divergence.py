"""A real vLLM serves every export that it has CPU kernels for, as far from BF16 as predicted.

A prediction belongs to the path that the engine executes: this build truncates where it writes an
FP8 cache (`octet.proof.declared`). What it has no kernel for, it refuses in the words of
docs/compatibility.md. Run with -s to see the figures.
"""

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.rescale import rescale
from calibrate.simulate.predict import predict
from export.checkpoint.write import CheckpointFormat, export_checkpoint
from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import GoldenRecord, GoldenSet
from octet.artifacts.serving_path import Expectation, ExpectedSet, ServingPath
from octet.hardware.devices import find_device
from octet.model.checkpoint import Checkpoint
from octet.proof.declared import vllm_path
from octet.recipe import PRESETS, KvCacheDtype, Recipe
from octet.storage.tensors import TensorFile
from tests.integration.conftest import AMX, require
from tests.integration.servers import layout
from tests.integration.servers.launch import ServerFailed, VllmServer, cpu_flags
from tests.integration.test_verify_url import verify
from tests.plain_divergence import plain_divergence
from tests.proof_servers import scale_keys

pytestmark = pytest.mark.vllm

EXAMPLE = Path(__file__).parents[2] / "examples" / "python-lm"
CACHE_DTYPES = {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto"}


@dataclass(frozen=True)
class Case:
    """A checkpoint of `recipe` (None: the original in BF16), and the cache it is served with."""

    recipe: str | None
    cache: KvCacheDtype
    format: CheckpointFormat = "compressed-tensors"

    def __str__(self) -> str:
        return f"{self.recipe or 'bfloat16'} {self.format} {self.cache}"


SERVED = (
    Case("fp8", "e5m2"),
    Case("fp8", "e4m3"),
    Case("fp8", "e4m3", "modelopt"),
    Case(None, "e5m2"),
    Case(None, "float16"),
)


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    require(layout.VLLM)
    if "avx512f" not in cpu_flags():
        pytest.skip("vLLM's CPU build keeps an FP8 KV cache only with AVX-512: use such a machine")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divergence")


@pytest.fixture(scope="module")
def calibration(directory: Path) -> Calibration:
    """`fp8` with an E4M3 cache, for which queries are observed: others are derived from it."""
    samples = EXAMPLE / "samples"
    found = run(
        Options(
            model=EXAMPLE / "model",
            samples=samples / "calibration.jsonl",
            out=directory / "calibration",
            recipe=PRESETS["fp8"].model_copy(update={"kv_cache": "e4m3"}),
            held_out=samples / "heldout.jsonl",
            count=128,
        )
    )
    assert found is not None
    return found


def exported(
    case: Case, recipe: Recipe, origin: Calibration, directory: Path, *, predict: bool = True
) -> Path:
    """The checkpoint of `case`, with its golden records and what was predicted for it."""
    source = origin.path
    if recipe != origin.manifest.recipe:
        source = directory / f"calibration of {case}"
        rescale(origin.path, source, recipe=recipe, predict=predict)
    out = directory / f"checkpoint of {case}"
    export_checkpoint(source, out, format=case.format)
    return out


def recipe_of(case: Case) -> Recipe:
    return PRESETS[case.recipe or "fp8"].model_copy(update={"kv_cache": case.cache})


def predicted(case: Case, checkpoint: Path, calibration: Calibration) -> Expectation:
    """From the file in the export; of the original, computed now."""
    recipe = recipe_of(case)
    pair = (recipe.weights, recipe.activations) if case.recipe else None
    device = find_device("cpu-amx" if AMX else "cpu-avx512")
    path = vllm_path(pair, case.cache, device, "0.32")
    if case.recipe:
        expected = ExpectedSet.load(checkpoint)
    else:
        # Among others, so that how far implementations scatter is known better.
        paths = [path, ServingPath(kv_cache="e5m2"), ServingPath(kv_cache="float16")]
        expected = predict(
            Checkpoint.open(EXAMPLE / "model"),
            calibration.manifest.recipe,
            calibration.scales,
            calibration.golden,
            paths,
        )
    found = expected.find(path)
    assert found is not None
    return found


def measured(server: VllmServer, golden: GoldenSet) -> float:
    found = [divergence(server, record) for record in golden.records]
    return sum(found) / len(found)


def divergence(server: VllmServer, record: GoldenRecord) -> float:
    body = {
        "model": server.served_name,
        "prompt": list(record.prompt_token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": len(record.top),
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        (choice,) = json.load(response)["choices"]
    top = choice["logprobs"]["top_logprobs"][0]
    return plain_divergence(record.top, {int(k.split(":")[1]): v for k, v in top.items()})


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_it_serves_what_was_predicted(
    case: Case, calibration: Calibration, directory: Path
) -> None:
    checkpoint = EXAMPLE / "model"
    if case.recipe:
        checkpoint = exported(case, recipe_of(case), calibration, directory)
    expected = predicted(case, checkpoint, calibration)
    log = directory / f"{case}.log"
    server = VllmServer(
        model=checkpoint, log=log, kv_cache_dtype=CACHE_DTYPES[case.cache], ready_seconds=400
    )
    with server:
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            metrics = response.read().decode()
        kl = measured(server, calibration.golden)
    print(
        f"\n{case}: {kl:.5f} nats; predicted {expected.mean:.5f}"
        f" ({expected.low:.5f} to {expected.high:.5f}) with {expected.path.label}"
    )
    assert re.search(rf'[{{,]cache_dtype="{CACHE_DTYPES[case.cache]}"', metrics)
    if case.recipe:  # both operands in FP8: it is no weight-only product, on AMX either
        assert "Selected ChannelWiseTorchFP8ScaledMMLinearKernel" in log.read_text()
    assert expected.holds(kl)


@pytest.mark.parametrize("exponent", [-16, 14], ids=["small", "large"])
def test_keys_that_fit_no_cache_are_folded_and_proven(exponent: int, directory: Path) -> None:
    """Without a scale in the checkpoint, which other versions of vLLM would lose."""
    model = scale_keys(EXAMPLE / "model", directory / f"keys{exponent}", exponent)
    samples = EXAMPLE / "samples"
    found = run(
        Options(
            model=model,
            samples=samples / "calibration.jsonl",
            out=directory / f"calibration of keys{exponent}",
            recipe=PRESETS["fp8"],
            held_out=samples / "heldout.jsonl",
            count=128,
        )
    )
    assert found is not None and found.manifest.folds
    case = Case("fp8", "e5m2")
    checkpoint = directory / f"checkpoint of keys{exponent}"
    export_checkpoint(found.path, checkpoint)
    names = TensorFile.open(checkpoint / "model.safetensors").names
    assert not [name for name in names if name.endswith(("k_scale", "v_scale"))]
    expected = predicted(case, checkpoint, found)
    server = VllmServer(model=checkpoint, log=directory / f"keys{exponent}.log", ready_seconds=400)
    with server:
        kl = measured(server, found.golden)
        code, report = verify(server.url, "--golden", checkpoint)
    print(f"\nkeys times 2^{exponent}: {kl:.5f} nats; predicted {expected.mean:.5f}", end="")
    print(f" ({expected.low:.5f} to {expected.high:.5f})")
    assert expected.holds(kl)
    assert code == 0, report


def test_another_path_is_told_apart(calibration: Calibration) -> None:
    """What is predicted for a cache that truncates is far from one that rounds to nearest."""
    expected = ExpectedSet.load(calibration.path)
    gpu = expected.find(ServingPath(kv_cache="e4m3", queries=True))
    cpu = expected.find(ServingPath(kv_cache="e4m3", kv_rounding="truncate"))
    full = expected.find(ServingPath(kv_cache="float16"))
    assert gpu is not None and cpu is not None and full is not None
    assert full.mean < gpu.mean < cpu.mean
    assert not full.holds(cpu.mean)


REFUSED = {
    "fp8-static": "static_scaled_fp8_quant",
    "fp8-block": "requires AMX tile support",
    "nvfp4": "Failed to find a kernel that can implement the NVFP4 linear layer",
    "mxfp4": "Failed to find a kernel that can implement the MXFP4 linear layer",
    "mxfp8": "Failed to find a kernel that can implement the MXFP8 linear layer",
}


@pytest.fixture(scope="module")
def refusals(calibration: Calibration, directory: Path) -> dict[str, str]:
    """What it writes before it ends, by preset; two are started at a time."""
    presets = [preset for preset in REFUSED if not (AMX and preset == "fp8-block")]

    def refused(preset: str, checkpoint: Path) -> str:
        log = directory / f"{preset} refused.log"
        server = VllmServer(model=checkpoint, log=log, ready_seconds=400)
        with pytest.raises(ServerFailed, match="ended with code"), server:
            pass
        return log.read_text()

    cases = [Case(preset, "e5m2") for preset in presets]
    checkpoints = [
        exported(case, recipe_of(case), calibration, directory, predict=False) for case in cases
    ]
    with ThreadPoolExecutor(2) as two:
        return dict(zip(presets, two.map(refused, presets, checkpoints), strict=True))


@pytest.mark.parametrize("preset", REFUSED)
def test_it_refuses_what_it_has_no_kernel_for(preset: str, refusals: dict[str, str]) -> None:
    if preset not in refusals:
        pytest.skip("a CPU with AMX has this kernel: run it on one without")
    assert REFUSED[preset] in refusals[preset]
