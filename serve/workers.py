"""`octet serve --workers N`: several gateway processes on one port, started again if they end.

Each is a gateway of its own, with its own proofs, queues and metrics. The kernel spreads the
connections over them (SO_REUSEPORT). This process binds the sockets, so that a worker that is
started again finds the connections that waited for it; it forwards signals, and serves nothing.
"""

import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from octet.errors import OctetError
from serve.config import GatewayConfig
from serve.config.checks import load_config, problems_of_workers
from serve.config.document import Document
from serve.config.load import refuse
from serve.gateway.state import Gateway
from serve.run import FORCED, bind, prepared, serve_until_signal
from serve.telemetry.logs import logging_to, say

__all__ = ["main", "run_workers"]

POLL_S = 0.1
RESTART_S = 1.0  # from the end of a worker until the next
RETRY_S = 10.0  # the same if it ended before it served
# A worker finds its modules where this process found them, and none in the working directory.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); import serve.workers as w; w.main()"
)


def run_workers(
    settings: GatewayConfig,
    count: int,
    *,
    config: Path,
    host: str | None = None,
    port: int | None = None,
    proof: bool = True,
) -> None:
    """Serves `settings`, read from `config`, by `count` processes until a signal.

    Administration of worker i is at `admin.port` + i. Raises an OctetError for a configuration that
    cannot work so; exits 1 if requests were cut short, or with the code of a worker that cannot
    start.
    """
    settings = prepared(settings, host=host, port=port, proof=proof)
    refuse(config, Document.read(config), list(problems_of_workers(settings, count)))
    Gateway.from_config(settings)  # raises what each worker would raise
    with contextlib.ExitStack() as stack:
        listen, admin = settings.listen, settings.admin
        with bind(listen.host, listen.port) as first:  # fails where others could join silently
            free = first.getsockname()[1]
        workers = []
        for i in range(count):
            listener = stack.enter_context(bind(listen.host, free, shared=True))
            assert admin.port is not None
            at = admin.port + i if admin.port else 0
            admin_listener = stack.enter_context(bind(admin.host, at))
            workers.append(_Worker(listener, admin_listener, (i, config, proof, count)))
        code = _Supervisor(workers, settings).run()
    if code:
        sys.exit(code)


class _Worker:
    """One worker: its sockets, which outlive a process, and its current process."""

    def __init__(
        self,
        listener: socket.socket,
        admin_listener: socket.socket,
        settings: tuple[int, Path, bool, int],
    ) -> None:
        self.listener = listener
        self.started = False
        self.restart_at = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._admin_listener = admin_listener
        self._settings = settings
        self._channel: socket.socket | None = None  # that it writes to when it serves

    def start(self) -> None:
        self.close()
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self.started = False
        number, config, proof, count = self._settings
        fds = [one.fileno() for one in (self.listener, self._admin_listener, theirs)]
        given = json.dumps([number, str(config), proof, count, *fds])
        # Until it can reload, SIGHUP waits: it would end the process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, given, json.dumps(sys.path)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C reaches it once, from the parent
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()

    def poll(self) -> int | None:
        """Returns the exit code of the process, if it has ended."""
        assert self.process is not None and self._channel is not None
        with contextlib.suppress(BlockingIOError):
            self.started |= bool(self._channel.recv(1))
        return self.process.poll()

    def send(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def rebind(self) -> None:
        """Ends the connections that wait for the process; new ones go to the other workers."""
        host, port = self.listener.getsockname()[:2]
        self.listener.close()
        self.listener = bind(host, port, shared=True)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


class _Supervisor:
    """Starts the workers, forwards signals to them, and starts again those that end."""

    def __init__(self, workers: list[_Worker], settings: GatewayConfig) -> None:
        self._workers = workers
        self._logs = settings.logs
        self._stopping = False
        self._code = 0
        self._received: list[int] = []  # signals to forward

    def run(self) -> int:
        """Returns the exit code once no worker is left."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda received, _frame: self._received.append(received))
        running = list(self._workers)
        first, *others = running
        first.start()
        for worker in others:  # after the first, so that what none can use is one error
            worker.restart_at = math.inf
        try:
            while running:
                time.sleep(POLL_S)
                self._forward()
                if first.started:
                    for worker in others:
                        worker.restart_at = min(worker.restart_at, time.monotonic())
                    others = []
                running = [worker for worker in running if not self._ended(worker)]
        finally:
            for worker in self._workers:
                worker.close()  # which also ends one that still runs
        return self._code

    def _ended(self, worker: _Worker) -> bool:
        """Decides whether the worker has ended for good; starts it again otherwise."""
        if worker.restart_at:
            if self._stopping:
                return True
            if time.monotonic() >= worker.restart_at:
                worker.restart_at = 0.0
                worker.start()
            return False
        code = worker.poll()
        if code is None:
            return False
        if self._stopping:
            self._code = max(self._code, code if code >= 0 else FORCED)
            worker.listener.close()
            return True
        if not any(each.started for each in self._workers):  # nor would the next one
            self._code = max(code, FORCED)
            self._stopping = True
            self._received.append(signal.SIGTERM)  # for those that are starting
            return True
        after_s = RESTART_S
        if not worker.started:
            after_s = RETRY_S
            worker.rebind()
        which = self._workers.index(worker)
        line = f"worker {which} ended with code {code}; it is started again in {after_s:g} s"
        say(f"warning: {line}", self._logs, logging.WARNING)
        worker.restart_at = time.monotonic() + after_s
        return False

    def _forward(self) -> None:
        """Sends each worker the signals received since the last call.

        A handler does not: it may run while a worker is being started, and would miss that one.
        """
        while self._received:
            number = self._received.pop(0)
            self._stopping |= number != signal.SIGHUP
            for worker in self._workers:
                worker.send(number)


def main() -> None:
    """Runs one worker: the argument is what `_Worker.start` gives."""
    number, config, proof, count, listener, admin_listener, channel = json.loads(sys.argv[1])
    parent = socket.socket(fileno=channel)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()

    def started() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        parent.send(b"s")

    try:
        settings = load_config(Path(config))
        settings = settings if proof else settings.without_proof()
        # The file may have changed since the first workers started.
        document = Document.read(Path(config))
        refuse(Path(config), document, list(problems_of_workers(settings, count)))
        with logging_to(settings.logs, worker=number):
            gateway = Gateway.from_config(settings, processes=count)
            gateway.path, gateway.proves = Path(config), proof
            clean = serve_until_signal(
                gateway,
                socket.socket(fileno=listener),
                socket.socket(fileno=admin_listener),
                started,
            )
    except OctetError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if not clean:
        sys.exit(FORCED)


def _end_with(parent: socket.socket) -> None:
    """Drains when the parent has gone, which then cannot send a signal."""
    with contextlib.suppress(OSError):
        parent.recv(1)
    os.kill(os.getpid(), signal.SIGTERM)
