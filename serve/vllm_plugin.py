"""vLLM's entry point to Octet's attention backend; vLLM calls `register` in each of its processes.

The backend runs only on request: `vllm serve ... --kv-cache-dtype fp8_e5m2 --attention-backend
CUSTOM`.
"""

__all__ = ["register"]


def register() -> None:
    """Registers the backend under vLLM's name for backends of others; imports nothing of it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "serve.vllm_e5m2.E5m2Backend")
