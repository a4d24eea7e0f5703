"""Compiles CUDA source for one GPU with NVRTC, at run time; needs neither nvcc nor the GPU."""

from dataclasses import dataclass
from typing import Any, Self

from octet.errors import UnsupportedError

__all__ = ["CudaError", "Target", "architectures", "checked", "compile_source", "load_nvrtc"]


class CudaError(RuntimeError):
    """A call of cuda-bindings failed; `str()` is the name of its status."""


@dataclass(frozen=True)
class Target:
    """A compilation target: machine code of `architecture` (90 is compute capability 9.0).

    If not `native`, its PTX, which the driver of a newer GPU compiles.
    """

    architecture: int
    native: bool

    @classmethod
    def nearest(cls, known: list[int], capability: tuple[int, int]) -> Self | None:
        """Returns the best of `known` for that compute capability; None if all are too new."""
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
    """Returns NVRTC's bindings.

    Raises UnsupportedError if they or NVRTC are not installed; its message says that `what` needs
    them and that `packages` provide them.
    """
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
    """Returns the GPU architectures that NVRTC can compile for."""
    known: list[int] = checked(nvrtc.nvrtcGetSupportedArchs())
    return known


def compile_source(
    nvrtc: Any, name: str, source: bytes, target: Target, options: list[str]
) -> bytes:
    """Compiles `source`, a file called `name`; RuntimeError with NVRTC's log if that fails."""
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
    """Returns the results of a cuda-bindings call; CudaError if its status is not 0."""
    status, *values = result
    if status.value != 0:
        raise CudaError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
