"""ONNX exports read back from the graph: sound ones are found sound, and faults are named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from export.onnx.graph import Graph
from export.onnx.write import Target, export_onnx
from octet.artifacts.manifest import Manifest, write_artifact
from octet.recipe import KvCacheDtype, Recipe
from tests.export.conftest import make_calibration
from verify.artifact import verify
from verify.reader.onnx import WrittenGraph

LAYER = "model.layers.1"
Q, K, V = (f"{LAYER}.self_attn.{p}_proj.weight" for p in "qkv")
UP = f"{LAYER}.mlp.up_proj.weight"
RECIPES = ("fp8", "fp8-static", "fp8-block", "mxfp8", "mxfp4", "nvfp4")
Damage = Callable[[onnx.ModelProto], None]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_a_graph_is_found_to_hold_the_original(
    recipe: str, target: Target, graphs: dict[str, Path], calibrations: dict[str, Path]
) -> None:
    name = recipe if target == "onnxruntime" else f"{recipe}-tensorrt"
    if name not in graphs:
        assert recipe == "mxfp4"
        return
    found = verify(graphs[name], calibration=calibrations[recipe])
    assert found.problems == [] and found.unchecked == []
    assert len(found.rows) == 14 and found.copied >= 6
    assert all(row.unrounded == 0 and abs(row.margin) < 0.5 for row in found.rows)
    assert target in found.format


def test_the_full_precision_graph_is_the_original_bit_for_bit(
    decoders: dict[str, Path], tiny_model: Path
) -> None:
    found = verify(decoders["full"], model=tiny_model)
    assert found.problems == [] and found.rows == [] and found.copied == 20
    assert "full precision" in found.format


def test_weights_in_a_file_of_their_own_are_read(tiny_model: Path, tmp_path: Path) -> None:
    codes = (np.arange(2048) % 120).astype(np.uint8).reshape(4, 512)
    graph = Graph("external")
    x = graph.input("x", TensorProto.FLOAT, ["n", 512])
    weight = graph.array("w", codes, TensorProto.FLOAT8E4M3FN)
    scale = graph.array("w_scale", np.array([1, 2, 3, 4], np.float32))
    real = graph.node("DequantizeLinear", [weight, scale], "w.real", axis=0)
    graph.output("y", TensorProto.FLOAT, ["n", 4])
    graph.node("MatMul", [x, graph.node("Transpose", [real], "w.turned", perm=[1, 0])], "y")
    graph.save(tmp_path, inline_limit=0)
    assert (tmp_path / "model.onnx.data").stat().st_size > 0
    read = WrittenGraph.open(tmp_path).weight("w")
    assert np.array_equal(read.coded.codes, codes) and read.coded.tile == (1, 512)
    assert read.coded.dequantized()[3, 7] == 4 * read.coded.elements.values[codes[3, 7]]


FAULTS: list[tuple[str, str, str, str, Damage]] = []


def fault(recipe: str, where: str, what: str) -> Callable[[Damage], Damage]:
    def add(damage: Damage) -> Damage:
        name = f"{getattr(damage, '__name__', '')}-{recipe}"
        FAULTS.append((name, recipe, where, what, damage))
        return damage

    return add


def initializer(model: onnx.ModelProto, name: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def change(model: onnx.ModelProto, name: str, dtype: str, to: Callable[..., np.ndarray]) -> None:
    tensor = initializer(model, name)
    tensor.raw_data = to(np.frombuffer(tensor.raw_data, dtype).copy()).tobytes()


@fault("fp8", UP, "its scales divide where they should multiply")
def scales_divide(model: onnx.ModelProto) -> None:
    change(model, f"{UP}_scale", "f4", lambda scale: 1 / scale)


@fault("nvfp4", UP, "should multiply")
@fault("nvfp4-tensorrt", UP, "should multiply")
def global_scale_divides(model: onnx.ModelProto) -> None:
    name = UP.replace(".weight", ".weight_global_scale")
    change(model, name, "f4", lambda scale: 1 / scale)


@fault("nvfp4", UP, "the two nibbles of each byte are swapped")
@fault("mxfp4", UP, "the two nibbles of each byte are swapped")
def high_nibble_first(model: onnx.ModelProto) -> None:
    change(model, UP, "u1", lambda codes: (codes >> 4) | (codes << 4))


@fault("fp8", UP, "1 of 131072 codes are not the nearest to the original, the first at [3, 232]")
@fault("fp8-block-tensorrt", UP, "1 of 131072 codes are not the nearest")
def a_byte_flipped(model: onnx.ModelProto) -> None:
    def flip(codes: np.ndarray) -> np.ndarray:
        codes[1000] ^= 1
        return codes

    change(model, UP, "u1", flip)


@fault("fp8", K, f"it holds the weight of {V.removesuffix('.weight')}")
def projections_swapped(model: onnx.ModelProto) -> None:
    for suffix in ("", "_scale"):
        k, v = initializer(model, K + suffix), initializer(model, V + suffix)
        k.raw_data, v.raw_data = v.raw_data, k.raw_data


@fault("fp8", Q, "its scales are")
def scales_on_the_other_axis(model: onnx.ModelProto) -> None:
    change(
        model,
        f"{Q}_scale",
        "f4",
        lambda scale: scale * np.geomspace(0.01, 100, len(scale), dtype="f4"),
    )
    node = next(node for node in model.graph.node if Q in node.input)
    next(item for item in node.attribute if item.name == "axis").i = 1


@fault("fp8", f"{UP}_scale", "1 of 512 are zero")
def zero_scale(model: onnx.ModelProto) -> None:
    change(
        model,
        f"{UP}_scale",
        "f4",
        lambda scale: np.where(np.arange(len(scale)) == 7, 0, scale).astype("f4"),
    )


@fault("fp8", "forgotten", "no node of the graph reads it")
def an_input_that_nothing_reads(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("forgotten", TensorProto.INT64, [1]))


@fault("fp8", UP, "missing: the graph has no initializer of that name")
def a_weight_of_another_name(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.name == UP:
            tensor.name = "onnx::MatMul_1234"
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = "onnx::MatMul_1234" if name == UP else name


@fault("fp8", UP, "stored as BF16, and the recipe has e4m3 weights")
def silently_bfloat16(model: onnx.ModelProto) -> None:
    tensor = initializer(model, UP)
    tensor.data_type = TensorProto.BFLOAT16
    tensor.raw_data = b"\0" * (2 * len(tensor.raw_data))


@fault("fp8", "model.norm.weight", "1 of 256 values are not the original's, the first at [9]")
def a_norm_changed(model: onnx.ModelProto) -> None:
    def flip(bits: np.ndarray) -> np.ndarray:
        bits[9] ^= 1
        return bits

    change(model, "model.norm.weight", "u2", flip)


@fault("fp8-static", f"{LAYER}.mlp.down_proj.input_scale", "calibration has 0.0178571")
def an_input_scale_of_twice_the_size(model: onnx.ModelProto) -> None:
    change(model, f"{LAYER}.mlp.down_proj.input_scale", "f4", lambda scale: 2 * scale)


@fault("fp8", "present.1.key", "missing: no node of the graph computes it")
def a_cache_of_another_name(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = "keys" if name == "present.1.key" else name


@fault("fp8-static", f"{LAYER}.mlp.down_proj.input_scale", "calibration has 0.0178571437")
def an_input_scale_of_one_more_bit(model: onnx.ModelProto) -> None:
    change(
        model,
        f"{LAYER}.mlp.down_proj.input_scale",
        "f4",
        lambda scale: np.nextafter(scale, np.float32(1)),
    )


@pytest.mark.parametrize(
    ("recipe", "where", "what", "damage"),
    [case[1:] for case in FAULTS],
    ids=[case[0] for case in FAULTS],
)
def test_a_fault_of_a_graph_is_named_with_its_tensor(
    recipe: str,
    where: str,
    what: str,
    damage: Damage,
    graphs: dict[str, Path],
    calibrations: dict[str, Path],
    tmp_path: Path,
) -> None:
    path = damaged(graphs[recipe], tmp_path / "out", damage)
    found = verify(path, calibration=calibrations[recipe.removesuffix("-tensorrt")])
    assert found.exit_code == 1
    matching = [problem for problem in found.problems if problem.where == where]
    assert any(what in problem.what for problem in matching), [*map(str, found.problems)]
    assert len(found.problems) <= 5


def damaged(source: Path, out: Path, damage: Damage) -> Path:
    """A copy with a damaged graph and a manifest whose hashes are right."""
    manifest = Manifest.load(source)
    model = onnx.load(source / "model.onnx")
    damage(model)
    with write_artifact(out) as writer:
        for name in manifest.files:
            (writer.path / name).write_bytes((source / name).read_bytes())
        (writer.path / "model.onnx").write_bytes(model.SerializeToString())
        writer.finish(manifest)
    return out


CACHE = {"k": 0.3, "v": 0.45}  # scales with all their bits set, and no powers of two
CACHES: tuple[KvCacheDtype, ...] = ("e5m2", "e4m3", "float16")


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A directory with a calibration `cal`, and its export to each target with each cache."""
    root = tmp_path_factory.mktemp("cached")
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_scale{suffix}": value * (1 + layer)
        for layer in (0, 1)
        for kind, value in CACHE.items()
        for suffix in ("", "_e4m3", "_e5m2")
    }
    make_calibration(root / "cal", tiny_model, Recipe.load("fp8"), scales=scales)
    targets: tuple[Target, ...] = ("onnxruntime", "tensorrt")
    for target in targets:
        for cache in CACHES:
            out = root / f"{target}-{cache}"
            export_onnx(root / "cal", out, target=target, kv_cache=cache)
    return root


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_scales_of_the_cache_are_found_sound(target: Target, cache: str, cached: Path) -> None:
    assert verify(cached / f"{target}-{cache}", calibration=cached / "cal").problems == []


@pytest.mark.parametrize(
    ("graph", "name", "where", "what"),
    [
        (
            "onnxruntime-e5m2",
            "past_key_values.1.key.real.scale",
            "past_key_values.1.key",
            "read with scale 1.20000005, and calibration has 0.600000024 for e5m2",
        ),
        (
            "onnxruntime-e4m3",
            "present.1.value.stored.scale",
            "present.1.value",
            "stored with scale 1.79999995, and calibration has 0.899999976 for e4m3",
        ),
        (
            "onnxruntime-e4m3",
            "present.0.key.real.scale",
            "present.0.key",
            "read back with scale 0.600000024, and calibration has 0.300000012 for e4m3",
        ),
        ("tensorrt-e5m2", "present.0.key.scale_inverse", "present.0.key", "stored with scale 0.15"),
        ("tensorrt-e5m2", "present.0.key.scale", "present.0.key", "read back with scale 0.6"),
        (
            "tensorrt-e5m2",
            "e5m2.values.0.30000001192092896",
            "past_key_values.0.key",
            "read with scale 0.6",
        ),
        (
            "tensorrt-e4m3",
            "cache.scale.0.30000001192092896",
            "past_key_values.0.key",
            "read with scale 0.6",
        ),
    ],
)
def test_a_scale_of_the_cache_of_twice_the_size_is_named(
    graph: str, name: str, where: str, what: str, cached: Path, tmp_path: Path
) -> None:
    def double(model: onnx.ModelProto) -> None:
        kind = initializer(model, name).data_type
        dtype = {TensorProto.FLOAT: "f4", TensorProto.FLOAT16: "f2"}[kind]
        with np.errstate(over="ignore"):
            change(model, name, dtype, lambda scale: scale * np.array(2, dtype))

    path = damaged(cached / graph, tmp_path / "out", double)
    problems = verify(path, calibration=cached / "cal").problems
    assert where in {problem.where for problem in problems}
    assert any(what in problem.what for problem in problems), [*map(str, problems)]
    assert len(problems) <= 3


def test_a_table_that_is_not_e5m2s_is_found(cached: Path, tmp_path: Path) -> None:
    def nudge(table: np.ndarray) -> np.ndarray:
        table[17] *= 2
        return table

    name = "e5m2.values.0.30000001192092896"
    source, out = cached / "tensorrt-e5m2", tmp_path / "out"
    path = damaged(source, out, lambda model: change(model, name, "f2", nudge))
    (problem,) = verify(path, calibration=cached / "cal").problems
    assert problem.where == "past_key_values.0.key" and "read with scale nan" in problem.what


def test_a_file_that_is_no_graph_is_a_finding(
    graphs: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    path = damaged(graphs["fp8"], tmp_path / "out", lambda model: None)
    (path / "model.onnx").write_bytes(b"not a graph")
    found = verify(path, model=tiny_model)
    assert {problem.where for problem in found.problems} == {"model.onnx"}
