"""Recipes: presets, files, and what is said of a mistake in one."""

from pathlib import Path

import pytest

from octet.errors import ConfigError
from octet.recipe import PRESETS, Recipe


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_its_own_yaml(name: str, tmp_path: Path) -> None:
    import yaml

    recipe = Recipe.load(name)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert Recipe.load(str(path)) == recipe


@pytest.mark.parametrize(
    ("module", "excluded"),
    [
        ("lm_head", True),
        ("model.embed_tokens", True),
        ("model.layers.3.mlp.gate", True),
        ("model.layers.3.mlp.gate_proj", False),
        ("model.layers.0.self_attn.q_proj", False),
    ],
)
def test_default_exclusions(module: str, excluded: bool) -> None:
    assert Recipe.load("fp8").excludes(module) is excluded


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown recipe 'fp8-statik'; did you mean 'fp8-static'"
    ):
        Recipe.load("fp8-statik")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wieghts: {}", r"did you mean 'weights'"),
        ("name: [", "recipe.yaml"),
        ("", "recipe.yaml: top level: should be a section of keys and values"),
        ("name: mine", "recipe.yaml: weights: missing"),
        (
            "name: x\nweights: {granularity: channel}\nactivations: {granularity: token}",
            "dynamic: true",
        ),
        (
            "name: x\nweights: {granularity: block}\nactivations: {granularity: tensor}",
            "needs group_size",
        ),
        (
            "name: x\nweights: {granularity: channel, group_size: 128}\n"
            "activations: {granularity: tensor}",
            "group_size is for granularity block and group alone",
        ),
        (
            "name: x\nweights: {granularity: block, group_size: 64}\n"
            "activations: {granularity: tensor}",
            "group_size of e4m3 with float32 scales is 128",
        ),
        (
            "name: x\nweights: {granularity: channel}\n"
            "activations: {granularity: channel, dynamic: true}",
            "channel weights with channel activations is served by nothing",
        ),
        (
            "name: x\nweights: {granularity: tensor}\n"
            "activations: {granularity: tensor, dynamic: true}",
            "static per tensor",
        ),
        (
            "name: x\nweights: {granularity: channel, dynamic: true}\n"
            "activations: {granularity: tensor}",
            "weights are quantized once",
        ),
    ],
)
def test_a_bad_file_says_where_in_one_line(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        Recipe.load(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and "Value error" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        Recipe.load(str(tmp_path / "absent.yaml"))


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: not UTF-8"):
        Recipe.load(str(path))


@pytest.mark.parametrize("name", PRESETS)
def test_a_scheme_says_its_kind(name: str) -> None:
    recipe = Recipe.load(name)
    kinds = {recipe.weights.kind, recipe.activations.kind}
    assert kinds == {"fp8" if name.startswith("fp8") else name}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("activations: {granularity: tensor, margin: 9}", "less than or equal to 8"),
        ("activations: {granularity: tensor, margin: -1}", "greater than or equal to 0"),
        (
            "activations: {granularity: tensor, margin: 1, method: mse}",
            "margin is for static activation scales of method max",
        ),
        (
            "activations: {granularity: token, dynamic: true, margin: 1}",
            "margin is for static activation scales of method max",
        ),
    ],
)
def test_a_margin_is_for_static_scales_of_max(part: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"name: r\nweights: {{granularity: tensor}}\n{part}\n")
    with pytest.raises(ConfigError, match=said):
        Recipe.load(str(path))


def test_weights_need_no_margin(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "name: r\nweights: {granularity: tensor, margin: 1}\nactivations: {granularity: tensor}\n"
    )
    with pytest.raises(ConfigError, match="weights do not change, and need no head-room"):
        Recipe.load(str(path))
