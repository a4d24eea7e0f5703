"""Processes that share the batches find what one finds, and say which of them is out of line."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.journal.distributed import Group, process_group, require_agreement
from calibrate.journal.identity import run_identity
from octet.artifacts.golden import GOLDEN_FILE
from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.artifacts.scenarios import SCENARIOS_FILE
from octet.artifacts.serving_path import EXPECTED_FILE
from octet.errors import ArtifactError, ConfigError
from octet.model.checkpoint import Checkpoint
from tests.calibrate.runs import batches_of, run, save_counts, with_code
from tests.command import octet
from tests.models import scale_tensors, write_model

ROOT = Path(__file__).parents[3]


def test_two_ranks_find_what_one_finds_and_agree_on_errors(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama", num_hidden_layers=3)
    token = int(batches_of(5)[1].token_ids[1, 0])  # of batch 1 alone
    broken = with_code(
        model, tmp_path / "broken", "model.embed_tokens.weight", (token, 3), 0x7FC0
    ).path
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = ["-m", "tests.calibrate.ranks", str(model), str(broken), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, *worker], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert result.returncode == 0, result.stderr[-3000:]
    save_counts(tmp_path / "alone", run(model))
    alone = (tmp_path / "alone").read_bytes()
    save_counts(tmp_path / "one batch", run(model, count=1))
    for rank in range(2):
        single = tmp_path / f"single-{rank}"  # more ranks than batches
        assert single.read_bytes() == (tmp_path / "one batch").read_bytes()
        assert (tmp_path / f"counts-{rank}").read_bytes() == alone
        assert (tmp_path / f"resumed-{rank}").read_bytes() == alone
        told = (tmp_path / f"errors-{rank}").read_text().splitlines()
        finished, samples, models, numerics, *places = told
        assert finished == "1 finished"
        assert samples.startswith("rank 1 has another selection or length of samples than rank 0")
        assert models.startswith("rank 1 has another model than rank 0")
        assert "q_proj.input holds" in numerics
        assert numerics.partition(":")[0].endswith("in channel 0 in the sample of line 5")
        assert len(places) == 2
        assert all(place.startswith(f"{tmp_path}/file") for place in places)


def test_three_ranks_write_what_one_writes(
    tmp_path: Path, tiny_samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    powers = {"1.self_attn.k_proj": -28, "1.self_attn.q_proj": 28}  # E5M2 does not hold these keys
    model = scale_tensors(write_model(tmp_path / "usual", "llama"), tmp_path / "model", powers)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["calibrate", str(model), "--samples", str(tiny_samples)]
    arguments += ["--count", "128", "--max-length", "32", "--dtype", "float32", "-o"]
    gate = ["--max-kl", "1e-6", "--held-out", str(tiny_samples)]

    def calibrate(*more: str) -> subprocess.CompletedProcess[str]:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*start, "--nproc-per-node=3", "-m", "octet", *arguments, *more]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)

    alone = octet(*arguments, tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr[-3000:]
    together = calibrate(str(tmp_path / "together"))
    assert together.returncode == 0, together.stderr[-3000:]
    written = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {GOLDEN_FILE, EXPECTED_FILE, SCENARIOS_FILE} < written
    for name in written - {MANIFEST_FILE, "report.json", "report.html"}:  # these name the processes
        found = (tmp_path / "together" / name).read_bytes()
        assert found == (tmp_path / "alone" / name).read_bytes(), name
    manifests = [Manifest.load(tmp_path / name) for name in ("alone", "together")]
    assert manifests[0].folds == manifests[1].folds and manifests[0].folds
    assert "the last process computes golden records" in together.stderr
    refused = calibrate(str(tmp_path / "refused"), *gate)
    assert refused.returncode != 0
    assert "is not written, over --max-kl" in " ".join(refused.stderr.split())
    assert not (tmp_path / "refused").exists()


def test_one_process_is_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with process_group("cpu") as (group, device):
        assert (group.rank, group.world, str(device)) == (0, 1, "cpu")
        assert group.gather("x") == ["x"]


def test_a_rank_without_a_gpu_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="rank 2 of this machine finds 2 GPUs"):
        process_group("cuda").__enter__()


def test_a_machine_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match="torch finds no GPU; give --device cpu"):
        process_group("cuda").__enter__()


def test_the_rank_that_differs_is_named() -> None:
    class Three(Group):
        world = 3

        def gather(self, item: dict[str, str]) -> list[dict[str, str]]:
            return [item, item, {**item, "samples": "b"}]

    require_agreement(Group(), {"samples": "a"})
    with pytest.raises(ConfigError, match=r"rank 2 has another samples than rank 0 \(b, not a\)"):
        require_agreement(Three(), {"model": "m", "samples": "a"})


def test_ranks_on_different_gpus_are_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Two(Group):
        world = 2

        def gather(self, item: dict[str, str]) -> list[dict[str, str]]:
            monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA A100")
            return [item, run_identity(checkpoint, (), "bfloat16", torch.device("cuda", 1))]

    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100")
    facts = run_identity(checkpoint, (), "bfloat16", torch.device("cuda", 0))
    expected = (
        r"rank 1 has another device than rank 0 \(NVIDIA A100, not NVIDIA H100\): .*GPUs of one"
    )
    with pytest.raises(ConfigError, match=expected) as error:
        require_agreement(Two(), facts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "/a/b"), "/a/b: No space left on device"),
        (OSError("connection lost"), "connection lost"),
    ],
)
def test_rank_0_alone_prints_an_error_that_all_share(error: OSError, line: str) -> None:
    class Second(Group):
        rank, world = 1, 2

        def gather(self, item: Any) -> list[Any]:
            return [None, item]

    def fail() -> None:
        raise error

    for group in (Group(), Second()):
        with pytest.raises(ArtifactError) as raised:
            group.attempt(fail)
        assert str(raised.value) == line
        assert raised.value.printed_elsewhere == (group.rank != 0)
