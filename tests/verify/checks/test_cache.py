"""The cache that a checkpoint declares is held to the one that it was exported for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.export.handmade import E4M3_SCHEME, Damage, Tensors, write_handmade
from verify.artifact import verify

LAYER = "model.layers.1"


def with_cache(form: str, scheme: Any, scales: bool = True) -> Damage:
    """Declares `scheme`, under the dialect's name, and writes scales of 0.125."""
    projection = {"ct": "{0}", "modelopt": "{0}_proj.{0}", "fp8": "{0}_proj.output"}
    template = projection[form.partition("-")[0]]

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        if not form.startswith("fp8"):
            config["quantization_config"]["kv_cache_scheme"] = scheme
        for layer in ("model.layers.0", LAYER) if scales else ():
            for kind in "kv":
                name = f"{layer}.self_attn.{template.format(kind)}_scale"
                tensors[name] = torch.tensor([0.125])

    return change


@pytest.mark.parametrize("form", ["ct-channel", "modelopt-fp8", "fp8-static"])
def test_a_declared_e4m3_cache_is_found_sound(form: str, tiny_model: Path, tmp_path: Path) -> None:
    damage = with_cache(form, E4M3_SCHEME)
    details = {"kv_cache": "e4m3"}
    path = write_handmade(tmp_path / "out", tiny_model, form, damage=damage, details=details)
    found = verify(path, model=tiny_model)
    assert found.problems == [] and found.exit_code == 0


@pytest.mark.parametrize(
    ("form", "cache", "damage", "where", "what"),
    [
        (
            "ct-channel",
            "e4m3",
            with_cache("ct-channel", None),
            "config.json",
            "declares no E4M3 cache (kv_cache_scheme), and this was exported for one",
        ),
        (
            "modelopt-fp8",
            "e4m3",
            with_cache("modelopt-fp8", None),
            "config.json",
            "declares no E4M3 cache",
        ),
        (
            "modelopt-fp8",
            "e4m3",
            with_cache("modelopt-fp8", E4M3_SCHEME | {"num_bits": 4}),  # vLLM takes it for none
            "config.json",
            "declares no E4M3 cache",
        ),
        (
            "ct-channel",
            "e4m3",
            with_cache("ct-channel", E4M3_SCHEME | {"dynamic": True}),
            "config.json",
            "declares scales of the cache that are made at run time",
        ),
        (
            "ct-channel",
            "e5m2",
            with_cache("ct-channel", E4M3_SCHEME),
            "config.json",
            "declares an E4M3 cache, and this was exported for e5m2: vLLM refuses",
        ),
        (
            "modelopt-fp8",
            "float16",
            with_cache("modelopt-fp8", E4M3_SCHEME),
            "config.json",
            "declares an E4M3 cache, and this was exported for float16",
        ),
        (
            "fp8-static",
            "e4m3",
            with_cache("fp8-static", None, scales=False),
            f"{LAYER}.self_attn.v_scale",
            "missing: this was exported for an E4M3 cache, and engines put 1.0 there",
        ),
    ],
)
def test_the_cache_is_the_one_that_was_exported_for(
    form: str,
    cache: str,
    damage: Damage,
    where: str,
    what: str,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    details = {"kv_cache": cache}
    path = write_handmade(tmp_path / "out", tiny_model, form, damage=damage, details=details)
    found = verify(path, model=tiny_model)
    assert found.exit_code == 1 and len(found.problems) <= 4
    matching = [problem for problem in found.problems if problem.where == where]
    assert any(what in problem.what for problem in matching), [*map(str, found.problems)]
