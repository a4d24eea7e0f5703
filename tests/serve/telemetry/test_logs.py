"""Log lines: well-formed, with the request's id, without prompts, never in the event loop's way."""

import io
import json
import logging
import os
import threading
import time
import weakref
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from serve.config.gateway import Logs
from serve.telemetry import logs
from serve.telemetry.logs import LAST_LINES_S, logging_to, say
from serve.telemetry.metrics import Metrics
from serve.telemetry.observation import Observation, current, log_access

BUSY_S = 30.0  # that a busy machine may take
_log = logging.getLogger("serve.test")


def written(config: Logs, *, prompt: str | None = None) -> list[str]:
    """The lines of one access line, and of one warning about the same request."""
    stream = io.StringIO()
    observation = Observation(Metrics(), "/v1/chat/completions", "id-1")
    observation.authenticated("team")
    observation.routed("m")
    observation.attempt("main", "gpu-1", "fp8")
    observation.first_token(2)
    observation.finished(11, 5)
    observation.prompt = prompt
    observation.status = 200
    token = current.set(observation)
    try:
        with logging_to(config, stream):
            _log.warning("backend %s is slow", "gpu-1")
            log_access("POST", "/v1/chat/completions", observation)
    finally:
        current.reset(token)
    return stream.getvalue().splitlines()


def test_json_lines() -> None:
    warning, access = (json.loads(line) for line in written(Logs(format="json")))
    assert warning["message"] == "backend gpu-1 is slow"
    assert warning["level"] == "warning"
    assert warning["logger"] == "serve.test"
    assert warning["request_id"] == access["request_id"] == "id-1"
    age = datetime.now(UTC) - datetime.fromisoformat(access["time"])
    assert timedelta(0) <= age + timedelta(milliseconds=1) < timedelta(seconds=60)
    known = {"method", "path", "status", "key", "model", "pool", "backend", "precision"}
    known |= {"prompt_tokens", "completion_tokens", "first_token_s", "duration_s"}
    assert known <= set(access)
    assert (access["prompt_tokens"], access["completion_tokens"]) == (11, 5)
    assert "prompt" not in access


def test_every_line_of_a_worker_names_it() -> None:
    for config in (Logs(format="json"), Logs()):
        stream = io.StringIO()
        with logging_to(config, stream, worker=1):
            say("serving m on http://h:1", config)
            _log.warning("slow", extra={"fields": {"pool": "p"}})
        alone, line = stream.getvalue().splitlines()
        if config.format == "json":
            assert json.loads(alone)["worker"] == json.loads(line)["worker"] == 1
        else:
            assert alone == "worker 1: serving m on http://h:1"
            assert line.endswith("slow worker=1 pool=p")


def test_text_lines() -> None:
    warning, access = written(Logs())
    assert warning.endswith("WARNING serve.test: backend gpu-1 is slow request_id=id-1")
    assert " model=m pool=main backend=gpu-1 precision=fp8 " in access


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_prompt_is_one_line(form: Any) -> None:
    """Somebody's prompt must not write log lines of its own."""
    forged = 'hello\n2026-01-01 ERROR serve: "forged"\r\n\u2028'
    lines = written(Logs(format=form), prompt=forged)
    assert len(lines) == 2
    if form == "json":
        assert json.loads(lines[1])["prompt"] == forged


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_message_is_one_line_too(form: Any) -> None:
    stream = io.StringIO()
    with logging_to(Logs(format=form), stream):
        _log.warning("unknown model %s", "a\nb\x1b[2J\u2028c")
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_defect_shows_its_traceback(form: Any) -> None:
    stream = io.StringIO()
    with logging_to(Logs(format=form), stream):
        try:
            raise ZeroDivisionError("by hand")
        except ZeroDivisionError:
            _log.exception("it failed")
    assert "ZeroDivisionError: by hand" in stream.getvalue()
    assert "test_logs.py" in stream.getvalue()


def test_a_line_outside_of_requests_has_no_id() -> None:
    stream = io.StringIO()
    with logging_to(Logs(format="json"), stream):
        _log.info("started")
    assert "request_id" not in json.loads(stream.getvalue())


def test_arguments_are_read_at_once() -> None:
    stream = io.StringIO()
    names = ["a"]
    with logging_to(Logs(), stream):
        _log.info("names: %s", names)
        names.append("b")
    assert "names: ['a']" in stream.getvalue()


class Stuck(io.StringIO):
    """A terminal that takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.caught_up = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        assert self.go_on.wait(60)
        size = super().write(text)
        if "line 3" in text:
            self.caught_up.set()
        return size


def test_a_stuck_terminal_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines beyond the limit are dropped, and said to be."""
    monkeypatch.setattr(logs, "MOST_WAITING", 3)
    stream = Stuck()
    with logging_to(Logs(), stream):
        _log.info("line 0")
        assert stream.entered.wait(60)  # the writer has taken it, and waits
        started = time.perf_counter()
        for number in range(1, 101):
            _log.info("line %d", number)
        assert time.perf_counter() - started < 30  # half of what the terminal takes for a line
        stream.go_on.set()
        assert stream.caught_up.wait(60)
        _log.info("after")
    lines = stream.getvalue().splitlines()
    assert [line.split(": ")[1] for line in lines[:4]] == [f"line {n}" for n in range(4)]
    assert lines[4].endswith("after (97 lines before this one were dropped)")
    assert len(lines) == 5


def test_logging_is_as_before_afterwards() -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    with logging_to(Logs(), io.StringIO()):
        assert root.level == logging.INFO
    assert (root.level, list(root.handlers)) == before


def test_lines_are_dropped_by_their_size_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_WAITING_BYTES", 100_000)
    stream = Stuck()
    with logging_to(Logs(), stream):
        _log.info("line 0")
        assert stream.entered.wait(60)
        for _ in range(100):
            _log.info("%s", "x" * 10_000)
        stream.go_on.set()
    assert 8 <= stream.getvalue().count(": xxx") <= 12


def test_what_a_traceback_holds_is_free_before_its_line_is_written() -> None:
    class Large:
        pass

    def fail() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise ZeroDivisionError

    held: list[weakref.ref[Large]] = []
    stream = Stuck()
    with logging_to(Logs(), stream):
        _log.info("line 3")
        assert stream.entered.wait(60)
        try:
            fail()
        except ZeroDivisionError:
            _log.exception("it failed")
        assert held[0]() is None
        stream.go_on.set()
    assert "in fail" in stream.getvalue()


def test_a_traceback_cannot_control_the_terminal() -> None:
    stream = io.StringIO()
    with logging_to(Logs(), stream):
        try:
            raise ZeroDivisionError("\x1b]0;owned\x07")
        except ZeroDivisionError:
            _log.exception("it failed")
    assert "\x1b" not in stream.getvalue() and "owned" in stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_that_reads_nothing_does_not_prevent_the_end(form: Any) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        began = time.monotonic()
        with logging_to(Logs(format=form), stream):
            for number in range(500):
                _log.info("line %d %s", number, "x" * 1000)  # a pipe holds 64 KB
            say("draining", Logs(format=form))
            assert time.monotonic() - began < BUSY_S  # a full pipe would be waited for for ever
        assert time.monotonic() - began < BUSY_S + LAST_LINES_S
        os.close(reading)


def test_what_is_said_stands_in_the_log_in_its_order(capfd: pytest.CaptureFixture[str]) -> None:
    say("before", Logs())
    with logging_to(Logs()):
        _log.warning("one")
        say("two", Logs())
        _log.warning("three")
    lines = capfd.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["before", "one", "two", "three"]
    assert lines[2] == "two"
