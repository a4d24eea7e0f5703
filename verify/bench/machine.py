"""Measures the GPUs of this machine during a run, and reads the KV-cache capacity of a server."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from serve.backends.prometheus import load_of

__all__ = ["Gpu", "Watch", "gpu_name", "is_local", "kv_capacity", "watched"]

_EVERY_S = 0.1
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Gpu:
    """Memory in use (the most, in bytes, of all processes) and mean power of one GPU in a run."""

    index: int
    memory_bytes: int
    power_w: float | None


@dataclass
class Watch:
    """Samples of (time, GPU, bytes in use, milliwatts or None)."""

    samples: list[tuple[float, int, int, int | None]] = field(default_factory=list)

    def between(self, start: float, end: float) -> list[Gpu] | None:
        """Summarises the samples of a time span; None if there are none."""
        found = [sample for sample in self.samples if start <= sample[0] <= end]
        gpus = []
        for index in sorted({sample[1] for sample in found}):
            own = [sample for sample in found if sample[1] == index]
            power = [sample[3] for sample in own if sample[3] is not None]
            mean = sum(power) / len(power) / 1000 if power else None
            gpus.append(Gpu(index, max(sample[2] for sample in own), mean))
        return gpus or None


def is_local(url: str) -> bool:
    """Decides whether a server is on this machine, whose GPUs can be measured."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")


@contextmanager
def watched() -> Iterator[Watch | None]:
    """Samples this machine's GPUs until the end of the block; None without pynvml or a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: there is nothing to measure
        yield None
        return
    watch, stop = Watch(), threading.Event()
    try:
        handles = {i: pynvml.nvmlDeviceGetHandleByIndex(i) for i in _visible(pynvml)}
        thread = threading.Thread(target=_sample, args=(pynvml, handles, watch, stop), daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            stop.set()
            thread.join()
    finally:
        pynvml.nvmlShutdown()


def gpu_name() -> str | None:
    """Returns the name of the first GPU that this process may use; None without pynvml or one."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # as in `watched`
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(_visible(pynvml)[0])
        return str(pynvml.nvmlDeviceGetName(handle))
    except (IndexError, pynvml.NVMLError):
        return None
    finally:
        pynvml.nvmlShutdown()


def _visible(pynvml: Any) -> list[int]:
    """Returns the numbers of the GPUs that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    every = range(pynvml.nvmlDeviceGetCount())
    if all(one.strip().isdecimal() for one in chosen):
        return [i for i in every if i in map(int, chosen)]
    return list(every)


def _sample(pynvml: Any, handles: dict[int, Any], watch: Watch, stop: threading.Event) -> None:
    while not stop.wait(_EVERY_S):
        for index, handle in handles.items():
            try:
                used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            except pynvml.NVMLError:
                continue
            try:
                power = int(pynvml.nvmlDeviceGetPowerUsage(handle))
            except pynvml.NVMLError:
                power = None
            watch.samples.append((time.time(), index, used, power))


def kv_capacity(url: str, key: str | None) -> int | None:
    """Returns the tokens that fit into a server's KV cache; None if /metrics does not report it."""
    headers = {"user-agent": "octet"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        request = Request(f"{url}/metrics", headers=headers)
        with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_S) as answer:
            load = load_of(answer.read())
    except (OSError, HTTPException, ValueError):
        return None
    return None if load is None else load.capacity_tokens
