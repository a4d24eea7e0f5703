"""Attention over an E5M2 cache for vLLM on NVIDIA GPUs: `--attention-backend CUSTOM`.

vLLM loads `register` in each of its processes, where Octet is installed beside it.
"""

import logging

__all__ = ["register"]

TESTED = "0.24."  # vLLM's interface of attention backends changes from version to version

logger = logging.getLogger("vllm.octet")  # vLLM shows the lines of its own loggers


def register() -> None:
    """Registers the backend as `CUSTOM`, unless this vLLM is another version or lacks CUDA."""
    import torch
    import vllm  # its distribution may have another name

    if torch.version.cuda is None:
        return
    found: str = vllm.__version__
    if not found.startswith(TESTED):
        logger.info("Octet's E5M2 attention is not registered: vLLM %s is not %sx", found, TESTED)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, "serve.vllm_attention.backend.E5m2Backend")
