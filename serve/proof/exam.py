"""The exam that a backend must pass to be proven, and the exam of each backend of a pool."""

import asyncio
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octet.artifacts.golden import GOLDEN_FILE
from octet.errors import ArtifactError
from octet.proof.responses import Response
from octet.proof.verdict import LeftOut, Verdict
from serve.backends.base import Backend
from serve.config import BackendConfig, EmbeddedConfig, ManagedConfig
from serve.config.proof import Proof
from serve.proof.probe import ClientView, Probed

if TYPE_CHECKING:
    from serve.proof.engine_report import Inspection  # loads the backends' libraries

__all__ = ["Exam", "Exams", "directory_of"]


class Exam(Protocol):
    """The test of a backend. A proof by one exam holds for any other with an equal `key`."""

    @property
    def key(self) -> Hashable: ...

    @property
    def label(self) -> str:
        """Description of what backends are proven against, for people."""

    @property
    def identity(self) -> str:
        """Identity of the artifact."""

    @property
    def least(self) -> int:
        """Number of answers without which an admission proves nothing."""

    def parts(self, seed: int, context: int | None) -> list[tuple[int, ...]]:
        """Returns the records of an admission, in the parts in which they are sent."""

    def left_out(self, context: int | None, failed: Collection[int] = ()) -> LeftOut | None:
        """Returns the records that do not fit into `context`, and those that `failed` to."""

    def slicing(self, seed: int, context: int | None) -> Callable[[int], tuple[int, ...]]:
        """Returns a function that returns the next records for the probe of a serving backend.

        These take as many tokens as its argument allows at most; () if none fits.
        """

    async def inspect(self, backend: Backend) -> "Inspection":
        """Compares what the engine reports about itself with the declared configuration."""

    async def probe(
        self, backend: Backend, records: Sequence[int], *, concurrency: int, timeout_s: float
    ) -> Probed: ...

    async def client_view(self, backend: Backend, *, timeout_s: float) -> ClientView:
        """Compares what clients get by default with the artifact."""

    async def judge(self, responses: Sequence[Response], checks: int) -> Verdict: ...


class Exams:
    """The exams of one pool's backends, each loaded once."""

    def __init__(self, config: Proof) -> None:
        self.config = config
        self._known: dict[tuple[Path, bool], Exam] = {}

    async def find(self, entry: BackendConfig | None) -> Exam | None:
        """Returns the exam of a backend; None: it serves unproven. Raises ArtifactError."""
        directory = directory_of(self.config, entry)
        if directory is None:
            return None
        key = (directory, isinstance(entry, EmbeddedConfig))
        if key not in self._known:
            self._known[key] = await asyncio.to_thread(self.load, *key)
        return self._known[key]

    def load(self, directory: Path, embedded: bool) -> Exam:
        """Loads an exam; `embedded`: for the engine of this process.

        Raises ArtifactError for damaged files.
        """
        from serve.proof.golden_exam import GoldenExam  # NumPy and statistics: only where needed

        try:
            return GoldenExam.load(directory, self.config, embedded=embedded)
        except ArtifactError as error:
            raise ArtifactError(f"{error} (--no-proof serves it unproven)") from None


def directory_of(config: Proof, entry: BackendConfig | None) -> Path | None:
    """Returns the directory of a backend's golden records; None: it serves unproven."""
    if not config.enabled:
        return None
    if config.golden is not None:
        return config.golden
    own = entry.path if isinstance(entry, EmbeddedConfig) else None
    if isinstance(entry, ManagedConfig):
        own = entry.artifact
    return own if own is not None and (own / GOLDEN_FILE).exists() else None
