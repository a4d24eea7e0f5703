"""What a plan says fits does, and what is one step larger does not."""

from pathlib import Path
from typing import Any

import pytest

from export.checkpoint.write import export_checkpoint
from octet.errors import ConfigError, UnsupportedError
from octet.hardware.devices import find_device
from octet.plan.html import render_page
from octet.plan.planner import Goal, Model, Plan, Row, make_plan, parse_tokens
from octet.plan.sizes import Sizes
from octet.plan.vllm_memory import Engine, default_batched_tokens, divide, usable_memory
from octet.recipe import PRESETS, Recipe
from tests.export.conftest import make_calibration
from tests.models import write_model
from tests.octet.plan.shapes import LLAMA_8B, LLAMA_70B, QWEN3_MOE, spec_of, write_config


def planned(
    path: Path,
    config: dict[str, Any],
    gpu: str,
    context: int = 8192,
    concurrency: int = 16,
    **more: Any,
) -> Plan:
    model = Model.open(write_config(path / "model", config))
    return make_plan(model, Goal(find_device(gpu), context, concurrency, 256, **more))


def row_of(plan: Plan, recipe: str, kv_cache: str) -> Row:
    return next(row for row in plan.rows if (row.recipe, row.kv_cache) == (recipe, kv_cache))


def test_a_70b_model_needs_fewer_gpus_with_fewer_bits(tmp_path: Path) -> None:
    plan = planned(tmp_path, LLAMA_70B, "h100")
    assert row_of(plan, "bf16", "float16").tensor_parallel == 4
    assert row_of(plan, "fp8", "e4m3").tensor_parallel == 2
    assert row_of(plan, "nvfp4", "e4m3").tensor_parallel == 1
    assert row_of(plan, "fp8", "e4m3").support == "native"
    assert row_of(plan, "nvfp4", "e4m3").support == "weight-only"
    flags = " ".join(row_of(plan, "fp8", "e5m2").flags)
    assert "--tensor-parallel-size 2" in flags and "--kv-cache-dtype fp8_e5m2" in flags


SMALL_MOE = QWEN3_MOE | {"num_hidden_layers": 8}


@pytest.mark.parametrize("config", [LLAMA_8B, LLAMA_70B, SMALL_MOE], ids=["8b", "70b", "moe"])
@pytest.mark.parametrize("gpu", ["l40s", "h200", "mi300x"])
def test_the_longest_context_and_the_largest_batch_fit_and_more_does_not(
    config: dict[str, Any], gpu: str, tmp_path: Path
) -> None:
    plan = planned(tmp_path, config, gpu)
    assert plan.rows
    spec = spec_of(config)
    sizes = {name: Sizes(spec, recipe) for name, recipe in PRESETS.items()}
    sizes["bf16"] = Sizes(spec, None)
    for row in plan.rows:
        if row.longest_context < config["max_position_embeddings"]:
            assert fits(plan, sizes[row.recipe], row, row.longest_context, 16)
            assert not fits(plan, sizes[row.recipe], row, row.longest_context + 16, 16)
        assert fits(plan, sizes[row.recipe], row, 8192, row.largest_batch)
        assert not fits(plan, sizes[row.recipe], row, 8192, row.largest_batch + 1)


def fits(plan: Plan, sizes: Sizes, row: Row, context: int, concurrency: int) -> bool:
    """Divides the memory again, for another load."""
    device = plan.goal.device
    assert device.memory is not None
    batched = max(default_batched_tokens(device.memory, device.name), concurrency)
    engine = Engine(row.tensor_parallel, concurrency, batched)
    memory = divide(sizes, row.kv_cache, engine, usable_memory(device.memory))
    return -(-context // 16) * concurrency <= memory.blocks


def test_the_price_of_tokens_counts_every_gpu(tmp_path: Path) -> None:
    row = row_of(planned(tmp_path, LLAMA_70B, "h100", price=2.0), "fp8", "e4m3")
    assert row.tokens_per_s is not None and row.cost is not None
    assert row.cost == pytest.approx(2 * 2.0 / (3600 * row.tokens_per_s) * 1e6)
    assert row_of(planned(tmp_path, LLAMA_70B, "h100"), "fp8", "e4m3").cost is None


def test_what_the_gpu_refuses_is_left_out_with_the_reason(tmp_path: Path) -> None:
    plan = planned(tmp_path, LLAMA_8B, "t4", context=2048, concurrency=2)
    assert any("mxfp4" in line and "Min capability: 80" in line for line in plan.left_out)
    assert {row.support for row in plan.rows if row.recipe == "fp8"} == {"weight-only"}


@pytest.mark.parametrize(
    ("config", "gpu", "context", "concurrency", "message"),
    [
        (LLAMA_8B, "h100", 200_000, 1, "model takes 131072 tokens at most"),
        (LLAMA_8B, "sm87", 8192, 1, "its memory is not known.* would run fp8 weight-only"),
        (LLAMA_8B, "l4", 131_072, 64, "do not fit on 8 GPUs.*give --concurrency 18 or"),
        (LLAMA_8B | {"num_hidden_layers": 2000}, "l4", 512, 1, "its weights take .* fewer bits"),
        (LLAMA_8B, "h100", 200, 1, "--output 256: give a number of tokens below the context"),
    ],
)
def test_what_cannot_be_planned_says_what_can(
    config: dict[str, Any], gpu: str, context: int, concurrency: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, config, gpu, context, concurrency)


def test_a_remedy_can_be_planned(tmp_path: Path) -> None:
    """The error names a concurrency and a context: both are accepted."""
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, LLAMA_8B, "l4", 131_072, 64)
    words = str(caught.value).split()
    batch = int(words[words.index("--concurrency") + 1])
    context = int(words[words.index("--context") + 1])
    assert planned(tmp_path, LLAMA_8B, "l4", 131_072, batch).rows
    assert planned(tmp_path, LLAMA_8B, "l4", context, 64).rows


def test_an_artifact_is_planned_with_its_own_recipe_and_cache(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama", hidden_size=128, intermediate_size=256)
    calibration = make_calibration(tmp_path / "calibration", model, Recipe.load("fp8"))
    export_checkpoint(calibration, tmp_path / "out")
    opened = Model.open(tmp_path / "out")
    assert [(r.name if r else None) for r in opened.recipes] == ["fp8"]
    assert opened.caches == ("e5m2",)
    assert Model.open(calibration).caches == ("float16", "e4m3", "e5m2")


def test_an_unknown_architecture_needs_its_weights(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "olmo2")
    assert Model.open(model).spec.generic
    for file in model.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UnsupportedError, match="architecture Olmo2ForCausalLM is not supported"):
        Model.open(model)


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("32k", 32768), ("1M", 1 << 20)])
def test_a_context_is_a_number_of_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


def test_the_page_asks_for_nothing_and_escapes_the_name(tmp_path: Path) -> None:
    model = Model.open(write_config(tmp_path / "<b>model"))
    page = render_page(make_plan(model, Goal(find_device("h100"), 8192, 16, 256)))
    assert "&lt;b&gt;model" in page and "<b>model" not in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert page.count("<svg") == 2 and "tokens/s" in page
