"""The gateway that is fuzzed: an embedded engine, and a server that answers whatever it is asked.

Prints its address. So each 5xx that a client gets is the gateway's own doing.
"""

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from aiohttp import web

from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import GatewayConfig, HttpConfig
from serve.gateway.state import Gateway
from serve.routing import Pool
from serve.run import bind, serve_gateway
from tests.fakes import FakeRunner, fake_backend

CHOICE = {"index": 0, "text": "a", "finish_reason": "stop"}
MESSAGE = {"role": "assistant", "content": "a"}
ANSWERS = {
    "/v1/completions": {"object": "text_completion", "choices": [CHOICE]},
    "/v1/chat/completions": {
        "object": "chat.completion",
        "choices": [CHOICE | {"message": MESSAGE}],
    },
    "/v1/embeddings": {
        "object": "list",
        "data": [{"index": 0, "object": "embedding", "embedding": [0.5]}],
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    },
    "/tokenize": {"count": 1, "max_model_len": 9, "tokens": [1], "token_strs": None},
    "/detokenize": {"prompt": "a"},
}


async def upstream(request: web.Request) -> web.Response:
    body = await request.read()
    answer = {"id": "1", "created": 1, "model": "upstream"} | ANSWERS.get(request.path, {})
    text = json.dumps(answer)
    if "choices" in answer and (b'"stream": true' in body or b'"stream":true' in body):
        events = f"data: {text}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")
    return web.Response(text=text, content_type="application/json")


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
