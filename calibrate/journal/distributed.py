"""Data parallel calibration: N processes started by torchrun share the batches and sum the counts.

Adding integers gives the same sum in any order, so N processes produce exactly the histograms of
one process. Objects are sent through gloo on the CPU; counts too, or through NCCL between GPUs.
One of them computes the golden records instead, and all share the scenarios of the predictions.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.decoder.loading import resolve_device
from octet.errors import ArtifactError, ConfigError, GpuError, OctetError

__all__ = ["Group", "TorchGroup", "gpu_failures", "process_group", "require_agreement"]

# Rank 0 may search for a budget while the others wait. torchrun ends all ranks when one dies.
_PATIENCE = timedelta(days=7)

T = TypeVar("T")

# How messages of CUDA's errors begin, from torch and from `octet.hardware.nvrtc.checked`.
_CUDA_ERRORS = ("CUDA", "Unexpected error from cuda", "The NVIDIA driver")

# What to do if ranks disagree on a fact, if that is not obvious.
_REMEDIES = {
    "device": "their results differ in the last bits; choose GPUs of one model with"
    " CUDA_VISIBLE_DEVICES, or CPUs with the same instructions",
}


class Group:
    """The processes that share a calibration; this class is a group of this process alone."""

    rank = 0
    world = 1

    def gather(self, item: Any) -> list[Any]:
        """Returns `item` of every rank, by rank, on every rank; also a barrier."""
        return [item]

    def sum(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sum of every rank's `counts`, on every rank."""
        return counts

    def add(self, values: torch.Tensor) -> None:
        """Replaces `values` by the sum of every rank's, the same bits on every rank."""

    def share(self, arrays: Mapping[str, NDArray[np.float32]]) -> Mapping[str, NDArray[np.float32]]:
        """Returns rank 0's `arrays`, on every rank."""
        return arrays

    def agree(self, error: OctetError | None) -> None:
        """Raises the first error of any rank on every rank; also a barrier.

        Only rank 0 is to print it.
        """
        for found in self.gather(error):
            if found is not None:
                found.printed_elsewhere = self.rank != 0
                raise found

    def attempt(self, work: Callable[[], T]) -> T:
        """Runs `work` and returns its result; raises the first error of any rank on every rank.

        OctetErrors are caught as they are, and OSErrors as ArtifactErrors.
        """
        error: OctetError | None = None
        try:
            result = work()
        except OctetError as caught:
            error = caught
        except OSError as caught:
            where = "" if caught.filename is None else f"{caught.filename}: "
            error = ArtifactError(f"{where}{caught.strerror or caught}")
        self.agree(error)
        return result

    def on_first(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 alone; returns its result, or raises its error, on every rank."""
        result: T = self.gather(self.attempt(work if self.rank == 0 else lambda: None))[0]
        return result

    def without_last(self) -> "Group | None":
        """Returns a group of all ranks but the last, which gets None; every rank calls it."""
        return None


class TorchGroup(Group):
    """The ranks of a group of torch.distributed that begins with rank 0, by default of all."""

    def __init__(self, device: torch.device, ranks: Any = None) -> None:
        self.rank = torch.distributed.get_rank(ranks)
        self.world = torch.distributed.get_world_size(ranks)
        self._device, self._ranks = device, ranks

    def without_last(self) -> Group | None:
        ranks = torch.distributed.new_group(list(range(self.world - 1)), timeout=_PATIENCE)
        if self.rank == self.world - 1:
            return None
        return TorchGroup(self._device, ranks) if self.world > 2 else Group()

    def gather(self, item: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(found, item, group=self._ranks)
        return found

    def sum(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        total = torch.from_numpy(counts).to(self._device, copy=True)
        torch.distributed.all_reduce(total, group=self._ranks)
        summed: NDArray[np.int64] = total.cpu().numpy()
        return summed

    def add(self, values: torch.Tensor) -> None:
        torch.distributed.all_reduce(values, group=self._ranks)

    def share(self, arrays: Mapping[str, NDArray[np.float32]]) -> Mapping[str, NDArray[np.float32]]:
        # One by one: the scales of a large FP4 model take many gigabytes.
        found = dict(arrays)
        for name, shape in self.gather({k: x.shape for k, x in arrays.items()})[0].items():
            sent = np.require(found.get(name, np.empty(shape, np.float32)), np.float32, ["C", "W"])
            torch.distributed.broadcast(torch.from_numpy(sent), 0, group=self._ranks)
            found[name] = sent
        return found


@contextmanager
def process_group(device: str = "cpu") -> Iterator[tuple[Group, torch.device]]:
    """Yields the group that torchrun's variables describe, or this process alone; and its device.

    `device` is "auto", "cpu" or "cuda". With "cuda", each rank of a machine takes the GPU of its
    number. Raises ConfigError if there are fewer GPUs.
    """
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device(resolve_device(device))
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        if count <= local:
            raise ConfigError(
                f"--device cuda: rank {local} of this machine finds {count} GPUs; start one"
                " process for each"
            )
        chosen = torch.device("cuda", local if chosen.index is None else chosen.index)
        torch.cuda.set_device(chosen)
    if world == 1:
        yield Group(), chosen
        return
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield TorchGroup(chosen), chosen
        torch.distributed.barrier()  # otherwise gloo's threads lose their peers
    finally:
        torch.distributed.destroy_process_group()
        # A reference cycle may keep the group and its threads alive. A thread that needs the
        # interpreter while it shuts down crashes the process ("terminate called without an active
        # exception").
        gc.collect()


@contextmanager
def gpu_failures() -> Iterator[None]:
    """Raises GpuError, with what to do, for an error of CUDA.

    After one, cleaning up fails too: the first of the errors that led to the last is reported.
    """
    try:
        yield
    except Exception as last:
        errors = list(_chain_of(last))
        found = [str(error) for error in errors if _is_of_cuda(error)]
        if not found:
            raise
        what = found[-1].splitlines()[0].rstrip(".")
        phases = [note for error in errors for note in getattr(error, "__notes__", ())]
        raise GpuError(
            f"{_gpu()} failed{f' in {phases[0]!r}' if phases else ''}: {what}. Finished work is"
            " kept: give the same command again. If it fails again, look for ECC errors in"
            " `nvidia-smi -q` and for Xid in `dmesg`, or give --device cpu --restart"
        ) from last


def _chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, the one that was handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__context__


def _is_of_cuda(error: BaseException) -> bool:
    full = isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, RuntimeError) and not full and str(error).startswith(_CUDA_ERRORS)


def _gpu() -> str:
    """Names this process's GPU, as far as a GPU that has failed answers queries."""
    try:
        index = torch.cuda.current_device()
        return f"GPU {index} ({torch.cuda.get_device_name(index)})"
    except Exception:
        return "the GPU"


def require_agreement(group: Group, facts: Mapping[str, str]) -> None:
    """Raises ConfigError naming the first rank whose `facts` differ from rank 0's, and the fact."""
    first, *others = group.gather(dict(facts))
    for rank, other in enumerate(others, start=1):
        for what, value in first.items():
            if other.get(what) != value:
                raise ConfigError(
                    f"rank {rank} has another {what} than rank 0 ({other.get(what)}, not {value}):"
                    f" {_REMEDIES.get(what, 'every process must be given the same')}"
                )
