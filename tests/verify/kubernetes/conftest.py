from tests.serve.proof.conftest import proofs

__all__ = ["proofs"]
