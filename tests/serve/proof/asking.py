"""A probe of a few records, short and long."""

from typing import Any

from octet.artifacts.golden import GoldenSet
from serve.backends.base import Backend
from serve.proof.probe import probe
from tests.fakes import byte_tokenizer
from tests.serve.proof.fake_proofs import fake_golden

__all__ = ["RECORDS", "asked"]

RECORDS = [5, 20, 40, 60]


async def asked(backend: Backend, golden: GoldenSet | None = None, **options: Any) -> Any:
    records = options.pop("records", RECORDS)
    options = {"tokenizer": byte_tokenizer(), "vocab_size": 257, "timeout_s": 20.0} | options
    return await probe(backend, golden or fake_golden(), records, **options)
