from functools import partial

import pytest

from tests.serve.proof.conftest import proofs
from tests.verify.server.verifying import Verify, run_verify

__all__ = ["proofs"]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Runs `octet verify` in a window of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return partial(run_verify, capsys)
