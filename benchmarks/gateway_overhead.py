"""What the gateway adds to a request on its way to an OpenAI server and back.

The claim it checks: relaying adds less than 2.3 ms at the 99th percentile. The upstream is a
process that answers at once with canned events, so the difference between asking it directly and
asking it through `octet serve` is the gateway. Direct and relayed requests alternate, over
connections that are kept; every answer is read to its end and compared. Each row has its
concurrency, and the time to the first byte and to the last.

    python benchmarks/gateway_overhead.py [--requests N] [--output FILE]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from card import conditions, report

EVENTS = 32
BODY = {"model": "m", "prompt": "x" * 2000, "stream": True, "max_tokens": EVENTS}
CONCURRENCY = (1, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="of each kind, for each row")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--upstream", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upstream:
        upstream()
        return
    rows = asyncio.run(measure(options.requests))
    card = conditions(
        model="none: the upstream answers at once",
        upstream=f"{EVENTS} canned server-sent events, each written by itself",
        request_bytes=len(json.dumps(BODY)),
        requests=options.requests,
        figures="ms; added = relayed - direct at the same percentile",
        load="client, gateway and upstream on the same cores",
    )
    report("gateway_overhead", card, rows, options.output)


def upstream() -> None:
    """The upstream's process: prints its port, and answers until it is killed."""

    async def completions(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(EVENTS):
            choice = {"index": 0, "text": f" token{i}", "logprobs": None, "finish_reason": None}
            chunk = {"id": "cmpl-0", "object": "text_completion", "model": "m", "choices": [choice]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


async def measure(requests: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        backend = subprocess.Popen(
            [sys.executable, __file__, "--upstream"], stdout=subprocess.PIPE, text=True
        )
        assert backend.stdout is not None
        direct = f"http://127.0.0.1:{int(backend.stdout.readline())}"
        config = Path(scratch) / "octet.yaml"
        config.write_text(
            json.dumps({"models": {"m": {"pool": [{"type": "vllm", "url": direct}]}}})
        )
        gateway = subprocess.Popen(
            [sys.executable, "-m", "octet.cli", "serve", "--config", str(config), "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert gateway.stderr is not None
        relayed = gateway.stderr.readline().split()[-1]
        try:
            return [await row(direct, relayed, c, requests) for c in CONCURRENCY]
        finally:
            gateway.terminate()
            backend.terminate()
            gateway.wait()
            backend.wait()


async def row(direct: str, relayed: str, concurrency: int, requests: int) -> dict[str, Any]:
    """Times at the median and the 99th percentile: to the first byte, and to the last."""
    first: dict[str, list[float]] = {direct: [], relayed: []}
    last: dict[str, list[float]] = {direct: [], relayed: []}
    answers: set[bytes] = set()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(url: str) -> None:
            start = time.perf_counter()
            async with session.post(url + "/v1/completions", json=BODY) as response:
                head = await response.content.readany()
                at_first = time.perf_counter()
                answers.add(head + await response.read())
            first[url].append((at_first - start) * 1e3)
            last[url].append((time.perf_counter() - start) * 1e3)

        for round_ in range(requests // concurrency + 20):
            if round_ == 20:  # what came before was the warm-up
                for times in (*first.values(), *last.values()):
                    times.clear()
            for url in (direct, relayed) if round_ % 2 else (relayed, direct):
                await asyncio.gather(*(one(url) for _ in range(concurrency)))
    assert len(answers) == 1, "the gateway changed the bytes"
    result: dict[str, Any] = {"concurrency": concurrency}
    for name, times in (("first byte", first), ("last byte", last)):
        for label, q in (("p50", 49), ("p99", 98)):
            d, r = (statistics.quantiles(times[url], n=100)[q] for url in (direct, relayed))
            result |= {f"{name} {label} direct": d, f"{name} {label} added": r - d}
    return result


if __name__ == "__main__":
    main()
