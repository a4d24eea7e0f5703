"""The least that a gateway in Python can do: FastAPI takes a request, aiohttp passes it on.

No key, no check, no metric, no choice of a backend: the yardstick for what Octet adds.

    python benchmarks/gateway_bare.py UPSTREAM_URL PORT
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

UPSTREAM = sys.argv[1] + "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        app.state.session = session
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/v1/chat/completions")
async def relay(request: Request) -> Response:
    session = app.state.session
    upstream = await session.post(UPSTREAM, data=await request.body(), headers=JSON)
    if upstream.content_type == "text/event-stream":
        return StreamingResponse(
            upstream.content.iter_any(), upstream.status, media_type=upstream.content_type
        )
    return Response(await upstream.read(), upstream.status, media_type=upstream.content_type)


if __name__ == "__main__":
    uvicorn.run(
        app, port=int(sys.argv[2]), loop="uvloop", http="httptools", log_level="warning", ws="none"
    )
