"""Build the environments of the integration tests' real servers; needs only the standard library.

    python tests/integration/servers/setup.py [NAME ...]

NAME is vllm, triton, tensorrt-rtx, modelopt, llm-compressor, browser, ray or kubernetes; without
one, all of these are built. kube-apiserver is built only when it is named: Go compiles for 5
minutes.

Each is built once: a stamp holds the hash of what it was built from, and an environment whose
stamp still matches is left alone. `TORCH_INDEX_URL` (or `TORCH_INDEX`, as in the Makefile) names
an extra package index for torch, such as PyTorch's own index of CPU builds.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import stub
from layout import (
    BROWSER,
    KUBE_APISERVER,
    KUBERNETES,
    LLM_COMPRESSOR,
    MODELOPT,
    RAY,
    REPOSITORY,
    ROOT,
    TENSORRT_RTX,
    TRITON,
    TRITON_SERVER,
    VLLM,
    python,
    stamp,
)

REQUIREMENTS = Path(__file__).parents[1]
TORCH = "torch==2.13.0"


class SetupError(Exception):
    """Why an environment cannot be built, in one line."""


def build_vllm() -> None:
    requirements = REQUIREMENTS / "requirements-vllm.txt"
    create_environment(VLLM)
    index = os.environ.get("TORCH_INDEX_URL") or os.environ.get("TORCH_INDEX")
    pip(VLLM, "install", TORCH, *(["--extra-index-url", index] if index else []))
    pip(VLLM, "install", "--no-deps", "-r", str(requirements))
    check(VLLM, "import vllm.entrypoints.openai.api_server")


def build_triton() -> None:
    interpreter = stub.find_interpreter()
    create_environment(TRITON, interpreter)
    pip(TRITON, "install", "--no-deps", "-r", str(REQUIREMENTS / "requirements-triton.txt"))
    pip(
        TRITON,
        *("download", "--no-deps", "--dest", str(TRITON_SERVER)),
        *("-r", str(REQUIREMENTS / "requirements-tritonserver.txt")),
    )
    stub.unpack_server()
    stub.place_stub(interpreter)
    add_repository(TRITON)


def build_tensorrt_rtx() -> None:
    create_environment(TENSORRT_RTX)
    requirements = REQUIREMENTS / "requirements-tensorrt-rtx.txt"
    pip(TENSORRT_RTX, "install", "--no-deps", "-r", str(requirements))
    add_repository(TENSORRT_RTX)
    check(TENSORRT_RTX, "import tensorrt_rtx, octet")


def build_modelopt() -> None:
    build_peer(MODELOPT)
    check(MODELOPT, "import modelopt.torch.quantization, numba, octet, transformers")


def build_llm_compressor() -> None:
    build_peer(LLM_COMPRESSOR)
    check(LLM_COMPRESSOR, "import llmcompressor, transformers")


def build_peer(environment: Path) -> None:
    """Packages in front of those of the environment that runs this, torch among them."""
    create_environment(environment)
    requirements = REQUIREMENTS / f"requirements-{environment.name}.txt"
    pip(environment, "install", "--no-deps", "-r", str(requirements))
    add_path(environment, "octet-packages.pth", Path(sysconfig.get_paths()["purelib"]))
    add_repository(environment)


def build_browser() -> None:
    create_environment(BROWSER)
    pip(BROWSER, "install", "--no-deps", "-r", str(REQUIREMENTS / "requirements-browser.txt"))
    check(BROWSER, "import axe_playwright_python.base, playwright.sync_api")


def build_kubernetes() -> None:
    create_environment(KUBERNETES)
    requirements = REQUIREMENTS / "requirements-kubernetes.txt"
    pip(KUBERNETES, "install", "--no-deps", "-r", str(requirements))
    check(KUBERNETES, "import helm_python, kubernetes_validate, cloudcoil.models.keda")


def build_kube_apiserver() -> None:
    """Debian ships kubectl alone, but the sources of all of Kubernetes with it."""
    shutil.rmtree(KUBE_APISERVER, ignore_errors=True)
    KUBE_APISERVER.mkdir()
    script = Path(__file__).with_name("kube_apiserver.sh")
    run(KUBE_APISERVER, ["sh", str(script), str(KUBE_APISERVER)])


def build_ray() -> None:
    build_peer(RAY)
    check(RAY, "import ray.serve, octet, onnxruntime")


BUILDERS: dict[Path, Callable[[], None]] = {
    VLLM: build_vllm,
    TRITON: build_triton,
    TENSORRT_RTX: build_tensorrt_rtx,
    MODELOPT: build_modelopt,
    LLM_COMPRESSOR: build_llm_compressor,
    BROWSER: build_browser,
    KUBERNETES: build_kubernetes,
    KUBE_APISERVER: build_kube_apiserver,
    RAY: build_ray,
}
ON_REQUEST = (KUBE_APISERVER,)


def create_environment(directory: Path, interpreter: str = sys.executable) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    run(directory, [interpreter, "-m", "venv", str(directory)])


def pip(environment: Path, command: str, *arguments: str) -> None:
    flags = ["--disable-pip-version-check", "--progress-bar", "off"]
    run(environment, [str(python(environment)), "-m", "pip", command, *flags, *arguments])


def check(environment: Path, statement: str) -> None:
    """The environment's own interpreter must be able to run `statement`."""
    run(environment, [str(python(environment)), "-P", "-c", statement])


def run(environment: Path, command: list[str]) -> None:
    """Run `command` with its output in the environment's log; its error becomes ours."""
    log = ROOT / f"{environment.name}.log"
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        done = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
        last_command = max(i for i, line in enumerate(lines) if line.startswith("$ "))
        errors = [line for line in lines[last_command:] if line.startswith("ERROR: ")]
        reason = errors[0].removeprefix("ERROR: ") if errors else lines[-1]
        raise SetupError(f"{reason} (all of the output: {log})")


def add_repository(environment: Path) -> None:
    """Make this working tree importable there; Triton's embedded interpreter ignores PYTHONPATH."""
    add_path(environment, "octet-repository.pth", REPOSITORY)


def add_path(environment: Path, name: str, path: Path) -> None:
    """Let the environment import what lies in `path`, after what is its own."""
    packages = next((environment / "lib").glob("python3.*")) / "site-packages"
    (packages / name).write_text(f"{path}\n")


def fingerprint(environment: Path) -> str:
    """A hash of all that decides what the environment holds."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {sys.prefix} {REPOSITORY} {TORCH}".encode())
    here = Path(__file__).parent
    sources = [here / name for name in ("setup.py", "stub.py", "layout.py", "kube_apiserver.sh")]
    for path in [*sources, *sorted(REQUIREMENTS.glob(f"requirements-{environment.name}*.txt"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def size_mb(directory: Path) -> float:
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / 1e6


def build(environment: Path) -> None:
    """Build one environment unless its stamp says that it is already there."""
    name, wanted, started = environment.name, fingerprint(environment), time.monotonic()
    if stamp(environment).is_file() and stamp(environment).read_text() == wanted:
        print(f"{name}: already there, {size_mb(environment):,.0f} MB", flush=True)
        return
    print(f"{name}: building in {environment} ...", flush=True)
    (ROOT / f"{name}.log").unlink(missing_ok=True)
    BUILDERS[environment]()
    stamp(environment).write_text(wanted)
    seconds = time.monotonic() - started
    print(f"{name}: ready in {seconds:.0f} s, {size_mb(environment):,.0f} MB", flush=True)


def main(names: list[str]) -> int:
    known = {environment.name: environment for environment in BUILDERS}
    if unknown := [name for name in names if name not in known]:
        print(f"error: no environment {unknown[0]!r}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    ROOT.mkdir(exist_ok=True)
    started = time.monotonic()
    for name in names or [name for name in known if known[name] not in ON_REQUEST]:
        try:
            build(known[name])
        except (SetupError, stub.StubError, OSError) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 1
    print(f"all ready in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
