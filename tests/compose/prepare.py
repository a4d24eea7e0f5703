"""Gathers in `.compose/` all that `make compose-test` needs from a network; standard library only.

    base.tar   a minimal Debian with Python, Prometheus and libfaketime: the base of every image
    wheels-*/  the packages of our images, as the configured index has them

The example's artifacts are written to `out/demo`, as docker-compose.yml expects. What is there
already is kept; `rm -r .compose` starts anew.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PREPARED = ROOT / ".compose"
BASE = PREPARED / "base.tar"
REQUIREMENTS = b"".join(
    (ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml")
)
WHEELS = PREPARED / f"wheels-{hashlib.sha256(REQUIREMENTS).hexdigest()[:12]}"
DEMO = ROOT / "out" / "demo"
TRITON_ENTRY = DEMO / "triton_models" / "python-lm"
COMMANDS = ("debootstrap", "docker", "docker-compose", "dockerd", "ip", "iptables", "unshare")

DEBIAN = "bookworm"  # its Python is 3.11
PYTHON = "3.11"
PACKAGES = (
    *("python3", "python3-venv", "python3-pip", "libpython3.11"),
    *("busybox", "ca-certificates", "faketime", "libgomp1", "libnuma1", "prometheus"),
)
UNUSED = ("doc", "javascript", "locale", "man", "nodejs")  # of /usr/share: most of the size


def missing() -> str | None:
    """Returns what this machine lacks and how to get it, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "compose tests start a Docker engine of their own: run them as root on Linux"
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    if absent:
        return (
            f"compose tests need {', '.join(absent)}: "
            "apt-get install docker.io docker-compose debootstrap iproute2 iptables"
        )
    return None


def run(*command: str | Path) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nerror: {command[0]} ended with {done.returncode}")


def make_base() -> None:
    with tempfile.TemporaryDirectory(dir=PREPARED) as directory:
        root = Path(directory) / "root"
        include = f"--include={','.join(PACKAGES)}"
        run("debootstrap", "--variant=minbase", include, DEBIAN, root)
        for unused in [*(root / "usr/share" / name for name in UNUSED), root / "var/cache/apt"]:
            shutil.rmtree(unused, ignore_errors=True)
        (root / "usr/bin/python").symlink_to("python3")  # as Docker's Python image has it
        partial = PREPARED / "base.partial"
        run("tar", "--create", "--file", partial, "--directory", root, ".")
        partial.rename(BASE)


def download_wheels() -> None:
    """Resolves once for each image, because Triton's stub wants numpy 1."""
    partial = PREPARED / "partial-wheels"
    shutil.rmtree(partial, ignore_errors=True)
    unpinned = PREPARED / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    unpinned.write_text("".join(line for line in lines if not line.startswith("numpy==")))
    for constraints, wanted in (
        (ROOT / "constraints.txt", ("octet-llm[serve,sign,traces]", "setuptools>=77", "wheel")),
        (unpinned, ("octet-llm[serve]", "numpy<2")),
    ):
        ours, *others = wanted
        run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--dest", partial),
            *("--python-version", PYTHON, "--only-binary", ":all:", "--constraint", constraints),
            *(f"{ours} @ file://{ROOT}", *others),
        )
    for ours in partial.glob("octet*"):
        ours.unlink()
    for outdated in PREPARED.glob("wheels-*"):
        shutil.rmtree(outdated)
    partial.rename(WHEELS)


def write_artifacts() -> None:
    if not (DEMO / "onnx").is_dir() or not (DEMO / "checkpoint").is_dir():
        run(sys.executable, ROOT / "examples" / "demo.py", "--out", DEMO)
    if not TRITON_ENTRY.is_dir():
        export = ("export", "triton", DEMO / "calibration", "--name", "python-lm")
        run(sys.executable, "-m", "octet", *export, "--out", TRITON_ENTRY)


def main() -> None:
    os.chdir(ROOT)
    if problem := missing():
        sys.exit(f"error: {problem}")
    PREPARED.mkdir(exist_ok=True)
    for path, make in ((BASE, make_base), (WHEELS, download_wheels)):
        if not path.exists():
            print(f"making {path.relative_to(ROOT)} ...", flush=True)
            make()
    write_artifacts()


if __name__ == "__main__":
    main()
