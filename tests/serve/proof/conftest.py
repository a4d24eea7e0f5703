from functools import partial
from pathlib import Path

import pytest

from tests.serve.proof.fake_proofs import write_proofs
from tests.serve.proof.verifying import Verify, run_verify


@pytest.fixture(scope="session")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an export of the fake model carries."""
    return write_proofs(tmp_path_factory.mktemp("proofs") / "export")


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verify:
    """`octet verify` in a window of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return partial(run_verify, capsys)
