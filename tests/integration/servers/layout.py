"""Locates the environments of `make integration`, and what in them makes a server start.

.integration/
  vllm/          a virtual environment with vLLM's CPU build
  triton/        a virtual environment for Triton's Python models
    server/      the tritonserver binary, its libraries, the Python backend
    stub/        bin/python3 and pyvenv.cfg: what the embedded interpreter takes for its home
    lib/         libpython3.X.so.1.0, only where the system's loader does not find it
  tensorrt-rtx/  a virtual environment with TensorRT-RTX and this repository
  modelopt/      a virtual environment with ModelOpt, before this repository's own packages
  llm-compressor/  the same with llm-compressor
  kubernetes/    a virtual environment with Helm and the schemas of Kubernetes
  kube-apiserver/  a kube-apiserver, built from Debian's sources, and etcd
  browser/       a virtual environment with Playwright and axe-core, for the system's Chromium
  ray/           a virtual environment with Ray Serve, before this repository's own packages
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
ROOT = REPOSITORY / ".integration"

VLLM = ROOT / "vllm"
TRITON = ROOT / "triton"
TENSORRT_RTX = ROOT / "tensorrt-rtx"
MODELOPT = ROOT / "modelopt"
LLM_COMPRESSOR = ROOT / "llm-compressor"
BROWSER = ROOT / "browser"
KUBERNETES = ROOT / "kubernetes"
KUBE_APISERVER = ROOT / "kube-apiserver"
RAY = ROOT / "ray"

TRITON_SERVER = TRITON / "server"
TRITON_LIBRARIES = TRITON_SERVER / "nvidia_pytriton.libs"
TRITON_BINARY = TRITON_SERVER / "pytriton" / "tritonserver" / "bin" / "tritonserver"
TRITON_BACKENDS = TRITON_SERVER / "pytriton" / "tritonserver" / "backends"
TRITON_STUBS = TRITON_SERVER / "pytriton" / "tritonserver" / "python_backend_stubs"
TRITON_STUB_HOME = TRITON / "stub"
TRITON_PYTHON_LIBRARY = TRITON / "libpython"


def python(environment: Path) -> Path:
    return environment / "bin" / "python"


def stamp(environment: Path) -> Path:
    """The file that says with which requirements the environment was finished."""
    return environment / "octet-stamp"


def is_ready(environment: Path) -> bool:
    return stamp(environment).is_file()
