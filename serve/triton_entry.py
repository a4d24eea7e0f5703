"""The embedded engine as a model of Triton's Python backend.

    Triton ──execute──▶ engine thread ──queue──▶ sender thread ──response senders──▶ Triton

`execute` reads and checks requests and returns. The engine must not wait for Triton's shared
memory, so a separate thread sends: all that is queued for a request at that moment is one response.
The same thread checks 20 times a second whether Triton's client has cancelled a request. Every
request gets exactly one final response, whatever happens.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from octet.errors import BackendError, BackendUnavailable, ConfigError, OctetError, RequestError
from serve.backends.embedded import Loaded, load_export
from serve.engine.engine import Delivery, Engine, Generation
from serve.engine.request import Event, Finished
from serve.engine.tokenizer import Tokenizer
from serve.runner.protocol import Runner
from serve.triton_messages import EntryRequest, outputs, read_request

__all__ = ["TritonEntry"]

POLL_S = 0.05
DRAIN_S = 30.0  # Triton unloads a model after its requests are done; this is for any that are not

log = logging.getLogger(__name__)


class TritonEntry:
    """Implements a `TritonPythonModel`; `pb_utils` is triton_python_backend_utils."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer, pb_utils: Any, *, slots: int | None = None
    ) -> None:
        self._pb_utils = pb_utils
        # Deliveries of the engine; [] wakes the sender up, None ends it.
        self._queue: SimpleQueue[list[Delivery] | None] = SimpleQueue()
        engine = Engine(runner, self._queue.put, slots=slots)
        self._loaded = Loaded(engine, tokenizer, runner.spec)
        # Requests without a final response; code that removes one sends its final response.
        self._live: dict[Generation, _Answer] = {}
        self._sender = threading.Thread(target=self._send, name="octet-sender", daemon=True)
        engine.start()
        self._sender.start()

    @classmethod
    def load(cls, args: Mapping[str, str], pb_utils: Any) -> Self:
        """Loads the model from the arguments of `initialize`.

        The version's directory contains `engine`, which runs on the GPU of this instance, or
        `onnx`. Raises ArtifactError for anything but an unaltered export, UnsupportedError for an
        engine that is not for this machine, and ConfigError for invalid parameters `slots` and
        `threads` of config.pbtxt.
        """
        version = Path(args["model_repository"]) / args["model_version"]
        parameters = json.loads(args["model_config"]).get("parameters", {})
        slots = _whole_number(parameters, "slots", default=0, least=1) or None
        threads = _whole_number(parameters, "threads", default=0, least=0)
        export = version / "engine" if (version / "engine").is_dir() else version / "onnx"
        device = int(args.get("model_instance_device_id", "0"))
        runner, tokenizer = load_export(export, threads, device)
        return cls(runner, tokenizer, pb_utils, slots=slots)

    def execute(self, requests: Sequence[Any]) -> None:
        """Starts `requests`; their answers come later, through their response senders."""
        for request in requests:
            answer = _Answer(request.get_response_sender(), self._pb_utils)
            try:
                self._start(request, answer)
            except Exception as error:
                answer.fail(error)

    def close(self) -> None:
        """Lets running requests finish for up to DRAIN_S, fails the rest, and stops."""
        self._loaded.engine.close(drain_s=DRAIN_S)
        self._queue.put(None)
        self._sender.join()

    def _start(self, request: Any, answer: "_Answer") -> None:
        received = read_request(request, self._pb_utils)
        prompt = received.request.prompt
        tokenizer = self._loaded.tokenizer
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        generation = self._loaded.checked(received.request, ids)
        prefix = ""
        if received.with_prompt:
            prefix = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        answer.begin(received, len(ids), prefix)
        self._live[generation] = answer  # the engine may be faster than the next line
        try:
            self._loaded.engine.submit(generation)
        except BackendUnavailable as error:
            self._end(generation, error)
        self._queue.put([])

    def _send(self) -> None:
        next_poll = 0.0
        stopping = False
        while not stopping:
            deliveries, stopping = self._take(next_poll - time.monotonic())
            outcomes: dict[Generation, list[list[Event] | BackendError]] = {}
            for generation, outcome in deliveries:
                outcomes.setdefault(generation, []).append(outcome)
            for generation, of_request in outcomes.items():
                self._deliver(generation, of_request)
            if time.monotonic() >= next_poll:
                self._drop_cancelled()
                next_poll = time.monotonic() + POLL_S

    def _take(self, timeout_s: float) -> tuple[list[Delivery], bool]:
        """Takes all that is queued; returns it, and whether to stop.

        With live requests it waits at most `timeout_s`, so that they are checked for cancellation;
        without any it waits until something is queued.
        """
        try:
            items = [self._queue.get(timeout=max(timeout_s, 0) if self._live else None)]
        except Empty:
            return [], False
        while not self._queue.empty():
            items.append(self._queue.get())
        return [delivery for item in items for delivery in item or ()], None in items

    def _deliver(self, generation: Generation, outcomes: list[list[Event] | BackendError]) -> None:
        answer = self._live.get(generation)
        if answer is None:  # cancelled meanwhile
            return
        try:
            for outcome in outcomes:
                if isinstance(outcome, BackendError):
                    raise outcome
                answer.events += outcome
            ended = answer.send()
        except Exception as error:
            self._end(generation, error)
        else:
            if ended:
                self._live.pop(generation)

    def _drop_cancelled(self) -> None:
        for generation, answer in list(self._live.items()):
            try:
                if answer.cancelled:
                    self._end(generation, None)
            except Exception as error:
                self._end(generation, error)

    def _end(self, generation: Generation, error: Exception | None) -> None:
        """Ends a request with `error`, or as cancelled; does nothing if it has ended already."""
        self._loaded.engine.cancel(generation)
        answer = self._live.pop(generation, None)
        if answer is not None:
            answer.fail(error)


class _Answer:
    """The response sender of one request, and its events that are not sent yet."""

    def __init__(self, sender: Any, pb_utils: Any) -> None:
        self._sender = sender
        self._pb_utils = pb_utils
        self._received: EntryRequest | None = None
        self.events: list[Event] = []

    def begin(self, received: EntryRequest, prompt_tokens: int, prefix: str) -> None:
        self._received = received
        self._prompt_tokens = prompt_tokens
        self._prefix = prefix

    @property
    def cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def send(self) -> bool:
        """Sends `events`; if not streamed, only with the last. Returns whether the answer ended."""
        assert self._received is not None
        ended = bool(self.events) and isinstance(self.events[-1], Finished)
        if not ended and not self._received.stream:
            return False
        pb_utils = self._pb_utils
        tensors = outputs(self._received, self._prompt_tokens, self.events, self._prefix)
        self.events.clear()
        response = pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in tensors.items()]
        )
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if ended else 0
        self._sender.send(response, flags=final)
        return ended

    def fail(self, error: Exception | None) -> None:
        """Ends the request with `error`, or as cancelled by its client."""
        pb_utils = self._pb_utils
        response = pb_utils.InferenceResponse(error=_triton_error(error, pb_utils))
        try:
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception:  # there is no other way to report it to the client
            log.exception("a final response could not be sent")


def _triton_error(error: Exception | None, pb_utils: Any) -> Any:
    """Makes Triton's error. A refusal is JSON with the field at fault, which the gateway reads."""
    kinds = pb_utils.TritonError
    if error is None:
        return kinds("the request was cancelled", kinds.CANCELLED)
    if isinstance(error, RequestError):
        refusal = {"message": str(error), "param": error.param, "code": error.code}
        return kinds(json.dumps(refusal), kinds.INVALID_ARG)
    if isinstance(error, BackendUnavailable):
        return kinds(str(error), kinds.UNAVAILABLE)
    if isinstance(error, OctetError):
        return kinds(str(error), kinds.INTERNAL)
    log.error("a request failed", exc_info=error)
    return kinds("internal error; see Triton's log", kinds.INTERNAL)


def _whole_number(
    parameters: Mapping[str, Mapping[str, str]], name: str, *, default: int, least: int
) -> int:
    text = parameters.get(name, {}).get("string_value")
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"config.pbtxt: parameter '{name}' should be a whole number of at least {least},"
            f" got '{text}'"
        )
    return int(text)
