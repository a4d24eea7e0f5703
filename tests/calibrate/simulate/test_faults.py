"""Tests weights with wrong scales: the codes that an export stores, times other scales."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from calibrate.simulate.faults import changes_weights, faulty_scales, faulty_weights
from calibrate.simulate.model import decoded_weights, module_schemes
from calibrate.simulate.scales import DeviceScales
from calibrate.simulate.scenarios import scenarios_of
from octet.artifacts.scenarios import Fault, FaultKind, Scenario
from octet.artifacts.serving_path import ServingPath
from octet.model.spec import ModelSpec
from octet.numerics import scaling
from octet.numerics.formats import FORMATS
from octet.numerics.microscaling import combined
from octet.numerics.scaling import Granularity
from octet.recipe import PRESETS, TensorScheme
from tests.calibrate.bench import Bench, make_bench, recipe_with
from tests.models import write_model

PATH = ServingPath(kv_cache="e5m2")


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Bench:
    return make_bench(tiny_model, samples=2)


def served(
    weight: NDArray[np.float32], scheme: TensorScheme, own: Any, shared: Any, read: Any, times: Any
) -> NDArray[np.float32]:
    """Stored with scales `own` and `shared`, and read with `read` and `times`."""
    granularity = Granularity.of(scheme.granularity, scheme.group_size)
    fmt = FORMATS[scheme.format]
    codes = scaling.quantize(weight, combined(own, shared), fmt, granularity)
    wanted = granularity.scale_shape(weight.shape)
    return scaling.dequantize(codes, np.broadcast_to(read, wanted), fmt, granularity) * times


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="weight_scales_dropped"),
        Fault(kind="weight_scales_scaled", layer=1, factor=0.5),
        Fault(kind="fused_scales_merged"),
        Fault(kind="fused_scales_smallest"),
        Fault(kind="fused_scales_in_one_slot"),
        Fault(kind="nibbles_swapped"),
        Fault(kind="global_scales_inverted"),
    ],
    ids=lambda fault: fault.kind,
)
def test_weights_are_their_codes_times_what_is_read(
    preset: str, fault: Fault, bench: Bench
) -> None:
    recipe, spec = recipe_with(preset), bench.checkpoint.spec
    scales = bench.scales(recipe)
    outer = "weight_global_scale" if preset == "nvfp4" else "weight_scale"
    if preset in ("fp8-static", "nvfp4"):  # as another tool leaves them, each with its own
        for n, name in enumerate(sorted(x for x in scales if x.endswith(outer))):
            scales[name] = np.float32(scales[name] * 1.25**n)
    scenario = Scenario(path=PATH, fault=fault)
    assert changes_weights(scenario, 1)
    assert changes_weights(scenario, 0) == (fault.layer is None)
    bare = PATH.model_copy(update={"weights": False})
    assert not changes_weights(Scenario(path=bare, fault=fault), 1)

    prefix = f"{spec.layer(1)}."
    schemes = {n: x for n, x in module_schemes(spec, recipe).items() if n.startswith(prefix)}
    original = {n: bench.checkpoint.read(f"{n}.weight").float32() for n in schemes}
    there = DeviceScales(scales, torch.device("cpu"))
    tensors = {n: torch.from_numpy(x) for n, x in original.items()}
    decoded = decoded_weights(tensors, schemes, there)
    before = {n: x.clone() for n, x in decoded.items()}
    found = faulty_weights(decoded, schemes, there, spec, scenario)
    for linear in (x for x in spec.linears() if x.name in schemes):
        scheme = schemes[linear.name][0]
        own, shared = (scales.get(f"{linear.name}.weight{x}_scale") for x in ("", "_global"))
        read, times = own, np.float32(1) if shared is None else shared
        fused = [x.name for x in spec.linears() if x.input == linear.input]
        every = [scales[f"{name}.{outer}"] for name in fused]
        weight = original[linear.name]
        match fault.kind:
            case "weight_scales_scaled" if preset == "fp8-static":  # first as engines fuse it
                weight = served(weight, scheme, own, None, own, np.float32(1))
                own = read = max(every)
                times = np.float32(0.5)
            case "nibbles_swapped" if scheme.format == "e2m1":
                granularity = Granularity.of(scheme.granularity, scheme.group_size)
                fmt = FORMATS[scheme.format]
                codes = scaling.quantize(weight, combined(own, shared), fmt, granularity)
                codes = codes.reshape(len(codes), -1, 2)[..., ::-1].reshape(codes.shape)
                theirs = scaling.dequantize(codes, own, fmt, granularity) * times
                np.testing.assert_allclose(found[linear.name].numpy(), theirs, rtol=1e-6, atol=0)
                continue
            case "nibbles_swapped":
                pass
            case "fused_scales_smallest" | "fused_scales_merged" if preset == "nvfp4":
                times = (min if "smallest" in fault.kind else max)(every)
            case "fused_scales_in_one_slot" if preset in ("fp8-static", "nvfp4"):
                first = linear.name == fused[0]
                if preset == "nvfp4":
                    times = times if first else np.float32(1)
                else:
                    read = read if first else np.float32(1)
            case "fused_scales_in_one_slot":
                pass
            case "weight_scales_dropped":
                read = np.float32(1)
            case "weight_scales_scaled":
                times = times * np.float32(0.5)
            case "global_scales_inverted":
                times = 1 / times
            case _ if scheme.granularity in ("tensor", "channel"):
                read = (min if "smallest" in fault.kind else max)(x.max() for x in every)
        theirs = served(weight, scheme, own, shared, read, times)
        np.testing.assert_allclose(found[linear.name].numpy(), theirs, rtol=1e-6, atol=0)
        assert torch.equal(decoded[linear.name], before[linear.name])


def test_scales_that_are_not_concerned_stay(bench: Bench) -> None:
    recipe = recipe_with("fp8-static", kv_cache="e5m2")
    scales = bench.scales(recipe)
    kinds: dict[FaultKind, str] = {
        "k_scale_dropped": "k_scale",
        "input_scales_dropped": "input_scale",
    }
    for kind, leaf in kinds.items():
        some = {n: x * 2 for n, x in scales.items()}
        found = faulty_scales(some, recipe, Scenario(path=PATH, fault=Fault(kind=kind)))
        changed = {n for n, x in found.items() if not np.array_equal(x, some[n])}
        assert changed == {n for n in scales if n.endswith(f".{leaf}")}
        assert all(found[n] == 1 for n in changed)
    assert faulty_scales(scales, recipe, Scenario(path=PATH)) is scales
    with pytest.raises(KeyError, match="k_scale_e4m3"):
        without = {n: x for n, x in scales.items() if not n.endswith("_e4m3")}
        fault = Fault(kind="kv_scales_swapped")
        faulty_scales(without, recipe, Scenario(path=PATH, fault=fault))


def kinds_of(bench: Bench, preset: str, kv_cache: str, **changed: float) -> dict[str, set[str]]:
    """Kinds of fault by the label of the path that they are in; `changed` scales by their leaf."""
    recipe = recipe_with(preset, kv_cache=kv_cache)
    scales = {
        n: np.float32(changed.get(n.rsplit(".")[-1], x)) if np.ndim(x) == 0 else x
        for n, x in bench.scales(recipe).items()
    }
    found = scenarios_of(bench.checkpoint.spec, recipe, scales)
    assert len({x.label for x in found}) == len(found)
    kinds: dict[str, set[str]] = {}
    for x in found:
        kinds.setdefault(x.path.label, set()).update({x.fault.kind} if x.fault else ())
    return kinds


@pytest.mark.parametrize("preset", PRESETS)
def test_faults_are_those_that_can_happen(preset: str, bench: Bench) -> None:
    e5m2 = kinds_of(bench, preset, "e5m2", k_scale=0.25, v_scale=1)
    own = next(iter(e5m2.values()))
    assert {"k_scale_dropped", "kv_scales_swapped", "kv_bytes_reread"} <= own
    assert {"weight_scales_dropped", "weight_scales_scaled"} <= own
    assert not own & {"v_scale_dropped", "kv_scales_dropped"}  # V's is 1 as it is
    assert ("input_scales_dropped" in own) == (preset == "fp8-static")
    assert ("global_scales_inverted" in own) == (preset == "nvfp4")
    assert ("nibbles_swapped" in own) == ("fp4" in preset)
    assert ("fused_scales_in_one_slot" in own) == (preset in ("fp8-static", "nvfp4"))
    assert "kv_scales_exchanged" in own
    # Per-tensor scales are shared by what is fused: nothing to merge.
    assert ("fused_scales_merged" in own) == (preset == "fp8")
    assert e5m2["nothing, e5m2 (nearest), bfloat16"] == {"k_scale_dropped"}
    assert not e5m2["nothing, float16, bfloat16"]
    truncated = {
        k for k, x in e5m2.items() if "e5m2 (truncate)" in k and "weight_scales_scaled" in x
    }
    assert len(truncated) == (preset.startswith("fp8"))  # vLLM multiplies no other on a CPU
    e4m3 = {label: kinds for label, kinds in e5m2.items() if "e4m3" in label and kinds}
    assert e4m3 and all(x == {"kv_scales_swapped", "kv_bytes_reread"} for x in e4m3.values())


def test_scales_of_one_are_not_missed(bench: Bench) -> None:
    kinds = kinds_of(bench, "fp8", "e5m2")  # 1, of values as these
    assert not any(
        "dropped" in x
        for x in kinds["weights+activations, e5m2 (nearest), bfloat16"] - {"weight_scales_dropped"}
    )
    both = kinds_of(bench, "fp8", "e4m3")
    assert "kv_scales_dropped" in next(iter(both.values()))
    assert both["nothing, e4m3 (truncate), bfloat16"] == {"kv_scales_dropped"}
    none = kinds_of(bench, "fp8", "float16")
    faulty = set().union(*none.values())
    assert faulty == {"weight_scales_dropped", "weight_scales_scaled", "fused_scales_merged"}


DROPPED, UNSCALED = "rope_parameters_dropped", "rope_scaling_dropped"
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 10_000.0}, set()),
        ({"rope_type": "default", "rope_theta": 1e6}, {DROPPED}),
        (LINEAR | {"rope_theta": 10_000.0}, {DROPPED}),
        (LINEAR | {"rope_theta": 1e6}, {DROPPED, UNSCALED}),
        # What scales nothing, at the lengths of any prompt.
        (LINEAR | {"rope_theta": 1e6, "factor": 1.0}, {DROPPED}),
        ({"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}, {DROPPED}),
        # Not described by ModelSpec for this architecture.
        ({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, {DROPPED, UNSCALED}),
    ],
)
def test_rope_parameters_are_missed_if_they_differ_from_the_usual(
    rope: dict[str, Any], expected: set[str], bench: Bench
) -> None:
    recipe, scales = recipe_with("fp8"), bench.scales(recipe_with("fp8"))
    config = json.loads((bench.checkpoint.path / "config.json").read_text())
    spec = ModelSpec.from_config(config | {"rope_parameters": rope}, "config.json")
    faults = [x for x in scenarios_of(spec, recipe, scales) if x.fault]
    kinds = {x.fault.kind for x in faults if x.fault}
    assert kinds & {DROPPED, UNSCALED} == expected
    weights = {x.path for x in faults if x.fault == Fault(kind="weight_scales_dropped")}
    for kind in expected:
        assert {x.path for x in faults if x.fault and x.fault.kind == kind} == weights
    unknown = spec.model_copy(update={"generic": True, "found": tuple(spec.linears())})
    found = scenarios_of(unknown, recipe, scales)
    assert not {x.fault.kind for x in found if x.fault} & {DROPPED, UNSCALED}


def test_experts_and_caches_may_take_the_scales_of_others(tmp_path: Path) -> None:
    made = make_bench(write_model(tmp_path / "moe", "qwen3_moe"), samples=2)
    recipe, spec = recipe_with("fp8", kv_cache="e4m3"), made.checkpoint.spec
    scales = made.scales(recipe)
    kinds = {x.fault.kind for x in scenarios_of(spec, recipe, scales) if x.fault}
    assert {"expert_scales_permuted", "kv_scales_exchanged"} <= kinds

    def fault(kind: FaultKind) -> Scenario:
        return Scenario(path=ServingPath(kv_cache="e4m3"), fault=Fault(kind=kind))

    read = faulty_scales(scales, recipe, fault("kv_scales_exchanged"))
    attention = f"{spec.layer(1)}.self_attn"
    assert read[f"{attention}.k_scale"] == scales[f"{attention}.v_scale"]
    assert read[f"{attention}.v_scale"] == scales[f"{attention}.k_scale"]

    prefix = f"{spec.layer(1)}.mlp.experts."
    schemes = {n: x for n, x in module_schemes(spec, recipe).items() if n.startswith(prefix)}
    there = DeviceScales(scales, torch.device("cpu"))
    tensors = {n: torch.from_numpy(made.checkpoint.read(f"{n}.weight").float32()) for n in schemes}
    decoded = decoded_weights(tensors, schemes, there)
    found = faulty_weights(decoded, schemes, there, spec, fault("expert_scales_permuted"))
    for number in range(spec.experts):
        name, other = (f"{prefix}{n}.up_proj" for n in (number, (number + 1) % spec.experts))
        ratio = scales[f"{other}.weight_scale"] / scales[f"{name}.weight_scale"]
        np.testing.assert_allclose(found[name].numpy(), decoded[name].numpy() * ratio, rtol=1e-5)
