"""CUDA source to code for one GPU, by NVRTC: at run time, without nvcc, and without the GPU."""

from dataclasses import dataclass
from typing import Any, Self

from octet.errors import UnsupportedError

__all__ = ["CudaError", "Target", "architectures", "checked", "compile_source", "load_nvrtc"]


class CudaError(RuntimeError):
    """A call of cuda-bindings failed; `str()` is the name of its status."""


@dataclass(frozen=True)
class Target:
    """Machine code of `architecture` (90 is compute capability 9.0); if not `native`, its PTX,
    which the driver of a newer GPU compiles."""

    architecture: int
    native: bool

    @classmethod
    def nearest(cls, known: list[int], capability: tuple[int, int]) -> Self | None:
        """The best of `known` for that compute capability; None if all are too new."""
        wanted = 10 * capability[0] + capability[1]
        nearest = max((architecture for architecture in known if architecture <= wanted), default=0)
        return cls(nearest, nearest == wanted) if nearest else None

    @property
    def option(self) -> str:
        return f"--gpu-architecture={'sm' if self.native else 'compute'}_{self.architecture}"

    @property
    def kind(self) -> str:
        return "cubin" if self.native else "ptx"


def load_nvrtc(what: str, packages: str) -> Any:
    """NVRTC's bindings; UnsupportedError if they or NVRTC are not installed: `what` needs them, and
    `packages` bring them."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the library itself is not found
        why = " ".join(str(error).split())
        raise UnsupportedError(
            f"{what} needs cuda-bindings and NVRTC ({why}): pip install {packages}"
        ) from None
    return nvrtc


def architectures(nvrtc: Any) -> list[int]:
    """Those that it compiles for."""
    known: list[int] = checked(nvrtc.nvrtcGetSupportedArchs())
    return known


def compile_source(
    nvrtc: Any, name: str, source: bytes, target: Target, options: list[str]
) -> bytes:
    """The code of `source`, a file called `name`. RuntimeError has NVRTC's log of its mistakes."""
    program = checked(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in (target.option, *options)]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{name}: {log.decode().strip()}")
        size, read = (
            (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
            if target.native
            else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        )
        code: bytes = b" " * checked(size(program))
        checked(read(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of cuda-bindings returned beside its status; CudaError if that is not 0."""
    status, *values = result
    if status.value != 0:
        raise CudaError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
