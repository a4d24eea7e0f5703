"""A gate closes on what costs too much, says which parts are to blame, and loses no work."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from calibrate.journal.journal import Journal
from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.quality import measure
from calibrate.quality.gate import Gate, Judged, Outcome, Part
from calibrate.quality.golden_cost import PromptCost
from calibrate.quality.refused import refused_directory
from calibrate.rescale import rescale
from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import GoldenSet
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError, ConfigError, GateError, UnsupportedError
from octet.limit import Limit
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.storage.tensors import TensorFile
from tests.command import octet
from tests.models import write_model
from tests.outliers import write_outlier_checkpoint
from tests.shared import Shared

INJURED = ["model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"]
STATIC = Recipe.load("fp8-static").model_copy(update={"kv_cache": "float16"})


def gate(max_kl: str | None = None, max_ppl_change: str | None = None) -> Gate:
    found = Gate.parse(max_kl, max_ppl_change)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def injured(tiny_model: Path, shared: Shared) -> Path:
    """A model whose layer 1 has inputs that no scale of a whole tensor serves well."""

    def build(path: Path) -> None:
        write_outlier_checkpoint(tiny_model, path, layers=[1], factor=2**17)

    return shared.directory("gate-injured", build)


def calibrated(model: Path, samples: Path, out: Path, **options: Any) -> Calibration:
    common: dict[str, Any] = {
        "recipe": STATIC,
        "count": 110,
        "dtype": "float32",
        "predict": False,
        "max_length": 64,
    }
    console = options.pop("console", None)
    common |= {"model": model, "samples": samples, "out": out, "allow_few_samples": True}
    found = run(Options(**common | options), console=console)
    assert found is not None
    return found


class TestWhatIsAsked:
    @pytest.mark.parametrize(
        ("kl", "change", "limits"),
        [
            ("0.005", None, [("kl", 0.005)]),
            (" 5e-3 ", "1%", [("kl", 0.005), ("perplexity", 0.01)]),
            (None, "0.01", [("perplexity", 0.01)]),
            ("5E-3", "1.%", [("kl", 0.005), ("perplexity", 0.01)]),
            ("1e+1", ".5%", [("kl", 10.0), ("perplexity", 0.005)]),
            (None, "25%", [("perplexity", 0.25)]),
        ],
    )
    def test_limits_are_read(
        self, kl: str | None, change: str | None, limits: list[tuple[str, float]]
    ) -> None:
        assert [(x.metric, x.value) for x in gate(kl, change).limits] == limits

    def test_without_limits_there_is_no_gate(self) -> None:
        assert Gate.parse(None, None) is None

    @pytest.mark.parametrize(
        ("kl", "change", "said"),
        [
            ("0", None, "--max-kl '0': '0' is not a positive number"),
            ("-1", None, "'-1' is not a positive number"),
            ("nan", None, "'nan' is not a positive number"),
            ("inf", None, "'inf' is not a positive number"),
            ("1%", None, "--max-kl '1%' is in nats, such as --max-kl 0.005"),
            ("1e-9", None, "at least 1e-06"),
            (None, "0%", "'0' is not a positive number"),
            (None, "-1%", "'-1' is not a positive number"),
            (None, "5 percent", "'5 percent' is not a positive number"),
            (None, "nan", "'nan' is not a positive number"),
            (None, "1", "write 1% or 100%; it could mean either"),
            (None, "0.5", "write 0.5% or 50%; it could mean either"),
        ],
    )
    def test_nonsense_is_refused(self, kl: str | None, change: str | None, said: str) -> None:
        with pytest.raises(ConfigError) as caught:
            Gate.parse(kl, change)
        assert said in str(caught.value) and "\n" not in str(caught.value)


class TestTheVerdict:
    def judged(self, measured: float, bound: float) -> Judged:
        limit = Limit("kl", 0.01)
        return Judged(limit, measured, bound, 900, 12, "held-out samples", "simulated in float32")

    def test_the_bound_decides_not_the_estimate(self) -> None:
        assert self.judged(0.008, 0.01).met
        assert not self.judged(0.008, 0.0101).met
        assert not self.judged(0.008, math.inf).met
        assert not self.judged(math.nan, math.nan).met

    def test_text_that_something_was_chosen_on_gives_no_confidence(self) -> None:
        plain = Outcome((self.judged(0.008, 0.009),))
        doubtful = Outcome((replace(plain.judged[0], caveat="its scales were chosen on them"),))
        assert plain.met and doubtful.met and not plain.warnings
        (warning,) = doubtful.warnings
        assert warning.endswith(
            ": met; its scales were chosen on them, so the bound does not have 95 % confidence:"
            " give more text with --held-out"
        )
        assert (plain.details()[0]["confidence"], doubtful.details()[0]["confidence"]) == (
            0.95,
            None,
        )

    def error(self, *parts: Part, measured: float = 0.02) -> str:
        outcome = Outcome((self.judged(measured, 0.03),)).blaming(parts)
        error = outcome.error(
            Path("out"), Path("out.refused"), again="calibrate again", budget="calibrate again"
        )
        assert error.exit_code == 1 and "\n" not in str(error)
        return str(error)

    def test_one_line_names_figures_parts_and_remedy(self) -> None:
        worst = Part("layers.3.mlp.gate_up_proj", ("layers.3.mlp.gate", "layers.3.mlp.up"), 0.09, 0)
        said = self.error(Part("kv_cache", (), 0.004, 0), Part("other", ("o",), 0.006, 0), worst)
        assert said == (
            "out is not written, over --max-kl 0.01: 0.02 nats (95 % bound 0.03) on 900 tokens of"
            " 12 held-out samples, simulated in float32; measured alone, the costliest parts are"
            " layers.3.mlp.gate_up_proj (90%), other (6%), kv_cache (4%); calibrate again with"
            " --exclude layers.3.mlp.gate --exclude layers.3.mlp.up, or --budget kl=0.01;"
            " report: out.refused"
        )

    def test_all_experts_of_a_layer_are_excluded_by_one_pattern(self) -> None:
        names = (f"l.experts.{n}.{part}" for n in range(128) for part in ("gate", "up", "down"))
        said = self.error(Part("l.experts", tuple(names), 0.9, 0), Part("other", ("o",), 0.1, 0))
        assert "calibrate again with --exclude 'l.experts.*', or --budget" in said

    def test_a_cache_is_not_excluded_but_exchanged(self) -> None:
        said = self.error(Part("kv_cache", (), 0.9, 0), Part("other", ("o",), 0.1, 0))
        assert "with another --kv-cache, or --budget" in said and "--exclude" not in said

    def test_what_to_exclude_and_the_cache_are_told_apart(self) -> None:
        parts = Part("kv_cache", (), 0.3, 0), Part("one", ("a", "b"), 0.2, 0)
        others = (Part(f"unit {n}", (f"linear {n}",), 0.01, 0) for n in range(45))
        said = self.error(*parts, *others)
        assert "with --exclude a --exclude b and another --kv-cache, or --budget" in said

    def test_where_nothing_stands_out_the_budget_chooses(self) -> None:
        said = self.error(*(Part(f"unit {n}", (f"linear {n}",), 0.01, 0) for n in range(20)))
        assert "; calibrate again with --budget kl=0.01;" in said and "--exclude" not in said

    def test_where_only_the_bound_is_over_more_text_may_do(self) -> None:
        said = self.error(Part("unit", ("linear",), 0.01, 0), measured=0.009)
        assert "calibrate with more --held-out text, which narrows the bound" in said


class TestCalibrate:
    def test_a_gate_that_is_met_is_recorded(
        self, tiny_model: Path, tiny_samples: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        found = calibrated(tiny_model, tiny_samples, out, gate=gate("0.5", "50%"))
        kl, change = found.manifest.details["gate"]
        assert (kl["metric"], kl["limit"], kl["met"]) == ("kl", 0.5, True)
        assert (change["metric"], change["limit"], change["met"]) == ("perplexity", 0.5, True)
        assert 0 < kl["measured"] < kl["bound"] < 0.5
        assert (kl["samples"], kl["on"], kl["confidence"]) == (20, "held-out samples", 0.95)
        assert kl["how"] == "simulated in float32" and kl["tokens"] > 200
        report = json.loads((out / "report.json").read_text())
        assert "--max-kl 0.5" in report["facts"]["gate"] and "met" in report["facts"]["gate"]
        assert report["sensitivity"] is None  # nobody asked, and the gate had no need
        assert list(tmp_path.iterdir()) == [out]

    def test_over_it_the_evidence_is_kept_and_the_next_run_observes_nothing_again(
        self, injured: Path, tiny_samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        observed: list[int] = []
        commit = Journal.commit

        def counting(journal: Journal, index: int, *rest: Any) -> None:
            observed.append(index)
            commit(journal, index, *rest)

        monkeypatch.setattr(Journal, "commit", counting)
        out = tmp_path / "out"
        with pytest.raises(GateError, match=r"out is not written, over --max-kl 0\.002") as caught:
            calibrated(injured, tiny_samples, out, gate=gate("0.002", "0.001%"))
        assert observed == [0, 1]
        said = str(caught.value)
        assert "\n" not in said and "costliest parts are model.layers.1." in said
        assert "--exclude model.layers.1." in said and "--exclude model.layers.0." not in said
        refused = refused_directory(out)
        assert {path.name for path in tmp_path.iterdir()} == {"out.refused", "out.progress"}
        evidence = json.loads((refused / "gate.json").read_text())
        assert [one["met"] for one in evidence["gate"]] == [False, False]
        assert " and --max-ppl-change 0.001%: " in said
        assert {part["name"] for part in evidence["parts"][:2]} == set(INJURED)
        assert sum(part["share"] for part in evidence["parts"]) == pytest.approx(1)
        report = json.loads((refused / "report.json").read_text())
        assert report["warnings"][0].startswith("--max-kl 0.002: ")
        assert [u for u in report["sensitivity"]["units"] if u["name"] == INJURED[0]]
        assert INJURED[0] in (refused / "report.html").read_text()
        assert len(GoldenSet.load(refused).records) > 8
        assert (
            "model.layers.1.mlp.up_proj.input_scale"
            in TensorFile.open(refused / "scales.safetensors").names
        )
        with pytest.raises(ArtifactError, match="not an Octet artifact"):
            Manifest.load(refused)

        said_now = io.StringIO()
        console = Console(file=said_now, width=400)
        options = {
            "gate": gate("0.002", "50%"),
            "budget": Limit.parse("kl=0.002"),
            "console": console,
        }
        budget = calibrated(injured, tiny_samples, out, **options)
        assert observed == [0, 1]
        assert "continuing from" in said_now.getvalue()
        assert budget.manifest.details["gate"][0]["met"]
        judged = budget.manifest.details["gate"][0]
        assert judged["confidence"] is None and "a budget chose its formats on" in judged["text"]
        warnings = json.loads((out / "report.json").read_text())["warnings"]
        assert judged["text"] in warnings and "--held-out" in judged["text"]
        assert "a budget chose its formats on" in said_now.getvalue()
        assert not (tmp_path / "out.progress").exists()

    def test_what_a_budget_chose_is_judged_on_other_text(
        self, injured: Path, tiny_samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measure, "_TOKENS", 400)
        options = {"count": 90, "gate": gate("0.05"), "budget": Limit.parse("kl=0.002")}
        found = calibrated(injured, tiny_samples, tmp_path / "out", **options)
        judged = found.manifest.details["gate"][0]
        assert judged["on"] == "held-out samples that the budget did not see"
        assert judged["confidence"] == 0.95
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert not [one for one in report["warnings"] if "--max-kl" in one]
        assert judged["bound"] > judged["measured"] > 0

    def test_too_little_text_is_said_before_the_model_runs(
        self, tiny_model: Path, tiny_samples: Path, tmp_path: Path
    ) -> None:
        options = {"count": 125, "gate": gate("0.01")}
        with pytest.raises(ConfigError, match=r"--max-kl 0\.01: 5 of 5 held-out samples cannot"):
            calibrated(tiny_model, tiny_samples, tmp_path / "out", **options)
        short = tmp_path / "short.jsonl"
        short.write_text('{"text": "a"}\n' * 20)
        options = {"held_out": short, "gate": gate("0.01", "1%")}
        with pytest.raises(ConfigError, match=r"--max-ppl-change 1%: 0 of 20 .* two tokens"):
            calibrated(tiny_model, tiny_samples, tmp_path / "out", **options)
        assert not (tmp_path / "out.progress").exists()

    def test_an_architecture_that_cannot_be_simulated(
        self, tiny_samples: Path, tmp_path: Path
    ) -> None:
        model = write_model(tmp_path / "model", "gemma2")
        with pytest.raises(UnsupportedError, match=r"--max-kl 0\.01 needs a simulation.*Gemma2"):
            calibrated(model, tiny_samples, tmp_path / "out", gate=gate("0.01"))

    def test_what_lies_where_evidence_would_is_not_replaced(
        self, tiny_model: Path, tiny_samples: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "out.refused").mkdir()
        (tmp_path / "out.refused" / "mine").touch()
        with pytest.raises(ArtifactError, match=r"out\.refused: exists and is no report"):
            calibrated(tiny_model, tiny_samples, tmp_path / "out", gate=gate("0.01"))
        assert [path.name for path in tmp_path.iterdir()] == ["out.refused"]


class TestForGpusThatRunItWeightOnly:
    """In NVFP4 the tiny model costs 0.09 nats, and 0.04 if its activations are not rounded."""

    LIMITS = ("--max-kl", "0.05")
    FEW = ("-n", "110", "--allow-few-samples", "--max-length", "64", "--dtype", "float32")

    def start(self, model: Path, samples: Path) -> tuple[str | Path, ...]:
        recipe = ("--recipe", "nvfp4", "--kv-cache", "float16", "--no-predict")
        return ("calibrate", model, "--samples", samples, *recipe, *self.FEW)

    def test_limits_are_measured_so_in_every_command(
        self, tiny_model: Path, tiny_samples: Path, tmp_path: Path
    ) -> None:
        start, out = (*self.start(tiny_model, tiny_samples), *self.LIMITS), tmp_path / "out"
        for gpus in ("b200", "b200,h100"):  # H100 alone does not round
            over = octet(*start, "--for", gpus, "-o", out)
            assert over.returncode == 1 and "simulated in float32" in over.stderr
        found = octet(*start, "--for", "h100", "--sensitivity", "-o", out)
        assert found.returncode == 0, found.stderr
        calibration = Manifest.load(out, "calibration")
        (judged,) = calibration.details["gate"]
        assert judged["how"] == "simulated weight-only in float32" and judged["met"]
        assert calibration.runs_weight_only == ("nvfp4",)
        report = json.loads((out / "report.json").read_text())
        assert report["sensitivity"]["all"]["kl"] == pytest.approx(judged["measured"])
        assert "not measured" not in report["summary"]["title"]
        change = ("--kv-cache", "e4m3", "--no-predict")
        again = octet("rescale", out, *change, *self.LIMITS, "-o", tmp_path / "again")
        assert again.returncode == 0, again.stderr
        exported = octet("export", "checkpoint", out, *self.LIMITS, "-o", tmp_path / "checkpoint")
        assert exported.returncode == 0, exported.stderr
        for name in ("again", "checkpoint"):
            manifest = Manifest.load(tmp_path / name)
            assert "simulated weight-only in" in manifest.details["gate"][0]["how"]
            assert manifest.runs_weight_only == ("nvfp4",)
        other = octet("rescale", out, "--recipe", "fp8", "--no-predict", "-o", tmp_path / "other")
        assert other.returncode == 0, other.stderr
        assert Manifest.load(tmp_path / "other").runs_weight_only == ()
        # Octet's own engine rounds them.
        refused = octet("export", "onnx", out, *self.LIMITS, "-o", tmp_path / "onnx")
        assert refused.returncode == 1 and "the graph itself" in refused.stderr
        forced = octet("export", "onnx", out, "--gate", "off", "-o", tmp_path / "onnx")
        assert "measured for GPUs that do not round the inputs of nvfp4 linears" in forced.stderr

    def test_a_budget_promotes_no_more_than_they_need(
        self, tiny_model: Path, tiny_samples: Path, tmp_path: Path
    ) -> None:
        start = (*self.start(tiny_model, tiny_samples), "--budget", "kl=0.03")
        chosen = {}
        for gpu in ("h100", "a100", "b200"):
            found = octet(*start, "--for", gpu, "-o", tmp_path / gpu)
            assert found.returncode == 0, found.stderr
            chosen[gpu] = Manifest.load(tmp_path / gpu, "calibration")
            assert chosen[gpu].details["budget"]["met"]
        promoted = {gpu: len(found.recipe.overrides) for gpu, found in chosen.items()}
        assert 0 < promoted["h100"] < promoted["b200"]
        # An A100 rounds no activations of what the budget promotes to either.
        exact = {gpu: found.runs_weight_only for gpu, found in chosen.items()}
        assert exact["h100"] == ("nvfp4",) and exact["b200"] == ()
        assert exact["a100"] == ("nvfp4", "fp8:channel/token")


@pytest.fixture(scope="module")
def origin(injured: Path, tiny_samples: Path, shared: Shared) -> Calibration:
    """Of the injured model, under scales of tokens and channels, with a gate of its own."""
    recipe = Recipe.load("fp8").model_copy(update={"kv_cache": "float16"})

    def build(path: Path) -> None:
        calibrated(injured, tiny_samples, path, recipe=recipe, gate=gate("9"))

    return Calibration.load(shared.directory("gate-origin", build))


class TestRescale:
    def test_over_it_nothing_is_written(self, origin: Calibration, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with pytest.raises(GateError, match="golden prompts, simulated in float32") as caught:
            rescale(origin.path, out, recipe=STATIC, gate=gate("0.002"), predict=False)
        assert "rescale with --exclude model.layers.1." in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["out.refused"]
        evidence = json.loads((tmp_path / "out.refused" / "gate.json").read_text())
        assert {part["name"] for part in evidence["parts"][:2]} == set(INJURED)
        report = json.loads((tmp_path / "out.refused" / "report.json").read_text())
        assert report["warnings"][0].startswith("--max-kl 0.002: ")

    def test_within_it_it_is_recorded(self, origin: Calibration, tmp_path: Path) -> None:
        names = [
            linear.name
            for linear in Checkpoint.open(Path(origin.manifest.details["source"])).spec.linears(1)
        ]
        recipe = STATIC.model_copy(update={"exclude": (*STATIC.exclude, *names)})
        found = rescale(
            origin.path, tmp_path / "out", recipe=recipe, gate=gate("0.05", "5%"), predict=False
        )
        judged = found.manifest.details["gate"]
        assert [one["met"] for one in judged] == [True, True]
        assert judged[0]["on"] == "golden prompts" and judged[0]["samples"] > 8

    def test_it_is_measured_where_a_gpu_is(
        self, origin: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        places: list[str] = []

        def measured_on(*args: Any, device: str = "cpu", **options: Any) -> Any:
            places.append(device)
            return PromptCost(*args, **options)

        monkeypatch.setattr("calibrate.rescale.PromptCost", measured_on)
        for there in (True, False):
            monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
            with pytest.raises(GateError):
                rescale(origin.path, tmp_path / "out", recipe=STATIC, gate=gate("1e-5"))
        assert places == ["cuda", "cpu"]

    def test_a_gate_is_of_its_own_recipe_alone(self, origin: Calibration, tmp_path: Path) -> None:
        assert origin.manifest.details["gate"][0]["met"]
        found = rescale(origin.path, tmp_path / "out", recipe=STATIC, predict=False)
        assert "gate" not in found.manifest.details
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert "gate" not in report["facts"]

    def test_nor_is_what_it_warned_of(
        self, tiny_model: Path, tiny_samples: Path, tmp_path: Path
    ) -> None:
        options = {"count": 130, "gate": gate("0.5")}  # without text of its own to judge on
        first = calibrated(tiny_model, tiny_samples, tmp_path / "first", **options)
        assert any("--max-kl 0.5" in line for line in first.manifest.details["warnings"])
        second = rescale(first.path, tmp_path / "second", recipe=STATIC, predict=False)
        lines = second.manifest.details["warnings"]
        assert not any("--max-kl" in line for line in lines)
        assert [line for line in first.manifest.details["warnings"] if "--max-kl" not in line] == [
            line for line in lines if line in first.manifest.details["warnings"]
        ]
