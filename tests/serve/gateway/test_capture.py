"""Captured requests as a file: its lines, its limit, several processes, and a disk that is full."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from calibrate.samples.source import load_samples
from octet.errors import ConfigError
from serve.config import CaptureConfig, GatewayConfig
from serve.gateway import capture as capture_module
from serve.gateway.capture import Capture, redacted, require_writable
from serve.telemetry.metrics import Metrics

LIMIT = 50_000  # bytes, for speed


def capture_to(file: Path, **settings: Any) -> Capture:
    capture = Capture("m", CaptureConfig(file=file, **settings), Metrics().captured)
    assert capture._limit == 100_000_000
    capture._limit = LIMIT
    return capture


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Write to Ada.Lovelace+x@mail.example.org.", "Write to [EMAIL]."),
        ("card 4111 1111-1111 1111, phone +49 (0) 30 123456", "card [NUMBER], phone [NUMBER]"),
        ("use sk-abcdefABCDEF0123456789 or ghp_0123456789abcdefghijABCDEFG", "use [KEY] or [KEY]"),
        (f"密钥{'0f' * 20}。", "密钥[KEY]。"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "id [KEY]"),
        ("from 192.168.10.254:80 and 2001:db8::8a2e:370:7334", "from [IP]:80 and [IP]"),
        # Code and prose stay.
        ("x[1::2] at 12:30:45, v1.2.3", "x[1::2] at 12:30:45, v1.2.3"),
        (f"# {'-' * 70}\nstd::vector<int> a", f"# {'-' * 70}\nstd::vector<int> a"),
        ("a_long_function_name_of_an_old_library()", "a_long_function_name_of_an_old_library()"),
    ],
)
def test_personal_data_and_keys_are_replaced(text: str, clean: str) -> None:
    assert redacted(text) == clean
    sample = {"messages": [{"role": "user", "content": [text]}]}
    assert redacted(sample) == {"messages": [{"role": "user", "content": [clean]}]}


@pytest.mark.parametrize("part", ["a", "1 ", "a:", "1.", "a@", "0f", "-", "1()", "a.", "::"])
def test_redaction_takes_linear_time(part: str) -> None:
    redacted(part * (capture_module.MOST_TEXT // len(part)))  # minutes if it were quadratic


@pytest.mark.parametrize("pattern", ["(a+)+$", r"(\w+\s?)+$", "a*b"])
def test_a_slow_pattern_is_given_up_and_named(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "REDACT_S", 0.1)
    capture = capture_to(tmp_path / "prompts.jsonl", redact=[pattern])
    # Of many messages, each fast enough: the limit is of the request.
    many = [{"role": "user", "content": "a" * 2000 + "! b"}] * 50
    assert capture.write([{"messages": many}], 0.01) == "failed"
    status = capture.status(addresses=True)
    assert status["paused"] and f"0.1 s at the pattern {pattern!r}" in status["last_failure"]
    assert not (tmp_path / "prompts.jsonl").exists()
    assert capture.write([{"text": "short"}], 0.01) == "kept"


def test_a_file_is_private_and_calibration_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    capture = capture_to(file, redact=["ACME-[0-9]+"])
    assert capture.write([{"text": "Ticket ACME-7 of a@b.org"}], 0.01) == "kept"
    chat = [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "12"}]
    assert capture.write([{"messages": chat}], 0.01) == "kept"
    first, second = load_samples(file).samples
    assert first.text == "Ticket [REDACTED] of [EMAIL]"
    assert list(second.messages) == chat
    assert file.stat().st_mode & 0o777 == 0o600
    assert {line["share"] for line in lines_of(file)} == {0.01}


def test_a_full_file_keeps_every_second_line_and_the_share_halves(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    capture = capture_to(file, share=1.0)
    written = [capture.write([{"text": f"{n:<250}"}], 1.0) for n in range(1000)]
    size = file.stat().st_size
    assert capture.status(addresses=False)["size_bytes"] == size <= LIMIT
    assert capture_to(file).status(addresses=False)["size_bytes"] == size  # of another start
    assert capture.share < 0.3
    numbers = [int(line["text"]) for line in lines_of(file)]
    assert numbers == sorted(set(numbers))
    # The beginning is there as much as the end.
    assert 0.3 < sum(n < 500 for n in numbers) / len(numbers) < 0.7
    assert written.count("kept") > len(numbers)
    # Another start goes on with the file's share, and a new file with the configured one.
    later = capture_to(file, share=1.0)
    later.write([{"text": "later"}], 1e-9)
    assert later.share == capture.share
    file.rename(tmp_path / "taken-away.jsonl")
    later.write([{"text": "new"}], 1.0)
    assert (later.share, [line["text"] for line in lines_of(file)]) == (1.0, ["new"])


def test_a_request_drawn_before_the_share_halved_has_the_chance_of_those_after(
    tmp_path: Path,
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "x", "share": 0.001}\n')
    capture = capture_to(file, share=1.0)
    outcomes = [capture.write([{"text": "y"}], 1.0) for _ in range(1000)]
    assert outcomes.count("thinned") > 950


WRITER = """
import sys
from pathlib import Path
from serve.config import CaptureConfig
from serve.gateway.capture import Capture
from serve.telemetry.metrics import Metrics
config = CaptureConfig(file=Path(sys.argv[1]), share=1.0)
capture = Capture("m", config, Metrics().captured)
capture._limit = 50_000
for n in range(150):
    capture.write([{"text": sys.argv[2] * 250}], 1.0)
"""


def test_processes_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    command = [sys.executable, "-c", WRITER, str(file)]
    writers = [subprocess.Popen([*command, letter]) for letter in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    texts = [line["text"] for line in lines_of(file)]
    assert {len(text) for text in texts} == {250}
    assert {text[0] for text in texts} == {"a", "b"} == set("".join(set(texts)))
    assert file.stat().st_size <= LIMIT
    assert os.listdir(tmp_path) == ["prompts.jsonl"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "whole", "share": 0.5}\n{"text": "ha')
    (tmp_path / ".prompts.jsonl.partial").write_text('{"text": "pro')
    capture = capture_to(file, share=0.5)
    assert capture.write([{"text": "next"}], 0.001) == "kept"
    assert [line["text"] for line in lines_of(file)] == ["whole", "next"]
    assert os.listdir(tmp_path) == ["prompts.jsonl"]


def test_a_full_disk_leaves_no_half_line_and_capture_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "prompts.jsonl"
    capture = capture_to(file, share=1.0)
    assert capture.write([{"text": "before"}], 1.0) == "kept"
    write = os.write
    with monkeypatch.context() as full:  # a disk with room for ten bytes
        full.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:10]))
        assert capture.write([{"text": "during"}], 1.0) == "failed"
        assert capture.write([{"text": "during"}], 1.0) == "failed"
        assert [line["text"] for line in lines_of(file)] == ["before"]
        assert capture.take(1) is None  # paused: nothing is even drawn
        status = capture.status(addresses=True)
        assert (status["paused"], status["last_failure"]) == (True, "No space left on device")
        assert status["size_bytes"] == file.stat().st_size
    assert capture.write([{"text": "after"}], 1.0) == "kept"
    assert [line["text"] for line in lines_of(file)] == ["before", "after"]
    assert capture.status(addresses=False)["paused"] is False
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: requests are served but not captured: No space left on device; tried again"
        " every 30 s",
        f"{file}: requests are captured again",
    ]


def test_thinning_on_a_full_disk_keeps_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    capture = capture_to(file, share=1.0)
    for n in range(160):
        assert capture.write([{"text": f"{n:<250}"}], 1.0) == "kept"
    before = file.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", full)
        outcomes = [capture.write([{"text": f"{n:<250}"}], 1.0) for n in range(40)]
    assert outcomes[-1] == "failed"
    assert file.read_bytes().startswith(before)
    assert (os.listdir(tmp_path), capture.share) == (["prompts.jsonl"], 1.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a tmpfs")
def test_a_small_file_system_is_filled_to_whole_lines(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs: run as root, outside of a container")
    try:
        file = disk / "prompts.jsonl"
        capture = capture_to(file, share=1.0)
        capture._limit = 1_000_000
        outcomes = [capture.write([{"text": f"{n:<999}"}], 1.0) for n in range(80)]
        assert outcomes[0] == "kept" and outcomes[-1] == "failed"
        kept = [int(line["text"]) for line in lines_of(file)]
        assert kept == list(range(outcomes.index("failed")))
        file.rename(disk / "taken.jsonl")  # frees nothing
        assert capture.write([{"text": "x"}], 1.0) == "failed"
        (disk / "taken.jsonl").unlink()
        assert capture.write([{"text": "x"}], 1.0) == "kept"
        assert [line["text"] for line in lines_of(file)] == ["x"]
    finally:
        subprocess.run(["umount", disk], check=True)


def problem(file: Path) -> str:
    capture = {"file": file, "share": 0.5}
    model = {"pool": [{"type": "vllm", "url": "http://h"}], "capture": capture}
    with pytest.raises(ConfigError) as refused:
        require_writable(GatewayConfig.model_validate({"models": {"m": model}}))
    return str(refused.value)


def test_a_file_that_cannot_be_captured_to_is_refused_in_one_line(tmp_path: Path) -> None:
    where = "models.m.capture.file: "
    gone = tmp_path / "gone"
    assert problem(gone / "x.jsonl") == f"{where}{gone}: no such directory; create it"
    mine = tmp_path / "samples.jsonl"
    mine.write_text('{"text": "my own sample"}\n')
    assert problem(mine) == (
        f"{where}{mine}: it holds other lines than captured requests; name a new file"
    )
    assert problem(tmp_path) == f"{where}{tmp_path}: Is a directory"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "a FIFO or a device" in problem(fifo)
    assert mine.read_text("utf-8") == '{"text": "my own sample"}\n'
