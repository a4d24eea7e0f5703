"""Sends fuzzed requests to a gateway in a process of its own, over sockets, and judges the answers.

`python tests/serve/fuzz.py --count 100000` prints the figures; the tests send some thousands.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.serve.fuzz_cases import Case, cases, request
from tests.serve.fuzz_tables import BODIES

ANSWER_S = 120.0  # the longest wait for an answer, or for the end of a connection
START_S = 300.0  # for the gateway to start, and then to drain and end
QUIET_S = 0.1  # no answer for so long: the request is not whole, so the client hangs up
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n")


@dataclass
class Report:
    """What came of the cases; `failures` says of each which it was, and what was wrong."""

    count: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def judge(self, case: Case, received: bytes | None) -> None:
        self.count += 1
        answers = [(status, body) for status, _, body in responses(received or b"")]
        self.statuses.update(str(status) for status, _ in answers)
        if not answers:
            self.statuses["hung up" if received is not None else "no end"] += 1
        problem = _problem(case, received, answers)
        if problem:
            self.failures.append(
                f"case {case.number} ({case.kind}): {problem}: {case.sent[:300]!r}"
            )

    def line(self) -> str:
        counts = ", ".join(f"{status}: {n}" for status, n in sorted(self.statuses.items()))
        rate = self.count / self.seconds
        return f"{self.count} requests in {self.seconds:.1f} s ({rate:.0f}/s); {counts}"


def _problem(case: Case, received: bytes | None, answers: list[tuple[int, bytes]]) -> str | None:
    if received is None:
        return "neither an answer nor an end"
    if case.whole and not answers:
        return f"no answer but {received[:100]!r}"
    for status, body in answers:
        if status >= 500:
            return f"{status} {body[:300]!r}"
        if status >= 400 and body:
            try:
                error = json.loads(body)["error"]
                assert error["message"] and error.keys() == {"message", "type", "param", "code"}
            except (ValueError, KeyError, TypeError, AssertionError):
                return f"{status} without an error object: {body[:300]!r}"
    return None


def responses(received: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Status, head and body of each response; the last one's body may be cut."""
    while match := STATUS.match(received):
        head, _, rest = received.partition(b"\r\n\r\n")
        status, low = int(match[1]), head.lower()
        if status < 200:
            received = rest
            continue
        length = re.search(rb"\r\ncontent-length: (\d+)", low)
        if b"\r\ntransfer-encoding: chunked" in low:
            body, received = _dechunked(rest)
        elif length:
            body, received = rest[: int(length[1])], rest[int(length[1]) :]
        else:
            body, received = rest, b""
        yield status, head, body


def _dechunked(rest: bytes) -> tuple[bytes, bytes]:
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size or b"0", 16)
        body, rest = body + rest[:length], rest[length + 2 :]
        if length == 0:
            break
    return body, rest


async def exchange(host: str, port: int, case: Case) -> bytes | None:
    """What came back until the connection ended; None if it did not end in time."""
    reader, writer = await asyncio.open_connection(host, port)
    received = b""
    try:
        writer.write(case.sent)
        deadline = time.monotonic() + ANSWER_S
        hung_up = False
        while time.monotonic() < deadline:
            patience = ANSWER_S if case.whole or hung_up else QUIET_S
            try:
                piece = await asyncio.wait_for(reader.read(65536), patience)
            except TimeoutError:
                if hung_up:
                    return None
                writer.write_eof()
                hung_up = True
                continue
            if not piece:
                return received
            received += piece
        return None
    except OSError:  # a reset: it did end
        return received
    finally:
        writer.close()


@dataclass
class Fuzzed:
    """A gateway in a process of its own; `failures` is what went wrong with it, once it ended."""

    host: str
    port: int
    failures: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@asynccontextmanager
async def serving_fuzzed() -> AsyncIterator[Fuzzed]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).with_name("fuzz_server.py"))),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    log = asyncio.create_task(process.stderr.read())
    try:
        address = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
    except TimeoutError:
        process.kill()
        address = ""
    if not address:
        raise RuntimeError(f"the server did not start: {(await log).decode()[-3000:]}")
    host, port = address.split()
    server = Fuzzed(host, int(port))
    try:
        yield server
    finally:
        if process.returncode is not None:
            server.failures.append(f"the server has ended with {process.returncode}")
        else:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), START_S)
            except TimeoutError:
                process.kill()
                await process.wait()
            if process.returncode:
                server.failures.append(f"the server ended with {process.returncode}")
        said = (await log).decode(errors="replace")
        if "Traceback" in said:
            times, start = said.count("Traceback"), said.index("Traceback")
            server.failures.append(f"{times} tracebacks: {said[start : start + 6000]}")


async def fuzz(count: int, seed: int, *, workers: int = 32) -> Report:
    """Starts the gateway, sends the cases, and asks at the end whether it still serves."""
    report = Report()
    async with serving_fuzzed() as server:
        pending = cases(seed, count)

        async def work() -> None:
            for case in pending:
                report.judge(case, await exchange(server.host, server.port, case))

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(workers)))
        report.seconds = time.perf_counter() - started
        await _still_serves(server.host, server.port, report)
    report.failures += server.failures
    return report


async def _still_serves(host: str, port: int, report: Report) -> None:
    """A plain request on each path is answered, and no request is thought to be in flight."""
    for number, path in enumerate(("/v1/completions", "/v1/chat/completions", "/tokenize")):
        body = json.dumps({"model": "fake"} | BODIES[path]).encode()
        case = Case(-1 - number, "after", request(path, body), True)
        received = await exchange(host, port, case) or b""
        if [status for status, _, _ in responses(received)] != [200]:
            report.failures.append(f"afterwards {path} answers {received!r}")
    case = Case(-9, "after", request("/metrics", b"", [], b"GET"), True)
    metrics = (await exchange(host, port, case) or b"").decode()
    for line in metrics.splitlines():
        counted = line.startswith("octet_requests_in_flight{") and "/metrics" not in line
        if counted and float(line.split()[-1]):
            report.failures.append(f"afterwards there is in flight: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = asyncio.run(fuzz(arguments.count, arguments.seed))
    print(report.line())
    for failure in report.failures[:40]:
        print(failure)
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
