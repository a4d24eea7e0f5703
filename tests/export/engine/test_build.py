"""Building an engine, up to TensorRT; tests/integration/test_engine.py has the real one."""

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from export.engine import build as engine
from export.engine.build import PROVEN, build_engine
from export.engine.library import Gpu
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError, ExportError, UnsupportedError
from tests.export import fake_tensorrt
from verify.artifact import verify

H200 = Gpu("NVIDIA H200", "sm90")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_tensorrt.Behaviour]:
    """TensorRT-RTX replaced by a fake with this behaviour, on a machine without a GPU."""
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake_tensorrt)
    monkeypatch.setattr(fake_tensorrt, "behaviour", fake_tensorrt.Behaviour())
    monkeypatch.setattr(engine, "find_gpu", lambda: None)
    yield fake_tensorrt.behaviour


@pytest.fixture
def on_h200(
    fake: fake_tensorrt.Behaviour, monkeypatch: pytest.MonkeyPatch
) -> fake_tensorrt.Behaviour:
    """The fake as TensorRT 10, beside an H200."""
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setattr(fake_tensorrt, "__version__", "10.16.1.11")
    monkeypatch.setattr(engine, "find_gpu", lambda: H200)
    return fake


class TestTensorRTRTX:
    def test_the_manifest_says_what_was_built(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        out = tmp_path / "engine"
        build_engine(calibrations["fp8"], out, targets=["sm120", "sm89"], max_batch=8)
        manifest = Manifest.load(out, "engine")
        details = manifest.details
        assert (out / "model.plan").read_bytes() == b"plan"
        assert details["builder"] == {
            "name": "TensorRT-RTX",
            "version": "1.7.fake",
            "targets": ["sm120", "sm89"],
        }
        assert details["status"] == "built, unproven: nothing has executed it"
        assert (details["plan_bytes"], details["scratch_bytes"]) == (4, 4096)
        assert details["precision"]["of"] == "the compiled engine, layer by layer"
        assert details["precision"]["fp8_matmuls"] == 14
        assert details["precision"]["products"]["model.layers.1.mlp.up_proj"] == "fp8"
        assert details["profiles"]["decode"]["input_ids"] == [[1, 1], [4, 1], [8, 1]]
        assert details["kv_cache"]["dtype"] == "e5m2"
        assert "plan is not" in details["reproducible"]
        config = fake.config
        assert config is not None
        assert (config.capabilities, config.pools) == ([120, 89], {0: 1 << 30})
        assert not [name for name in manifest.files if "onnx" in name]

    def test_an_unquantized_baseline_has_no_quantized_products_and_no_expected_cost(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        """Also of a recipe that the target cannot multiply."""
        out = tmp_path / "engine"
        build_engine(calibrations["nvfp4"], out, targets=["sm89"], quantize=False)
        details = Manifest.load(out, "engine").details
        assert details["quantized"] is False and details["kv_cache"]["dtype"] == "float16"
        assert details["precision"]["products"] == {}
        assert "expected_divergence" not in details
        found = verify(out, calibration=calibrations["nvfp4"])
        assert found.ok and not [line for line in found.unchecked if "graph" in line]

    def test_the_shapes_that_an_engine_is_tuned_for_can_be_chosen(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        options: dict[str, Any] = {"targets": ["sm89"], "max_batch": 8}
        options |= {"usual_batch": 8, "usual_length": 100}
        build_engine(calibrations["fp8"], tmp_path / "out", **options)
        details = Manifest.load(tmp_path / "out", "engine").details
        assert details["profiles"]["decode"]["attention_mask"][1] == [8, 1, 1, 101]
        with pytest.raises(UnsupportedError, match="usual_batch 9: the engine is built for 1 to 8"):
            build_engine(calibrations["fp8"], tmp_path / "no", **options | {"usual_batch": 9})

    def test_the_graph_is_the_same_in_every_build(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        fake.multiplies = "FP4E2M1"
        hashes = []
        for name in ("first", "second"):
            manifest = build_engine(calibrations["nvfp4"], tmp_path / name, targets=["sm120"])
            hashes.append(manifest.details["graph_sha256"])
        assert hashes[0] == hashes[1]
        assert [len(digest) for digest in hashes[0].values()] == [64]

    def test_without_targets_it_builds_for_all_that_hold_the_format(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        manifest = build_engine(calibrations["fp8-block"], tmp_path / "fp8")
        assert manifest.details["targets"] == ["sm89", "sm120"]
        fake.multiplies = "FP4E2M1"
        manifest = build_engine(calibrations["nvfp4"], tmp_path / "fp4")
        assert manifest.details["targets"] == ["sm120"]

    def test_a_timing_cache_is_refused_not_ignored(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        with pytest.raises(UnsupportedError, match="--timing-cache: TensorRT-RTX times nothing"):
            build_engine(calibrations["fp8"], tmp_path / "out", timing_cache=tmp_path / "cache")
        assert not list(tmp_path.iterdir())

    def test_the_report_is_a_table_on_the_console(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        text = io.StringIO()
        build_engine(calibrations["fp8"], tmp_path / "out", console=Console(file=text, width=100))
        said = text.getvalue()
        assert "model.layers.*.mlp.down_proj" in said and "fp8" in said
        assert "TensorRT-RTX 1.7.fake for sm89, sm120" in said
        assert "built, unproven" in said


class TestTensorRT:
    def test_it_builds_for_the_gpu_that_is_there(
        self, on_h200: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        manifest = build_engine(
            calibrations["fp8"], tmp_path / "out", optimization_level=4, workspace_bytes=7
        )
        assert manifest.details["targets"] == ["sm90"]
        assert manifest.details["builder"] == {
            "name": "TensorRT",
            "version": "10.16.1.11",
            "gpu": "NVIDIA H200",
            "compute_capability": "9.0",
        }
        assert manifest.details["precision"]["of"] == "the compiled engine, layer by layer"
        config = on_h200.config
        assert config is not None and config.capabilities == []
        assert (config.builder_optimization_level, config.pools) == (4, {0: 7})

    def test_a_timing_cache_is_read_and_written(
        self, on_h200: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        path = tmp_path / "caches" / "timings"
        for name in ("first", "second"):
            build_engine(calibrations["fp8"], tmp_path / name, timing_cache=path)
        assert path.read_bytes() == b"timed;timed;"
        assert [item.name for item in path.parent.iterdir()] == ["timings"]
        on_h200.timings_match = False
        with pytest.raises(ExportError, match=r"timing cache .*name another file"):
            build_engine(calibrations["fp8"], tmp_path / "third", timing_cache=path)

    def test_fp4_is_refused_with_what_would_work(
        self, on_h200: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        with pytest.raises(UnsupportedError) as caught:
            build_engine(calibrations["nvfp4"], tmp_path / "out")
        assert str(caught.value) == (
            "recipe nvfp4 needs FP4, which this GPU (NVIDIA H200) with compute capability 9.0 does"
            " not have: it begins with 10.0, such as --builder tensorrt-rtx --target sm120; the"
            " recipes fp8, fp8-static and fp8-block run on sm90"
        )
        assert on_h200.network is None, "refused before parsing"

    def test_a_gpu_without_fp8_is_refused(
        self,
        on_h200: fake_tensorrt.Behaviour,
        calibrations: dict[str, Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(engine, "find_gpu", lambda: Gpu("NVIDIA A100", "sm80"))
        said = r"FP8, which this GPU \(NVIDIA A100\).*8\.0 .*--target sm89; no recipe runs on sm80"
        with pytest.raises(UnsupportedError, match=said):
            build_engine(calibrations["fp8"], tmp_path / "out", builder="tensorrt")

    def test_another_target_is_refused(
        self, on_h200: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        with pytest.raises(UnsupportedError, match=r"GPU that is here \(NVIDIA H200, sm90\)"):
            build_engine(calibrations["fp8"], tmp_path / "out", targets=["sm89"])

    def test_what_the_inspector_does_not_name_is_told_of_the_network(
        self, on_h200: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        on_h200.multiplies = None
        precision = build_engine(calibrations["fp8"], tmp_path / "out").details["precision"]
        assert precision["of"] == "the parsed network, which the compiler may have changed"
        assert precision["fp8_matmuls"] == 14

    def test_a_kernel_that_is_skipped_is_no_error(
        self, on_h200: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        on_h200.says = [(fake_tensorrt.ILogger.ERROR, "Skipping tactic 0x0 due to exception")]
        assert build_engine(calibrations["fp8"], tmp_path / "out").details["plan_bytes"] == 4

    def test_an_engine_that_it_does_not_load_itself(
        self, on_h200: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        on_h200.loads = False
        with pytest.raises(ExportError, match="does not load the engine that it has built"):
            build_engine(calibrations["fp8"], tmp_path / "out")


class TestProof:
    def test_a_proven_engine_says_so(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        def prove(directory: Path) -> dict[str, Any]:
            manifest = Manifest.load(directory, "engine")
            assert manifest.details["status"].startswith("built, unproven")
            return {"status": "proven", "kl": 0.01, "tokens_agree": 0.99}

        build_engine(calibrations["fp8"], tmp_path / "out", prove=prove)
        details = Manifest.load(tmp_path / "out", "engine").details
        assert details["status"] == PROVEN
        assert details["proof"]["kl"] == 0.01

    def test_one_that_only_a_bound_speaks_for_says_so(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        facts = {"status": "weakly proven", "kl": 0.01}
        build_engine(calibrations["fp8"], tmp_path / "out", prove=lambda path: facts)
        details = Manifest.load(tmp_path / "out", "engine").details
        assert details["status"].startswith("weakly proven: nothing was predicted")

    def test_one_that_could_not_run_says_why(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        facts = {"status": "unproven", "reason": "no GPU of sm89 is here"}
        build_engine(calibrations["fp8"], tmp_path / "out", prove=lambda path: facts)
        details = Manifest.load(tmp_path / "out", "engine").details
        assert details["status"] == "built, unproven: no GPU of sm89 is here"

    def test_one_whose_numbers_are_off_is_not_handed_over(
        self, fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        build_engine(calibrations["fp8"], out)
        before = (out / "manifest.json").read_bytes()

        def prove(directory: Path) -> dict[str, Any]:
            raise ExportError("KL 0.9 nats, expected at most 0.1")

        with pytest.raises(ExportError, match=r"KL 0\.9"):
            build_engine(calibrations["fp8"], out, force=True, prove=prove)
        assert (out / "manifest.json").read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_directory_is_not_replaced(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match="exists already; add --force"):
        build_engine(calibrations["fp8-static"], calibrations["fp8"], targets=["sm89"])


@pytest.mark.parametrize("target", ["sm75", "sm90", "sm99"])
def test_a_target_is_refused_before_anything_is_read(
    fake: fake_tensorrt.Behaviour, target: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=target):
        build_engine(tmp_path / "nothing", tmp_path / "engine", targets=["sm89", target])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimization_level": 6}, r"level 6: it is 0 \(fastest build\) to 5"),
        ({"max_batch": 0}, "0 sequences at a time"),
        ({"max_length": 1 << 20}, "sequences of 1048576 tokens: this model's are of 1 to"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    fake: fake_tensorrt.Behaviour,
    calibrations: dict[str, Path],
    tmp_path: Path,
    options: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        build_engine(calibrations["fp8"], tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_what_it_cannot_multiply_in_few_bits_is_refused_before_parsing(
    fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path, recipe: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"recipe {recipe}.*nvfp4"):
        build_engine(calibrations[recipe], tmp_path / "out")
    assert fake.network is None and not list(tmp_path.iterdir())


class TestComplaints:
    """Each ends the build in one line, and leaves nothing."""

    @pytest.fixture(autouse=True)
    def _paths(self, calibrations: dict[str, Path], tmp_path: Path) -> Iterator[None]:
        self.calibration, self.out = calibrations["fp8-static"], tmp_path / "engine"
        yield
        assert not list(tmp_path.iterdir())

    def build(self, said: str, console: Console | None = None) -> None:
        with pytest.raises(ExportError, match=said) as caught:
            build_engine(self.calibration, self.out, targets=["sm89"], console=console)
        assert "\n" not in str(caught.value)

    def test_an_unused_input_even_if_only_mentioned(self, fake: fake_tensorrt.Behaviour) -> None:
        fake.says = [(fake_tensorrt.ILogger.VERBOSE, "Unused Input: attention_mask")]
        self.build("drop a part of the graph: Unused Input: attention_mask")

    def test_an_error_of_the_builder(self, fake: fake_tensorrt.Behaviour) -> None:
        error = fake_tensorrt.ILogger.ERROR
        fake.says = [(error, "no such\nkernel"), (error, "cudaError 35")]
        self.build("builder for sm89 refuses the graph: no such kernel$")

    def test_every_error_of_the_parser(self, fake: fake_tensorrt.Behaviour) -> None:
        fake.parser_errors = ["unsupported\noperator", "bad type"]
        self.build("parser refuses the graph: node: unsupported operator; node: bad type")

    def test_a_target_that_this_release_does_not_take(self, fake: fake_tensorrt.Behaviour) -> None:
        fake.capabilities = False
        self.build("1.7.fake does not accept the target sm89")

    def test_no_plan_and_no_reason(self, fake: fake_tensorrt.Behaviour) -> None:
        fake.plan = None
        self.build("built no engine for sm89, not saying why$")

    def test_no_kernel_that_can_be_used(self, fake: fake_tensorrt.Behaviour) -> None:
        fake.plan = None
        fake.says = [(fake_tensorrt.ILogger.ERROR, "Skipping tactic 0x0: no rule")]
        self.build("built no engine for sm89: Skipping tactic 0x0: no rule$")

    def test_products_that_are_not_fp8(self, fake: fake_tensorrt.Behaviour) -> None:
        fake.multiplies = "Half"
        terminal = Console(file=io.StringIO(), force_terminal=True)
        self.build(
            r"1.7.fake for sm89 runs 14 of 14 linear layers of recipe fp8-static in another"
            r" precision than the recipe has: model\.layers\.0\.self_attn\.q_proj in float16, not"
            r" fp8",
            terminal,
        )
        assert [len(profile) for profile in fake.profiles] == [8, 8]

    def test_an_interrupt_stops_the_builder(self, fake: fake_tensorrt.Behaviour) -> None:
        stopped = threading.Event()

        def step(monitor: Any) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 60
            while going_on := monitor.step_complete("Building", 0):
                assert time.monotonic() < deadline, "the builder is not asked to stop"
            stopped.set()
            return going_on

        fake.step = step
        with pytest.raises(KeyboardInterrupt):
            build_engine(self.calibration, self.out, targets=["sm89"])
        assert stopped.wait(60)  # on its own thread, which may be a little behind


def test_the_manifest_is_plain_json(
    fake: fake_tensorrt.Behaviour, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    manifest = build_engine(calibrations["fp8"], tmp_path / "out")
    assert json.loads(json.dumps(manifest.details)) == Manifest.load(tmp_path / "out").details
