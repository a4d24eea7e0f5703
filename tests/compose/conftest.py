"""The engine that all tests of a run share; `make compose-test` prepares what it needs."""

from collections.abc import Iterator

import pytest

from tests.compose import images
from tests.compose.engine import Engine, alone
from tests.compose.prepare import BASE, TRITON_ENTRY, WHEELS, missing
from tests.compose.project import COMPOSE


def obstacle() -> str | None:
    if problem := missing():
        return problem
    if not alone() or not all(path.exists() for path in (BASE, WHEELS, TRITON_ENTRY)):
        return "compose tests run in a network namespace, on prepared images: `make compose-test`"
    return None


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """An engine with the images of the CPU profile and of Prometheus."""
    if problem := obstacle():
        pytest.skip(problem)
    with Engine() as engine:
        images.build_stand_ins(engine, COMPOSE["services"])
        images.build_ours(engine, COMPOSE["services"]["gateway-cpu"])
        yield engine
