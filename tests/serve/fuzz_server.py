"""The gateway that is fuzzed: an embedded engine, and a server that answers whatever it is asked.

Prints its address. So each 5xx that a client gets is the gateway's own doing.
"""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from aiohttp import web

from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import GatewayConfig, HttpConfig
from serve.gateway import Gateway
from serve.routing import Pool
from serve.server import bind, serve_gateway
from tests.fakes import FakeRunner, fake_backend

CHOICE = b'"choices":[{"index":0,"text":"a","finish_reason":"stop"}]'
ANSWER = b'{"id":"1","object":"x","created":1,"model":"upstream",' + CHOICE + b"}"
EVENTS = b'data: {"id":"1","model":"upstream",' + CHOICE + b"}\n\ndata: [DONE]\n\n"


async def upstream(request: web.Request) -> web.Response:
    body = await request.read()
    if b'"stream": true' in body or b'"stream":true' in body:
        return web.Response(body=EVENTS, content_type="text/event-stream")
    return web.Response(body=ANSWER, content_type="application/json")


async def main() -> None:
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", upstream)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def pool(url: str) -> dict[str, object]:
        return {"backends": [{"type": "vllm", "url": url}]}

    config = GatewayConfig.model_validate(
        {
            "models": {
                "fake": {"pool": pool("http://replaced"), "aliases": ["alias"]},
                "relayed": {"pool": pool(url)},
            },
            "drain_timeout_s": 5,
        }
    )
    relayed = OpenAiHttpBackend("relayed", HttpConfig(type="vllm", url=url, model="upstream"))
    pools = {
        "fake": Pool.of("fake", [fake_backend(FakeRunner(context=64))]),
        "relayed": Pool.of("relayed", [relayed]),
    }
    with bind("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()[:2]
        await serve_gateway(
            Gateway(config, pools),
            listener,
            on_started=lambda _server: print(host, port, flush=True),
        )
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
