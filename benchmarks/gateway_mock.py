"""The upstream of the gateway benchmarks: a server that answers at once with canned bytes.

It speaks as much of vLLM's HTTP API as gateways ask for: /v1/chat/completions, /v1/models,
/health, /metrics, /load. A streamed answer has 16 events; each is written by itself, in a turn of
the event loop of its own, or `--gap-ms` after the one before. Usage is sent where it is asked for.

    python benchmarks/gateway_mock.py --core 0 [--ports 2] [--gap-ms G]

prints its ports and answers until it is killed.
"""

import argparse
import asyncio
import json
import os
from typing import Any, cast

import httptools
import uvloop

__all__ = ["ANSWER", "CHUNKS", "MODEL"]

MODEL = "m"
CHUNKS = 16
WORDS = [f"word{i:02d} " for i in range(CHUNKS)]
ANSWER = "".join(WORDS).encode()
USAGE = {"prompt_tokens": 256, "completion_tokens": CHUNKS, "total_tokens": 256 + CHUNKS}
METRICS = f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.1
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",num_gpu_blocks="100000"}} 1.0
"""
CARD = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 131072}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core", type=int)
    parser.add_argument("--ports", type=int, default=2, help="how many to listen on")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="between events of a stream")
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    uvloop.run(serve(options.ports, options.gap_ms / 1e3))


async def serve(ports: int, gap_s: float) -> None:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: Upstream(loop, gap_s), "127.0.0.1", 0, backlog=4096)
        for _ in range(ports)
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


def response(body: bytes, kind: str = "application/json", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def event(**fields: Any) -> bytes:
    """One server-sent event, framed as a chunk of the body."""
    head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    data = b"data: " + json.dumps(head | fields, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def delta(i: int) -> bytes:
    choice = {
        "index": 0,
        "delta": {"content": WORDS[i]} | ({"role": "assistant"} if i == 0 else {}),
        "logprobs": None,
        "finish_reason": "stop" if i == CHUNKS - 1 else None,
    }
    return event(choices=[choice])


COMPLETION = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER.decode()},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": USAGE,
}
UNARY = response(json.dumps(COMPLETION).encode())
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
EVENTS = [delta(i) for i in range(CHUNKS)]
STREAM_USAGE = event(choices=[], usage=USAGE)
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
PAGES = {
    b"/v1/models": response(json.dumps({"object": "list", "data": [CARD]}).encode()),
    b"/health": response(b""),
    b"/load": response(b'{"server_load":0}'),
    b"/metrics": response(METRICS.encode(), "text/plain; version=0.0.4; charset=utf-8"),
    b"/version": response(b'{"version":"0.24.0"}'),
}
NOT_FOUND = response(b'{"error":{"message":"no such path"}}', status="404 Not Found")


class Upstream(asyncio.Protocol):
    """One connection; requests on it come one after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gap_s: float) -> None:
        self.loop = loop
        self.gap_s = gap_s
        self.body = b""
        self.path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has no such base class
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body = self.path = b""

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.path != b"/v1/chat/completions":
            self.transport.write(PAGES.get(self.path, NOT_FOUND))
        elif b'"stream":true' in self.body or b'"stream": true' in self.body:
            self.transport.write(STREAM_HEAD)
            self.write_event(0, b"include_usage" in self.body)
        else:
            self.transport.write(UNARY)

    def write_event(self, i: int, usage: bool) -> None:
        """The event at `i`, and later those after it; the end comes with the last."""
        if self.transport.is_closing():
            return
        if i == CHUNKS - 1:
            tail = STREAM_USAGE if usage else b""
            self.transport.write(EVENTS[i] + tail + STREAM_END)
            return
        self.transport.write(EVENTS[i])
        if self.gap_s:
            self.loop.call_later(self.gap_s, self.write_event, i + 1, usage)
        else:
            self.loop.call_soon(self.write_event, i + 1, usage)


if __name__ == "__main__":
    main()
