"""A gateway's process in the benchmarks: on its cores, with all that it starts."""

import http.client
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from gateway_load import request_bytes
from gateway_peers import KEY, Gateway, free_port

__all__ = ["Running", "cores"]

START_TIMEOUT_S = 120.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cores() -> tuple[int, int, int]:
    """For the mock, the load and the gateway; the first two share one where there are only two.

    Of cores that share their execution units (hyperthreads), only the first is taken.
    """
    whole = [core for core in sorted(os.sched_getaffinity(0)) if _siblings(core)[0] == core]
    if len(whole) < 2:
        raise SystemExit("the gateway needs a core of its own: at least two cores are wanted")
    if len(whole) < 4:
        return whole[0], whole[0], whole[1]
    return whole[1], whole[2], whole[3]  # the first often has the machine's interrupts


def _siblings(core: int) -> list[int]:
    file = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        parts = file.read_text().strip().split(",")
    except OSError:
        return [core]
    return [int(part.partition("-")[0]) for part in parts]


class Running:
    """A started gateway; a context manager that ends it and its children."""

    def __init__(
        self, gateway: Gateway, upstreams: list[str], cores: set[int], scratch: Path
    ) -> None:
        self.port = free_port()
        self.log = scratch / f"{gateway.peer or gateway.name}.log"
        command = gateway.command(upstreams, self.port, scratch)
        started = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | gateway.environment,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        try:
            self._wait_until_it_answers(started + START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _wait_until_it_answers(self, deadline: float) -> None:
        head, _, body = request_bytes(stream=False, key=KEY).partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
        answer = ""
        while time.perf_counter() < deadline and self.process.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                connection.request("POST", "/v1/chat/completions", body, headers)
                response = connection.getresponse()
                answer = f"{response.status} {response.read()[:300]!r}"
                if response.status == 200:
                    return
            except OSError as error:
                answer = str(error)
            time.sleep(0.02)
        end = self.log.read_text(errors="replace")[-2000:]
        raise SystemExit(f"{self.process.args!r} did not start: {answer}\n{end}")

    def stop(self) -> None:
        for sign, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, None)):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(patience_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def rss_mb(self) -> float:
        """Resident memory of the process and its children, in 10^6 bytes."""
        pages = 0
        for pid in self._tree():
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue  # it ended meanwhile
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def cpu_s(self) -> float:
        """Processor time that the process and its children have used."""
        return sum(self.cpu_s_of().values())

    def cpu_s_of(self) -> dict[int, float]:
        """Processor time of the process and each child, by its id."""
        found = {}
        for pid in self._tree():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[pid] = (int(fields[11]) + int(fields[12])) * TICK_S
        return found

    def _tree(self) -> list[int]:
        found = [self.process.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    found += map(int, children.read_text().split())
                except OSError:
                    continue
        return found
