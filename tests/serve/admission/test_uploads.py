"""Bodies that arrive together stay within the memory of the process, and most get through."""

import asyncio
import io
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from octet.errors import RequestError
from serve.admission.admission import Admission
from serve.admission.memory import DECODED, Memory
from tests.serve.admission.test_memory import write
from tests.serve.process import octet_serve
from tests.serve.upstreams import JSON_HEAD, scripted, send, whole

MB = 1024 * 1024
UPLOADS, SIZE, ROOM = 40, 15 * MB, 250 * MB  # 600 MB of bodies, of which each is decoded


def figure(pid: int, name: str) -> int:
    """A figure of the process's memory, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@asynccontextmanager
async def gateway(config: Path, text: str) -> AsyncIterator[tuple[int, aiohttp.ClientSession]]:
    """`octet serve` with this configuration: its process id, and a session to talk to it."""
    config.write_text(text)
    with octet_serve(config) as process:
        assert process.stderr is not None
        line = "started"
        while "serving" not in line:
            line = await asyncio.to_thread(process.stderr.readline)
            assert line, "it ended"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(line.split()[-1], connector=connector) as session:
            yield process.pid, session


async def upload(session: aiohttp.ClientSession, body: bytes) -> int:
    headers = {"content-type": "application/json"}
    async with session.post("/v1/completions", data=io.BytesIO(body), headers=headers) as response:
        answer = await response.json()
        if response.status == 503:
            assert "short of memory" in answer["error"]["message"]
            assert int(response.headers["retry-after"]) >= 1
        return response.status


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_uploads_at_once_stay_within_the_limit(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "prompt": "x" * SIZE}).encode()
    config = tmp_path / "octet.yaml"
    async with scripted(send(JSON_HEAD, whole())) as upstream:
        backend = f"{{type: vllm, url: '{upstream.url}'}}"
        text = f"models: {{m: {{pool: {{backends: [{backend}], proof: {{enabled: false}}}}}}}}\n"
        async with gateway(config, text) as (pid, _):
            limit = figure(pid, "VmRSS") + ROOM
        text += f"limits: {{max_memory_bytes: {limit}}}\n"
        async with gateway(config, text) as (pid, session):
            statuses = Counter(
                await asyncio.gather(*(upload(session, body) for _ in range(UPLOADS)))
            )
            assert set(statuses) == {200, 503}
            assert figure(pid, "VmHWM") < limit + 3 * SIZE
            assert await upload(session, b'{"model": "m", "prompt": "x"}') == 200


async def test_a_body_counts_until_it_is_decoded(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/statm": "0 0 0 0 0 0 0\n"})
    memory = Memory(100, root=tmp_path)
    admission = Admission(memory=memory)
    most = 100 // DECODED
    with admission.upload() as alone:
        alone(2 * most)  # nothing else is in flight
        with pytest.raises(RequestError, match="short of memory"), admission.upload():
            pass
    assert memory.arriving == 0
    with admission.upload() as first, admission.upload() as second:
        first(most - 10)
        second(9)
        with pytest.raises(RequestError, match="short of memory"):
            second(1)
    assert memory.arriving == 0 and admission.rejections["", "memory"] == 2
