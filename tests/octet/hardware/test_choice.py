"""Tests which recipe and cache `--recipe auto` takes for some GPUs, and the reason it gives."""

from typing import Any

import pytest

from octet.errors import UnsupportedError
from octet.hardware.choice import Choice, choose
from octet.hardware.devices import find_device


def chosen(devices: str, **more: Any) -> Choice:
    found = [find_device(name) for name in devices.split(",")]
    return choose(found, **more)


@pytest.mark.parametrize(
    ("devices", "small", "recipe", "cache"),
    [
        ("h100,l40s,b200", False, "fp8", "e4m3"),
        ("h100,l40s,b200", True, "fp8", "e4m3"),  # 4 bits are weight-only on two of them
        ("b200", True, "nvfp4", "e4m3"),
        ("b200", False, "fp8", "e4m3"),
        ("b200,mi355x", True, "fp8", "e4m3"),  # an MI355X emulates nvfp4
        ("a100,h100", False, "fp8", "e4m3"),
        ("a100", True, "nvfp4", "e4m3"),
        ("t4", False, "fp8", "float16"),
        ("cpu-avx512", False, "fp8", "e4m3"),
    ],
)
def test_what_runs_natively_on_all_of_them(
    devices: str, small: bool, recipe: str, cache: str
) -> None:
    found = chosen(devices, small=small)
    assert (found.recipe.name, found.recipe.kv_cache) == (recipe, cache)


def test_the_reason_is_a_sentence_and_both_caches_are_what_they_are() -> None:
    found = chosen("h100,l40s,b200")
    assert found.reason == (
        "fp8: the most exact that vLLM runs natively on H100, L40S, B200; E4M3 cache: holds as many"
        " tokens as E5M2 and is more exact"
    )
    assert found.details() == {"for": ["H100", "L40S", "B200"], "reason": found.reason}
    about = {candidate.name: candidate.about for candidate in found.caches}
    assert "more exact" in about["e4m3"] and "wider" in about["e5m2"]
    assert "at worst weight-only on A100 80GB, H100" in chosen("a100,h100").reason
    assert "16-bit cache: no 8-bit cache is known" in chosen("t4").reason


def test_versions_that_differ_are_told() -> None:
    e5m2 = next(each for each in chosen("h100").caches if each.name == "e5m2")
    assert e5m2.cells == ("refused in some versions",) and not e5m2.runs
    e5m2 = next(each for each in chosen("h100", version="0.24.0").caches if each.name == "e5m2")
    assert e5m2.cells == ("native",)


def test_a_cache_that_is_asked_for_is_taken() -> None:
    found = chosen("h100", cache="e5m2")
    assert found.recipe.kv_cache == "e5m2" and found.reason.endswith("E5M2 cache: as asked")


def test_where_nothing_is_known_nothing_is_guessed() -> None:
    with pytest.raises(UnsupportedError, match="--for Gaudi 3, H100: no recipe is known to run"):
        chosen("gaudi3,h100")
