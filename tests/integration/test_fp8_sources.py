"""llm-compressor's FP8_BLOCK checkpoint as a source: exported as it is, served and proven."""

from collections.abc import Callable
from pathlib import Path

import pytest

from octet.storage.tensors import TensorFile
from tests.integration.conftest import EXAMPLE, FP8_BLOCKS, octet
from tests.integration.servers.launch import VllmServer
from tests.integration.test_verify_peers import write
from tests.integration.test_verify_url import verify
from tests.shared import Shared

SCHEME = "FP8_BLOCK"


@pytest.fixture(scope="module")
def source(llm_compressor_python: Path, shared: Shared) -> Path:
    """A directory with the source, and its export with a 16-bit cache."""

    def build(out: Path) -> None:
        write(llm_compressor_python, "llm-compressor", EXAMPLE / "model", out, SCHEME)
        samples = EXAMPLE / "samples"
        octet(
            *("calibrate", out / SCHEME, "--samples", samples / "calibration.jsonl"),
            *("--held-out", samples / "heldout.jsonl", "--count", 128),
            *("--recipe", "fp8-block", "--out", out / "calibration"),
        )
        octet("export", "checkpoint", out / "calibration", "-o", out / "export", "--kv", "float16")

    return shared.directory("fp8-source", build)


def test_the_export_holds_the_bytes_of_llm_compressor(source: Path) -> None:
    before, after = (
        TensorFile.open(source / name / "model.safetensors") for name in (SCHEME, "export")
    )
    assert set(before.names) == set(after.names)
    for name in before.names:
        one, two = before.read(name), after.read(name)
        assert (one.dtype, one.shape) == (two.dtype, two.shape), name
        assert one.codes.tobytes() == two.codes.tobytes(), name
    assert sum(before.dtype(name) == "F8_E4M3" for name in before.names) == 6 * 7
    octet("verify", source / "export", "--model", source / SCHEME)


@FP8_BLOCKS
def test_a_vllm_of_the_export_is_proven(
    source: Path, start_vllm_for_test: Callable[..., VllmServer]
) -> None:
    server = start_vllm_for_test(source / "export", kv_cache_dtype="auto", generation_config="auto")
    code, found = verify(server.url, "--golden", source / "export", "--all")
    print(f"\n{found['verdict']['reason']}")
    assert (code, found["verdict"]["outcome"], found["findings"]) == (0, "as_expected", [])
