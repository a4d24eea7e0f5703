"""The backends that take turns to answer for one model."""

import time
from collections.abc import Callable, Iterator

from octet.errors import OctetError
from serve.backends.base import Backend
from serve.config import BackendConfig, EmbeddedConfig, HttpConfig, PoolConfig, TritonConfig

__all__ = ["Pool", "make_backend"]

COOL_DOWN_S = 5.0  # a backend that could not be reached is tried last for so long


class Pool:
    """Round robin over the backends of `name`; the ones that just failed come last."""

    def __init__(
        self, name: str, backends: list[Backend], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert backends
        self.name = name
        self.backends = backends
        self._clock = clock
        self._next = 0
        self._cooling_until: dict[int, float] = {}  # index of a backend -> when it is as before

    def order(self) -> Iterator[Backend]:
        """Every backend once, in the order to try them; advances the turn by one."""
        count, now = len(self.backends), self._clock()
        turn = [(self._next + i) % count for i in range(count)]
        self._next = (self._next + 1) % count
        turn.sort(key=lambda index: self._cooling_until.get(index, 0.0) > now)
        return (self.backends[index] for index in turn)

    def failed(self, backend: Backend) -> None:
        """Notes that `backend` could not be reached."""
        self._cooling_until[self.backends.index(backend)] = self._clock() + COOL_DOWN_S

    @property
    def context_length(self) -> int | None:
        """The shortest context among the backends that say theirs."""
        return min((b.context_length for b in self.backends if b.context_length), default=None)

    async def start(self) -> None:
        for backend in self.backends:
            await backend.start()

    async def close(self) -> None:
        for backend in self.backends:
            await backend.close()

    @classmethod
    def from_config(cls, name: str, config: PoolConfig) -> "Pool":
        """Raises OctetError if a backend's library or files are missing."""
        return cls(name, [make_backend(name, entry) for entry in config.backends])


def make_backend(model: str, config: BackendConfig) -> Backend:
    """The backend that `config` describes, for the public name `model`; not yet started.

    The libraries of a kind of backend are imported only where one is configured.
    """
    if isinstance(config, EmbeddedConfig):
        from serve.backends.embedded import EmbeddedBackend

        return EmbeddedBackend(config.path, model=model, slots=config.slots, context=config.context)
    if isinstance(config, HttpConfig):
        from serve.backends.openai_http import OpenAiHttpBackend

        return OpenAiHttpBackend(model, config)
    assert isinstance(config, TritonConfig), config
    try:
        from serve.backends.triton_grpc import TritonBackend
    except ModuleNotFoundError as error:
        raise OctetError(
            f"a triton backend needs {error.name}: pip install 'octet[serve]'"
        ) from None
    return TritonBackend(model, config)
