"""A server that tells how likely a prompt's tokens are, as vLLM or Octet write it; or misbehaves.

Its model is a table: the logits after a token are drawn with the token as the seed.
"""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from verify.evaluation.target import Answer, top_k

VOCABULARY = 64

Answering = Callable[[dict[str, Any]], tuple[int, Any]]


def logprobs_after(token: int) -> np.ndarray:
    logits = 2 * np.random.default_rng(token).normal(size=VOCABULARY)
    return logits - np.log(np.exp(logits).sum())


def truth(ids: tuple[int, ...], k: int) -> Answer:
    rows = np.stack([logprobs_after(token) for token in ids[:-1]])
    chosen = rows[np.arange(len(rows)), ids[1:]].astype(np.float32)
    return Answer(chosen, *top_k(rows, k))


def positions(ids: list[int], k: int) -> list[dict[int, float]]:
    """The k most likely tokens at each position, and the one that came."""
    found = []
    for before, token in itertools.pairwise(ids):
        row = logprobs_after(before)
        listed = [int(other) for other in np.argsort(-row)[:k]]
        found.append({other: float(row[other]) for other in dict.fromkeys([*listed, token])})
    return found


def as_vllm(body: dict[str, Any]) -> tuple[int, Any]:
    if "prompt_logprobs" not in body:
        return 400, {"error": {"message": "not asked for"}}
    listed = [
        {str(t): {"logprob": p, "rank": 0, "decoded_token": "x"} for t, p in position.items()}
        for position in positions(body["prompt"], body["prompt_logprobs"])
    ]
    return 200, {"choices": [{"text": "", "prompt_logprobs": [None, *listed]}]}


def as_octet(body: dict[str, Any]) -> tuple[int, Any]:
    """Knows `echo` alone, and refuses what it does not know."""
    if "prompt_logprobs" in body:
        return 400, {"error": {"message": "unknown field prompt_logprobs"}}
    assert body["echo"] and body["return_tokens_as_token_ids"]
    found = positions(body["prompt"], body["logprobs"])
    tokens = [f"token_id:{token}" for token in [*body["prompt"], 0]]
    named = [{f"token_id:{t}": p for t, p in position.items()} for position in found]
    after = {"token_id:0": -1.0}
    values = [None, *[0.0] * len(found), -1.0]
    logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": [None, *named, after]}
    return 200, {"choices": [{"text": "", "logprobs": logprobs}]}


def as_tokens(body: dict[str, Any]) -> tuple[int, Any]:
    """vLLM's /tokenize: a token a character."""
    return 200, {"tokens": [ord(character) % VOCABULARY for character in body["prompt"]]}


class PromptServer:
    """`asked` are the bodies of completions; `answering` and `tokenizing` may be changed."""

    def __init__(self, answering: Answering, models: list[dict[str, Any]] | None) -> None:
        self.answering = answering
        self.models = models if models is not None else [{"id": "octet", "max_model_len": 128}]
        self.asked: list[dict[str, Any]] = []
        self.tokenizing: Answering = as_tokens
        self.url = ""


@contextmanager
def running(
    answering: Answering, models: list[dict[str, Any]] | None = None
) -> Iterator[PromptServer]:
    state = PromptServer(answering, models)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            listed = (200, {"data": state.models})
            self._send(*(listed if self.path == "/v1/models" else (404, {})))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/tokenize":
                return self._send(*state.tokenizing(body))
            state.asked.append(body)
            self._send(*state.answering(body))

        def _send(self, status: int, content: Any) -> None:
            if status == 0:  # dies without an answer
                self.close_connection = True
                return
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
