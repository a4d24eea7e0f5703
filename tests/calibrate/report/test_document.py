"""The report says what is known, warns of what costs, and names what it does not know."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from calibrate.report.console import print_report
from calibrate.report.summary import divergence_text
from octet.artifacts.serving_path import Expectation, ExpectedSet, ServingPath
from octet.recipe import Recipe, TensorScheme
from tests.calibrate.report_data import (
    budget,
    chunks,
    experts,
    make_report,
    observations,
    sensitivity,
    training,
)

INPUT = "model.layers.0.self_attn.q_proj.input"
KEY = "model.layers.1.self_attn.key"
TENSOR = TensorScheme(granularity="tensor")


def static(method: str) -> Recipe:
    activations = TensorScheme.model_validate(
        {"granularity": "tensor", "method": method, "percentile": 99.0}
    )
    return Recipe(name="test", weights=TENSOR, activations=activations)


def test_nothing_to_warn_about_is_said_so() -> None:
    report = make_report("fp8-static")
    assert report.warnings == ()
    assert report.summary.status == "ready"
    assert report.summary.title == "made-up as fp8-static: nothing to warn about"
    assert report.summary.todo == ("Nothing: export it.",)
    assert report.summary.enough.startswith("128 samples were enough")


def test_too_little_text_is_never_called_enough() -> None:
    said = "Whether 128 samples are enough is not known: they "
    short = make_report("fp8-static", tokens=256).summary.enough
    assert short == f"{said}hold 256 tokens in all, and even 2,048 would be few."
    same = make_report("fp8-static", distinct=1).summary.enough
    assert same == f"{said}hold only 1 distinct sample."
    assert make_report("fp8-static", distinct=128).summary.enough.startswith("128 samples were en")
    none = make_report("fp8", tokens=256).summary.enough
    assert none.startswith("No scale is taken from the samples: inputs are scaled at run time")


def test_what_was_predicted_is_known() -> None:
    before, after = make_report("nvfp4"), replace(make_report("nvfp4"), expected=predicted())
    assert "not measured" in before.summary.title
    assert any("was not simulated" in unknown.why for unknown in before.unknown)
    assert after.summary.expected.startswith("Expected KL from the original, over 64 prompts: 0.02")
    assert "not measured" not in after.summary.title
    assert [x.what for x in after.unknown if "output" in x.what or "layers" in x.what] == [
        "which layers cost most"
    ]


def test_a_model_that_cannot_be_proven_is_a_warning() -> None:
    why = "20 tokens hold 1.2% of it"
    expected = predicted().model_copy(update={"unprovable": why})
    report = replace(make_report("nvfp4"), expected=expected)
    assert report.warnings[-1] == f"no server of this model can be proven: {why}"
    assert "1 warning to read before export" in report.summary.title


def predicted() -> ExpectedSet:
    expected = Expectation(
        path=ServingPath(kv_cache="e5m2"), prompts=64, low=0.01, mean=0.02, high=0.03
    )
    return ExpectedSet(recipe="nvfp4", expectations=(expected,))


def test_what_recover_measured_is_known_and_its_remedies_name_the_other_command() -> None:
    large = {"counts": chunks(outlier={INPUT: 3e4}), "training": training()}
    report = make_report("nvfp4", training=training())
    assert report.summary.trained == (
        "Trained on 128 samples for 1 epoch, 16 steps: the divergence on 16,400 tokens of held-out"
        " samples is 0.04 nats a token, and 0.05 before: 20.0% less (95 % interval 18.0% to 22.0%)."
    )
    assert report.summary.todo == ("Nothing: export it.",)
    assert report.summary.title == "made-up as nvfp4: nothing to warn about"
    assert report.unknown[1].why.startswith("the held-out divergence is that of all")
    reports = [
        report,
        make_report("fp8-static", **large),
        make_report("fp8", **large, sensitivity=sensitivity(10.32)),
    ]
    remedies = [x.remedy for report in reports for x in (*report.findings, *report.unknown)]
    named = [line for line in remedies if "--" in line]
    assert len(named) == 5 and all("octet calibrate" in line for line in named)
    untrained = make_report("nvfp4", counts=chunks(outlier={INPUT: 3e4}))  # as of a rescale
    shown = [*untrained.summary.todo, *(x.remedy for x in untrained.unknown)]
    named = [line for line in shown if "--" in line]
    assert named and all("octet calibrate" in line for line in named)
    late = make_report("fp8-static", counts=chunks(late={INPUT: 30.0}), training=training())
    assert late.summary.todo == ("Train on 256 samples or more.",)


def test_a_divergence_that_rose_is_called_more() -> None:
    less = {"mean": -0.005, "low": -0.006, "high": -0.004}
    said = divergence_text({"before": 0.05, "after": 0.055, "less": less})
    assert said.endswith("and 0.05 before: 10.0% more (95 % interval 8.0% to 12.0%)")


def test_a_method_that_clips_is_warned_about() -> None:
    report = make_report(static("percentile"), counts=chunks(outlier={INPUT: 100.0}))
    (warning,) = [line for line in report.warnings if "clips" in line]
    assert "'percentile' clips" in warning
    assert INPUT in warning
    assert "Use activations.method max." in report.summary.todo
    assert report.tensors[INPUT].chosen is not None
    assert report.tensors[INPUT].chosen.saturated > 0


def test_a_cache_scale_is_warned_about() -> None:
    report = make_report("fp8", counts=chunks(outlier={KEY: 1e5}))
    (warning,) = [line for line in report.warnings if "E5M2" in line]
    assert KEY in warning
    (advice,) = [line for line in report.summary.todo if "E5M2" in line]
    assert "kv_cache e4m3 or float16" in advice


def test_the_cache_is_measured_on_its_own_format() -> None:
    tensors = make_report("fp8-static").tensors
    assert tensors[INPUT].format == "e4m3"
    assert tensors[KEY].format == "e5m2"
    inputs, keys = tensors[INPUT].sqnr_db, tensors[KEY].sqnr_db
    assert inputs is not None
    assert keys is not None
    assert keys < inputs - 4


def test_small_values_under_a_few_large_ones_are_seen() -> None:
    """The SQNR of all values is better than ever: only the small ones tell."""
    report = make_report("fp8-static", counts=chunks(outlier={INPUT: 3e4}))
    tensor = report.tensors[INPUT]
    assert tensor.sqnr_db is not None
    assert tensor.sqnr_db > 30
    assert tensor.small_sqnr_db is not None
    assert tensor.small_sqnr_db < 20
    assert any("a few large values" in line and INPUT in line for line in report.warnings)
    assert any("smoothquant" in line for line in report.summary.todo)
    assert report.summary.worst_tensor == INPUT


def test_a_format_with_range_to_spare_hides_nothing() -> None:
    report = make_report("fp8-static", counts=chunks(outlier={INPUT: 1_000.0}))
    assert report.warnings == ()


@pytest.mark.parametrize("recipe", ["fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"])
def test_errors_of_scales_made_at_run_time_are_unknown(recipe: str) -> None:
    report = make_report(recipe)
    tensor = report.tensors[INPUT]
    assert tensor.chosen is None
    assert tensor.sqnr_db is None
    assert tensor.underflow_at_most == tensor.methods["max"].underflow
    unknown = report.unknown[0]
    assert len(unknown.tensors) == 8
    assert "histogram" in unknown.why
    assert (tensor.global_scale is not None) == (recipe == "nvfp4")


def test_fp4_that_was_not_measured_is_not_called_ready() -> None:
    summary = make_report("nvfp4").summary
    assert summary.status == "look"
    assert "not measured" in summary.title
    assert "--sensitivity" in summary.todo[0]
    assert "that of 8 inputs, scaled at run time, is not known" in summary.worst
    summary = make_report("nvfp4", sensitivity=sensitivity()).summary
    assert "not measured" not in summary.title
    assert not any("--sensitivity" in line for line in summary.todo)


def test_a_cost_over_one_percent_is_warned_about() -> None:
    assert make_report("fp8", sensitivity=sensitivity(10.09)).summary.status == "ready"
    report = make_report("fp8", sensitivity=sensitivity(10.32))
    (warning,) = report.warnings
    assert "perplexity by 3.2%, from 10 to 10.32" in warning and "over 1%" in warning
    assert report.summary.status == "look"
    (todo,) = report.summary.todo
    assert "--budget ppl=1%" in todo and "export it" not in todo


def test_what_a_budget_reached_is_what_counts() -> None:
    """The whole was over 1 % before the budget; what is served is not."""
    report = make_report("fp8", sensitivity=sensitivity(10.32), budget=budget())
    assert report.warnings == ()
    assert "perplexity 10.05" in report.summary.measured
    assert "on 16,384 tokens of held-out samples" in report.summary.budget
    assert "chosen on the same text" in report.summary.budget
    allowed = budget() | {"metric": "perplexity", "limit": 0.05, "reached": 0.03, "bound": 0.04}
    allowed["curve"][-1]["perplexity"] = 10.3
    report = make_report("fp8", sensitivity=sensitivity(10.4), budget=allowed)
    assert report.warnings == ()  # the budget itself says how much is too much
    assert "The budget of a perplexity higher by 5.00% is met" in report.summary.budget


@pytest.mark.parametrize(("reached", "advice"), [(0.004, "more held-out samples"), (0.1, "cache")])
def test_a_budget_that_is_not_met_is_warned_about(reached: float, advice: str) -> None:
    missed = budget() | {"met": False, "reached": reached, "bound": 0.12}
    report = make_report("fp8", sensitivity=sensitivity(), budget=missed)
    assert report.summary.status == "look"
    (warning,) = report.warnings
    assert "budget of 0.005 of KL is not met" in warning and "bound 0.12" in warning
    (todo,) = report.summary.todo
    assert advice in todo


@pytest.mark.parametrize(
    ("formats", "said", "advice"),
    [
        ("bbb", "all 3 groups of layers to bfloat16: no weight is quantized", "serve the original"),
        ("fbf", "all 3 groups of layers, 2 to fp8 and 1 to bfloat16: none keeps", "recipe fp8"),
    ],
)
def test_a_budget_that_left_nothing_in_the_recipes_format_is_warned_about(
    formats: str, said: str, advice: str
) -> None:
    names = {"b": "bfloat16", "f": "fp8"}
    chosen = [{"unit": f"unit {i}", "to": names[to]} for i, to in enumerate(formats)]
    report = make_report("nvfp4", budget=budget() | {"chosen": chosen, "units": 3})
    (warning,) = report.warnings
    (todo,) = [line for line in report.summary.todo if "budget" in line]
    assert said in warning and advice in todo
    assert "the budget promoted every layer, 1 warning to read" in report.summary.title
    report = make_report("nvfp4", budget=budget() | {"chosen": chosen, "units": 4})
    assert report.warnings == () and "promoted every" not in report.summary.title


def test_what_was_measured_is_known() -> None:
    report = make_report("fp8", sensitivity=sensitivity())
    assert report.tensors[INPUT].sqnr_db == 30.0
    assert not any("run time" in unknown.what for unknown in report.unknown)
    assert not any("output" in unknown.what for unknown in report.unknown)
    assert "perplexity 10.05, where the original has 10" in report.summary.measured


def test_what_was_measured_before_the_budget_changed_it_is_unknown_again() -> None:
    report = make_report("fp8", sensitivity=sensitivity(), budget=budget())
    assert report.tensors[INPUT].sqnr_db is None
    assert report.tensors[INPUT.replace("q_proj", "o_proj")].sqnr_db == 29.0
    assert report.unknown[0].tensors == (INPUT,)


def test_a_linear_in_full_precision_has_no_error() -> None:
    recipe = Recipe.load("fp8-static").model_copy(update={"exclude": ("*.layers.0.*",)})
    report = make_report(recipe)
    tensor = report.tensors[INPUT]
    assert tensor.format == "bfloat16"
    assert tensor.treatment == "full precision"
    assert not tensor.quantized
    assert len(report.weights) == 7


def test_a_float16_cache_that_overflows_is_warned_about() -> None:
    recipe = Recipe.load("fp8").model_copy(update={"kv_cache": "float16"})
    assert make_report(recipe).tensors[KEY].format == "float16"
    report = make_report(recipe, counts=chunks(outlier={KEY: 1e5}))
    assert any("65,504" in line and KEY in line for line in report.warnings)


def test_tensors_that_still_moved_are_warned_about() -> None:
    report = make_report("fp8-static", counts=chunks(late={INPUT: 30.0}))
    (warning,) = report.warnings
    assert "128 samples may not be enough" in warning
    assert INPUT in warning
    assert report.summary.todo == ("Calibrate on 256 samples or more.",)


def test_plotted_counts_hold_every_value_that_is_not_zero() -> None:
    report = make_report("fp8-static")
    for name, shown in report.distributions.items():
        assert sum(shown["counts"]) == report.tensors[name].elements
        top = 2.0 ** ((shown["first"] + len(shown["counts"])) / 8)
        assert top / 2 ** (1 / 8) <= report.tensors[name].absmax < top


def test_json_is_plain_and_infinity_is_null() -> None:
    report = make_report(weights_db=math.inf, experts=experts(), warnings=("one more",))
    data = report.as_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["weights"]["model.layers.0.mlp.up_proj"]["sqnr_db"] is None
    assert data["tensors"].keys() == observations().keys()
    assert data["warnings"] == ["one more"]
    assert data["formats"]["e4m3"]["grid"][-1] == 448
    assert data["experts"]["fallback"][1]["tokens"] == 120


def test_the_console_shows_the_verdict_the_warnings_and_the_page() -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    report = make_report("fp8-static", counts=chunks(late={INPUT: 30.0}))
    print_report(console, report, tokens=16_000, seconds=2.0, page=Path("cal/report.html"))
    shown = console.export_text()
    assert "8,000 tokens/s" in shown
    assert "warning: 128 samples may not be enough" in shown
    assert "to do: Calibrate on 256 samples or more." in shown
    assert "cal/report.html" in shown
    assert len(shown.splitlines()) < 40


def test_a_narrow_terminal_shows_every_tensor_by_its_name_and_the_path_uncut() -> None:
    console = Console(record=True, width=40, file=io.StringIO())
    page = Path("/home/someone/calibrations/llama/report.html")
    print_report(console, make_report("fp8-static"), page=page)
    lines = console.export_text().splitlines()
    assert f"report: {page} (opens in a browser)" in lines
    table = lines[lines.index("lowest SQNR of each kind".ljust(40)) :]
    assert "…" not in "".join(table) and "layers.0" in "".join(table)
    assert max(len(line) for line in lines if not line.startswith("report: ")) <= 40
