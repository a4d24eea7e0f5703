"""Makes backends from their configuration; imports a kind's libraries only when it is used."""

from typing import assert_never

from octet.errors import OctetError
from serve.backends.base import Backend
from serve.config import BackendConfig, EmbeddedConfig, HttpConfig, ManagedConfig, TritonConfig

__all__ = ["make_backend"]


def make_backend(model: str, config: BackendConfig) -> Backend:
    """Makes the backend that `config` describes, for the public name `model`; does not start it.

    Raises OctetError if its library, its files or its secrets are missing.
    """
    if isinstance(config, EmbeddedConfig):
        from serve.backends.embedded import EmbeddedBackend

        return EmbeddedBackend.from_config(model, config)
    if isinstance(config, HttpConfig):
        from serve.backends.openai_http import OpenAiHttpBackend

        return OpenAiHttpBackend(model, config)
    if isinstance(config, ManagedConfig):
        from serve.backends.managed import ManagedBackend

        return ManagedBackend(model, config)
    if not isinstance(config, TritonConfig):
        assert_never(config)
    try:
        from serve.backends.triton_grpc import TritonBackend
    except ModuleNotFoundError as error:
        raise OctetError(
            f"a triton backend needs {error.name}: pip install 'octet-llm[serve]'"
        ) from None
    return TritonBackend(model, config)
