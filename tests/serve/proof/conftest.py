from pathlib import Path

import pytest

from tests.serve.proof.fake_proofs import write_proofs


@pytest.fixture(scope="session")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an export of the fake model carries."""
    return write_proofs(tmp_path_factory.mktemp("proofs") / "export")
