"""Checks the contract of a probe of any backend; on fakes here, on real servers in integration."""

import math
from collections.abc import Sequence

import pytest

from octet.artifacts.golden import POSITIONS, GoldenSet
from serve.backends.base import Backend
from serve.engine.tokenizer import Tokenizer
from serve.proof.probe import ALTERNATIVES, Probed, probe

__all__ = ["require_probed"]


async def require_probed(
    backend: Backend, golden: GoldenSet, records: Sequence[int], tokenizer: Tokenizer | None
) -> Probed:
    """Every record is answered, greedily, with the most likely tokens and what it cost."""
    probed = await probe(backend, golden, records, tokenizer=tokenizer, timeout_s=120.0)
    assert probed.failures == [] and probed.notes == [] and probed.state == "answered"
    assert sorted(response.record for response in probed.responses) == sorted(records)
    assert probed.alternatives == ALTERNATIVES and probed.salted == backend.accepts_extra
    asked = sum(len(golden.records[n].prompt_token_ids) for n in records)
    answered = sum(len(response.tokens) for response in probed.responses)
    assert probed.tokens == asked + answered and probed.seconds > 0
    for response in probed.responses:
        assert 0 < len(response.tokens) == len(response.tops) <= POSITIONS
        for token, top in zip(response.tokens, response.tops, strict=True):
            if top:
                assert max(top.values()) <= 1e-6
                assert math.fsum(map(math.exp, top.values())) < 1 + 1e-4
                if token >= 0:  # ties with the likeliest, at least
                    assert top[token] == pytest.approx(max(top.values()), abs=1e-4)
    return probed
