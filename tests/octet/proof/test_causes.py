"""Tests the sentences of causes: what the answers match, and what to do."""

from typing import get_args

import pytest

from octet.artifacts.scenarios import Fault, FaultKind, Scenario
from octet.artifacts.serving_path import ServingPath
from octet.proof.causes import ANOTHER_MODEL, cause_of

E5M2 = ServingPath(kv_cache="e5m2")
E4M3 = ServingPath(kv_cache="e4m3")
BARE = ServingPath(kv_cache="float16", weights=False, activations=False)


@pytest.mark.parametrize(
    ("path", "fault", "sentence"),
    [
        (E5M2, Fault(kind="k_scale_dropped"), "match weights without their k_scale"),
        (E4M3, Fault(kind="kv_bytes_reread"), "match E4M3 bytes read as E5M2"),
        (
            E5M2,
            Fault(kind="weight_scales_scaled", layer=3, factor=0.5),
            "match weight scales of layer 3 that are half of what they should be",
        ),
        (
            E5M2,
            Fault(kind="weight_scales_scaled", layer=0, factor=3.0),
            "match weight scales of layer 0 that are 3 times what they should be",
        ),
        (E5M2, Fault(kind="kv_scales_swapped"), "match an E5M2 cache with the scales of E4M3"),
        (E4M3, Fault(kind="kv_scales_swapped"), "match an E4M3 cache"),
        (E4M3, None, "match an E4M3 cache"),
        (ServingPath(kv_cache="float16"), None, "match a 16-bit cache"),
        (BARE, None, "match an unquantized model"),
        (
            E5M2.model_copy(update={"weights": False}),
            Fault(kind="k_scale_dropped"),
            "match an unquantized model with an E5M2 cache",
        ),
    ],
)
def test_a_server_declared_as_e5m2(path, fault, sentence: str) -> None:
    found = cause_of(Scenario(path=path, fault=fault), E5M2)
    assert found.sentence == sentence
    assert found.remedy


def test_every_fault_has_words_of_its_own() -> None:
    faults = [Fault(kind=kind, layer=1, factor=0.5) for kind in get_args(FaultKind)]
    found = [cause_of(Scenario(path=E5M2, fault=fault), E5M2) for fault in faults]
    assert len({cause.sentence for cause in found}) == len(faults)
    for cause in (*found, ANOTHER_MODEL):
        assert "known fault" not in cause.sentence, cause.name
        assert "\n" not in cause.sentence + cause.remedy


def test_a_quantized_model_where_the_original_was_declared() -> None:
    assert cause_of(Scenario(path=E5M2), BARE).name == "quantized"


def test_another_way_of_serving_names_it() -> None:
    truncated = E5M2.model_copy(update={"kv_rounding": "truncate"})
    assert "truncate" in cause_of(Scenario(path=truncated), E5M2).sentence
