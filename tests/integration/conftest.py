"""Fixtures that start real servers; `make integration` builds their environments.

`start_vllm` and `start_triton` return functions: a test names the checkpoint or the model
repository, and gets a running server that lives until the end of the module. Asking twice for the
same one gives the same server. A vLLM takes 2 GB of memory: where a module needs several,
`start_vllm_for_test` gives one that ends with its test.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from octet.hardware.cores import usable_cores
from tests.conftest import memory_gb
from tests.integration.servers import layout
from tests.integration.servers.launch import TritonServer, VllmServer, cpu_flags
from tests.shared import Shared

EXAMPLE = Path(__file__).parents[2] / "examples" / "python-lm"
AMX = "amx_tile" in cpu_flags()
FP8_BLOCKS = pytest.mark.skipif(
    not AMX,
    reason="vLLM's CPU build serves fp8-block only with AMX: use such a machine",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Servers take up to 10 GB a process of tests, and two cores."""
    return max(1, min(usable_cores(), memory_gb() // 10, 4))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for a server's fixture carries that server's marker."""
    for item in items:
        for name in ("vllm", "triton"):
            if any(
                fixture.startswith(f"start_{name}") for fixture in getattr(item, "fixturenames", ())
            ):
                item.add_marker(name)


def require(environment: Path) -> None:
    if not layout.is_ready(environment):
        pytest.skip(f"no {environment.name} environment on this machine: run `make integration`")


@pytest.fixture(scope="module")
def start_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VllmServer]]:
    """`start_vllm(checkpoint, **fields of VllmServer)`: a vLLM (CPU build) that serves it."""
    with ExitStack() as stack:
        yield starter(stack, tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def start_vllm_for_test(tmp_path: Path) -> Iterator[Callable[..., VllmServer]]:
    """`start_vllm`, whose servers end with the test."""
    with ExitStack() as stack:
        yield starter(stack, tmp_path / "logs")


def starter(stack: ExitStack, logs: Path) -> Callable[..., VllmServer]:
    """Returns a function that starts a vLLM, which `stack` ends; its log is in `logs`."""
    require(layout.VLLM)
    if "avx512f" not in cpu_flags():
        pytest.skip("vLLM's CPU build keeps an FP8 KV cache only with AVX-512: use such a machine")
    running: dict[str, VllmServer] = {}

    def start(model: Path, **fields: Any) -> VllmServer:
        key = f"{model.resolve()} {sorted(fields.items())}"
        if key not in running:
            server = VllmServer(model=model, log=logs / f"{len(running)}.log", **fields)
            running[key] = stack.enter_context(server)
        return running[key]

    return start


@pytest.fixture(scope="module")
def start_triton(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Path], TritonServer]]:
    """`start_triton(model_repository)`: a Triton with the Python backend that serves it."""
    require(layout.TRITON)
    logs = tmp_path_factory.mktemp("triton")
    running: dict[Path, TritonServer] = {}
    with ExitStack() as stack:

        def start(model_repository: Path) -> TritonServer:
            key = model_repository.resolve()
            if key not in running:
                server = TritonServer(model_repository=key, log=logs / f"{len(running)}.log")
                running[key] = stack.enter_context(server)
            return running[key]

        yield start


@pytest.fixture(scope="session")
def tensorrt_rtx_python() -> Path:
    """The interpreter that has TensorRT-RTX and this repository: `-m octet build-engine` runs."""
    require(layout.TENSORRT_RTX)
    return layout.python(layout.TENSORRT_RTX)


@pytest.fixture(scope="session")
def modelopt_python() -> Path:
    """The interpreter that has ModelOpt, this repository and all that calibration needs."""
    require(layout.MODELOPT)
    return layout.python(layout.MODELOPT)


@pytest.fixture(scope="session")
def llm_compressor_python() -> Path:
    """The interpreter that has llm-compressor, and this repository."""
    require(layout.LLM_COMPRESSOR)
    return layout.python(layout.LLM_COMPRESSOR)


def octet(*arguments: object, python: Path | str = sys.executable) -> None:
    command = [str(python), "-m", "octet", *(str(argument) for argument in arguments)]
    subprocess.run(command, check=True, cwd=EXAMPLE.parents[1])


@pytest.fixture(scope="session")
def exports(shared: Shared) -> Path:
    """A directory with the example calibrated (fp8, and fp8-static from it) and exported."""
    return shared.directory("exports", write_exports)


def write_exports(out: Path) -> None:
    samples = EXAMPLE / "samples"
    octet(
        *("calibrate", EXAMPLE / "model", "--samples", samples / "calibration.jsonl"),
        *("--held-out", samples / "heldout.jsonl", "--recipe", "fp8"),
        *("-o", out / "calibration-fp8"),
    )
    # An engine is built of it, and not run: nothing need be predicted.
    octet(
        *("rescale", out / "calibration-fp8", "--recipe", "fp8-static", "--no-predict"),
        *("-o", out / "calibration-fp8-static"),
    )
    for target in ("checkpoint", "onnx"):
        octet("export", target, out / "calibration-fp8", "-o", out / target)
    octet(
        *("export", "triton", out / "calibration-fp8", "--backend", "python"),
        *("--name", "python-lm", "-o", out / "triton_models" / "python-lm"),
    )


@pytest.fixture(scope="module")
def vllm(exports: Path, start_vllm: Callable[..., VllmServer]) -> VllmServer:
    return start_vllm(exports / "checkpoint", served_name="python-lm-fp8")


@pytest.fixture(scope="module")
def triton(exports: Path, start_triton: Callable[[Path], TritonServer]) -> TritonServer:
    return start_triton(exports / "triton_models")
