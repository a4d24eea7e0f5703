"""Stand-ins for the images that docker-compose.yml and the Dockerfiles name, under their names.

No registry is asked. They have in common a minimal Debian with Python 3.11. vLLM and Triton come
from the environments of `make integration`; vLLM's is mounted (`files.py`) instead of copied.
"""

import re
from pathlib import Path
from typing import Any

from tests.compose.engine import Engine
from tests.compose.prepare import BASE, ROOT, WHEELS
from tests.integration.servers import layout

__all__ = ["build_ours", "build_server_stand_ins", "build_stand_ins"]

DEBIAN = "octet-stand-in"
# pip takes the wheels from the folder: what an image is built of needs no network.
PYTHON = f"""FROM {DEBIAN}
COPY . /wheels
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels
"""
PROMETHEUS = f"""FROM {DEBIAN}
RUN ln -s busybox /bin/wget && mkdir /prometheus && chown 65534:65534 /prometheus
USER 65534:65534
ENTRYPOINT ["/usr/bin/prometheus"]
"""
TRITON = """FROM {python}
COPY pytriton/tritonserver /opt/tritonserver
COPY nvidia_pytriton.libs /opt/tritonserver/lib
RUN cd /opt/tritonserver \\
  && cp python_backend_stubs/3.11/triton_python_backend_stub backends/python/ \\
  && chmod +x bin/tritonserver backends/python/triton_python_backend_stub
ENV PATH=/opt/tritonserver/bin:$PATH LD_LIBRARY_PATH=/opt/tritonserver/lib
"""
VLLM = f"""FROM {DEBIAN}
ENV PATH={layout.VLLM.resolve()}/bin:$PATH
"""


def base_of(dockerfile: str) -> str:
    """Returns the image that a Dockerfile in deploy/ starts from."""
    text = (ROOT / "deploy" / dockerfile).read_text()
    (image,) = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    return image


def build_stand_ins(engine: Engine, services: dict[str, Any]) -> None:
    """The images that others are built of or that are not ours, but for Grafana's."""
    python = base_of("Dockerfile")
    engine.docker("import", BASE, DEBIAN)
    build(engine, python, WHEELS, stdin=PYTHON)
    build(engine, services["prometheus"]["image"], stdin=PROMETHEUS)


def build_server_stand_ins(engine: Engine, services: dict[str, Any]) -> None:
    """vLLM's and Triton's, which `build_stand_ins` must have preceded."""
    build(engine, services["vllm"]["image"], stdin=VLLM)
    triton = TRITON.format(python=base_of("Dockerfile"))
    build(engine, base_of("triton.Dockerfile"), layout.TRITON_SERVER, stdin=triton)


def build_ours(engine: Engine, service: dict[str, Any]) -> None:
    """The image of a service, by its Dockerfile as it is."""
    dockerfile = ROOT / service["build"]["dockerfile"]
    engine.docker("build", "--tag", service["image"], "--file", dockerfile, ROOT)


def build(engine: Engine, tag: str, context: Path | None = None, *, stdin: str) -> None:
    """Builds `stdin`, a Dockerfile, with the files of `context`."""
    source: tuple[str | Path, ...] = ("--file", "-", context) if context else ("-",)
    engine.docker("build", "--tag", tag, *source, stdin=stdin)
