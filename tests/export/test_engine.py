"""Building an engine, up to TensorRT; tests/integration/test_engine.py has the real one."""

import io
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

from export import tensorrt
from export.engine import build_engine, profiles_of
from octet.checkpoint import Checkpoint
from octet.errors import ArtifactError, ExportError, UnsupportedError
from tests.export import fake_tensorrt


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_tensorrt.Behaviour]:
    """TensorRT-RTX replaced by a fake with this behaviour."""
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake_tensorrt)
    monkeypatch.setattr(fake_tensorrt, "behaviour", fake_tensorrt.Behaviour())
    yield fake_tensorrt.behaviour


def test_targets_are_normalized_and_kept_once() -> None:
    assert tensorrt.check_targets([" SM89", "sm120", "sm89"]) == ["sm89", "sm120"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("sm99", "unknown target 'sm99'; did you mean 'sm89'?"),
        ("turing", "unknown target 'turing'; known: sm120, sm121, sm89"),
        ("sm75", "target sm75: a GPU before sm89 has no FP8.*sm89, sm120, sm121"),
        ("sm86", "target sm86: a GPU before sm89 has no FP8"),
        ("sm90", "target sm90: TensorRT-RTX does not run on Hopper.*the full TensorRT"),
    ],
)
def test_a_target_is_refused_before_anything_is_read(
    target: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        build_engine(tmp_path / "nothing", tmp_path / "engine", targets=["sm89", target])
    assert not list(tmp_path.iterdir())


def test_without_tensorrt_it_says_how_to_install_it(
    calibrations: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"pip install 'octet\[tensorrt-rtx\]'"):
        build_engine(calibrations["fp8-static"], tmp_path / "engine", targets=["sm89"])
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_not_replaced(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match="exists already; add --force"):
        build_engine(calibrations["fp8-static"], calibrations["fp8"], targets=["sm89"])


def test_profiles_agree_with_themselves_and_allow_an_empty_cache(tiny_model: Path) -> None:
    spec = Checkpoint.open(tiny_model).spec
    for profile in profiles_of(spec).values():
        for index in range(3):
            at = {name: shapes[index] for name, shapes in profile.items()}
            batch, tokens = at["input_ids"]
            slots = at["past_key_values.1.value"][2]
            assert at["attention_mask"] == (batch, 1, tokens, slots + tokens)
            assert at["logit_positions"][1] <= tokens
        for smallest, usual, largest in profile.values():
            ends = zip(smallest, usual, largest, strict=True)
            assert all(low <= middle <= high for low, middle, high in ends)
        assert profile["past_key_values.0.key"][0][2] == 0


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
        self.build("0.0.fake does not accept the target sm89")

    def test_no_plan_and_no_reason(self, fake: fake_tensorrt.Behaviour) -> None:
        fake.plan = None
        self.build("built no engine for sm89 and did not say why")

    def test_products_that_are_not_fp8(self, fake: fake_tensorrt.Behaviour) -> None:
        terminal = Console(file=io.StringIO(), force_terminal=True)
        self.build("parsed 0 FP8 products where recipe fp8-static has 14", terminal)
        assert [len(profile) for profile in fake.profiles] == [8, 8]

    def test_an_interrupt_stops_the_builder(self, fake: fake_tensorrt.Behaviour) -> None:
        stopped = threading.Event()

        def step(monitor: Any) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 10
            while going_on := monitor.step_complete("Building", 0):
                assert time.monotonic() < deadline, "the builder is not asked to stop"
            stopped.set()
            return going_on

        fake.step = step
        with pytest.raises(KeyboardInterrupt):
            build_engine(self.calibration, self.out, targets=["sm89"])
        assert stopped.wait(10)  # on its own thread, which may be a little behind
