"""Runs a TensorRT engine: a `Runner` whose cache, and all that a step moves, is on the GPU.

Prefill and decoding each have their own optimization profile, and so their own lane
(serve/tensorrt/lane.py).
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.manifest import PLAN_FILE, Manifest
from octet.errors import BackendError, ConfigError
from octet.hardware.tensorrt_log import logger
from octet.model.spec import ModelSpec
from serve.runner.protocol import CacheDtype, RunnerLost, StepBatch
from serve.tensorrt.cache import DeviceCache
from serve.tensorrt.gpu import Gpu
from serve.tensorrt.interface import Dtypes, Limits
from serve.tensorrt.kernels import Kernels
from serve.tensorrt.lane import Lane
from serve.tensorrt.library import load_engine, load_library, require_gpu

__all__ = ["TensorRTRunner"]


class TensorRTRunner:
    """A `Runner` over one engine on one GPU, for one thread at a time."""

    def __init__(self, directory: Path, *, device: int = 0) -> None:
        """Opens and verifies `directory`.

        Raises UnsupportedError, before the plan is read, for an engine of another GPU or another
        TensorRT than those here, and ArtifactError for an incomplete or altered engine.
        """
        self.manifest = Manifest.load(directory, "engine", verify=False)
        trt = load_library(directory, self.manifest)
        self.gpu = Gpu(device)
        require_gpu(directory, self.manifest, self.gpu)
        self.manifest.verify(directory)
        # The runtime must outlive the engine, and the engine its contexts.
        self._runtime, self._engine = load_engine(trt, directory / PLAN_FILE)
        spec = self.manifest.model.spec
        self.kv_dtype: CacheDtype = _kv_dtype(self.manifest)
        dtypes = Dtypes.of(trt, self._engine, spec, directory)
        self._kernels = Kernels(
            self.gpu,
            cache_bytes=dtypes.cache_bytes,
            present_bytes=dtypes.present_bytes,
            dim=spec.head_dim,
        )
        self._item_bytes = dtypes.cache_bytes
        profiles = [
            Limits.of(self._engine, index)
            for index in range(self._engine.num_optimization_profiles)
        ]
        # The profile with one new token per row decodes; the other is for prefill.
        order = sorted(enumerate(profiles), key=lambda item: (item[1].tokens, -item[1].batch))
        self.decode, self.prefill = (
            Lane(self._engine, index, limits, self.gpu, spec, dtypes, logger(trt))
            for index, limits in order[:2]
        )
        self.slots = self.decode.limits.batch
        longest = min(self.prefill.limits.cached, self.decode.limits.cached, spec.max_positions)
        self.spec: ModelSpec = spec.model_copy(update={"max_positions": longest})

    def new_cache(self, slots: int, positions: int) -> DeviceCache:
        """See `Runner`. Raises ConfigError for more slots than the engine decodes together."""
        most = self.decode.limits.batch
        if slots > most:
            raise ConfigError(
                f"slots: {slots} is more than the {most} sequences that the engine decodes"
                f" together; take {most}, or octet build-engine --max-batch {slots}"
            )
        self.gpu.activate()
        return DeviceCache(
            self.spec,
            slots,
            positions,
            gpu=self.gpu,
            kernels=self._kernels,
            item_bytes=self._item_bytes,
        )

    def forward(self, step: StepBatch, cache: DeviceCache) -> NDArray[np.float32]:
        """See `Runner`. The logits are valid until the next call.

        Raises RunnerLost once the GPU has failed for good, whichever call reports it first: CUDA
        returns such an error from any later call.
        """
        try:
            self.gpu.activate()
            return self._forward(step, cache)
        except RunnerLost:
            raise
        except BackendError:
            self.gpu.synchronize()
            raise

    def _forward(self, step: StepBatch, cache: DeviceCache) -> NDArray[np.float32]:
        if step.token_ids.shape[1] == 1:
            return self.decode.run(step, cache)
        limits = self.prefill.limits
        tokens, logits = step.token_ids.shape[1], step.logit_positions.shape[1]
        if tokens <= limits.tokens and logits <= limits.logits:
            return self.prefill.run(step, cache)
        return self._in_parts(step, cache)

    def _in_parts(self, step: StepBatch, cache: DeviceCache) -> NDArray[np.float32]:
        """Runs a prompt of more tokens, or logits, than the engine takes at once: [1, L, V]."""
        assert len(step.slots) == 1
        size = min(self.prefill.limits.tokens, self.prefill.limits.logits)
        wanted = step.logit_positions[0]
        found = np.empty((1, len(wanted), self.spec.vocab_size), np.float32)
        for start in range(0, step.token_ids.shape[1], size):
            ids = step.token_ids[:, start : start + size]
            (here,) = np.nonzero((start <= wanted) & (wanted < start + size))
            # An engine returns at least one row of logits.
            positions = wanted[here] - start if len(here) else np.zeros(1, np.int64)
            part = self._forward(StepBatch(ids, step.slots, positions[None]), cache)
            found[0, here] = part[0, : len(here)]
        return found


def _kv_dtype(manifest: Manifest) -> CacheDtype:
    described = manifest.details["kv_cache"]
    name: CacheDtype = described["dtype"] if isinstance(described, dict) else described
    return name
