"""The embedded engine: one thread, one loop, continuous batching over the slots of a cache.

Each iteration of the loop
  1. drops cancelled requests and gives free slots to waiting ones, first come first served;
  2. prefills at most `CHUNK` prompt tokens, so that a long prompt delays the running answers by at
     most one chunk per iteration;
  3. decodes one token for every request whose prefill is done, all in one batch.

Each prompt is prefilled by itself, in chunks whose borders depend only on its own length, and a
runner's rows are independent of each other. So an answer is the same, bit for bit, whichever other
requests run at the same time.

A `Generation` is one running request: its prompt, its output so far, and when it ends. `Pace`
measures how fast the engine finishes requests; `Retry-After` is computed from it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from octet.errors import BackendError, BackendUnavailable
from serve.engine.request import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from serve.engine.sampler import Sampling, log_softmax, sample, top_logprobs
from serve.engine.tokenizer import StopChecker, Tokenizer
from serve.runner.protocol import CHUNK, Runner, RunnerLost, StepBatch

__all__ = ["Delivery", "Engine", "EngineStats", "Generation", "Pace"]


class Generation:
    """The state of one request in the engine; used only by the engine's thread.

    `cancelled` is the exception: any thread may set it, and the engine drops the request at its
    next step.
    """

    def __init__(
        self,
        request: GenerateRequest,
        prompt: Sequence[int],
        *,
        context: int,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
    ) -> None:
        free = context - len(prompt)
        assert prompt and free >= (0 if request.max_tokens == 0 else 1)
        self.request = request
        self.prompt = np.array(prompt, np.int64)
        self.limit = free if request.max_tokens is None else min(request.max_tokens, free)
        self.sampling = Sampling.of(request)
        self.cancelled = False
        self.finished = False
        self.slot = -1
        self.read = 0  # prompt tokens that were prefilled
        self.last_token = -1
        self._produced = 0
        self._tokenizer = tokenizer
        self._stop_tokens = set(request.stop_token_ids)
        self._eos_tokens = set() if request.ignore_eos else set(eos_token_ids)
        # A scored prompt goes through the detokenizer itself; any other is only its context.
        context_ids = () if self.scores_prompt else prompt
        self._detokenizer = tokenizer.detokenizer(context_ids)
        self._stops = StopChecker(request.stop)
        self._characters = 0  # of the answer so far, including those held back
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._prompt_offsets: list[int] = []
        if self.scores_prompt and isinstance(request.prompt, str):
            # The echo is the text as sent: it contains only the special tokens spelled out in it.
            self._prompt_offsets = tokenizer.offsets(request.prompt)

    @property
    def scores_prompt(self) -> bool:
        """True if the logits of every prompt position are needed."""
        return self.request.echo and self.request.logprobs is not None

    def add_prompt_logits(self, logits: NDArray[np.float32]) -> None:
        """Scores the prompt tokens that follow a chunk's positions.

        `logits` float32 [T, V] are those of the chunk. Call before `read` advances over the chunk.
        """
        logprobs = log_softmax(logits)
        if self.read == 0:
            self._prompt_logprobs.append(self._position(int(self.prompt[0]), None))
        following = self.prompt[self.read + 1 : self.read + 1 + len(logits)]
        for token, row in zip(following.tolist(), logprobs, strict=False):
            self._prompt_logprobs.append(self._position(token, row))

    def echo(self) -> list[Event]:
        """Returns the prompt as the first event if the request wants it, else no event."""
        if not self.request.echo:
            return []
        prompt = self.request.prompt
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
        if self.scores_prompt:
            logprobs = tuple(self._prompt_logprobs)
            self._prompt_logprobs.clear()
            if self._prompt_offsets:
                self._characters = len(text)
            return [Delta(text, tuple(self.prompt.tolist()), logprobs)]
        self._characters = len(text)
        return [Delta(text, tuple(self.prompt.tolist()))]

    def end_at_prompt(self) -> list[Event]:
        """Returns the last event of an answer that is the prompt alone."""
        self.finished = True
        return [Finished("length", Usage(len(self.prompt), 0))]

    def accept(self, token: int, logits: NDArray[np.float32]) -> list[Event]:
        """Takes the next token, drawn from `logits` float32 [V]; returns the client's events.

        Sets `finished` if it was the last. Raises BackendError for the token -1: non-finite logits.
        """
        if token < 0:
            raise BackendError("the model's logits are not finite; this request cannot go on")
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = (self._position(token, log_softmax(logits), pushed=False),)
        self._produced += 1
        self.last_token = token
        text, reason, stop = self._advance(token)
        events: list[Event] = [Delta(text, (token,), logprobs)]
        if reason is not None:
            self.finished = True
            usage = Usage(len(self.prompt), self._produced)
            events.append(Finished(reason, usage, stop))
        return events

    def _advance(self, token: int) -> tuple[str, FinishReason | None, str | int | None]:
        """Returns the text to show; if the answer ends here, also the reason and the stop found."""
        if token in self._stop_tokens or token in self._eos_tokens:
            stop = token if token in self._stop_tokens else None
            rest, found = self._stops.push(self._detokenizer.flush())
            return rest + self._stops.flush(), "stop", found or stop
        piece = self._detokenizer.push(token)
        self._characters += len(piece)
        text, found = self._stops.push(piece)
        if found is not None:
            return text, "stop", found
        if self._produced < self.limit:
            return text, None, None
        rest, found = self._stops.push(self._detokenizer.flush())
        text += rest
        if found is not None:
            return text, "stop", found
        return text + self._stops.flush(), "length", None

    def _position(
        self, token: int, logprobs: NDArray[np.float64] | None, *, pushed: bool = True
    ) -> PositionLogprobs:
        """Returns `token` with its log-probability and the most likely tokens at this position.

        `logprobs` is float64 [V], or None for the first token of a prompt. `pushed` also runs the
        token through the detokenizer, as a token of the prompt.
        """
        offset = self._characters
        if pushed and self._prompt_offsets:
            offset = self._prompt_offsets[len(self._prompt_logprobs)]
        if pushed:
            self._characters += len(self._detokenizer.push(token))
        if logprobs is None:
            return PositionLogprobs(self._token(token, None), (), offset)
        top = top_logprobs(logprobs, self.request.logprobs or 0)
        return PositionLogprobs(
            self._token(token, float(logprobs[token])),
            tuple(self._token(other, float(logprobs[other])) for other in top),
            offset,
        )

    def _token(self, token: int, logprob: float | None) -> TokenLogprob:
        spelled = self._tokenizer.token_bytes(token)
        return TokenLogprob(token, spelled.decode(errors="replace"), spelled, logprob)


_WEIGHT = 0.1  # weight of the newest interval in the exponential moving average
LEAST_S, MOST_S = 1.0, 60.0


class Pace:
    """Moving average of the time between the ends of two requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._interval_s: float | None = None

    def ended(self, *, busy: bool) -> None:
        """Records that a request ended; `busy` if others are left, so idle time is not counted."""
        now = self._clock()
        if self._last is not None:
            taken = now - self._last
            before = taken if self._interval_s is None else self._interval_s
            self._interval_s = before + _WEIGHT * (taken - before)
        self._last = now if busy else None

    def until_half(self, waiting: int) -> float:
        """Estimates the seconds until half of `waiting` requests have run (LEAST_S to MOST_S)."""
        interval_s = self._interval_s or 0.0
        return min(max(interval_s * waiting / 2, LEAST_S), MOST_S)


log = logging.getLogger(__name__)

# The outcome of one step for a request: events in order, or the error that ended it.
Delivery: TypeAlias = tuple[Generation, list[Event] | BackendError]

# Bounds the logits of a scored prompt: 2^22 float32 values are 16 MiB per chunk.
_SCORED_LOGITS = 1 << 22


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of the engine at one moment; tokens and steps are counted since its start."""

    waiting: int
    running: int
    slots: int
    cached_tokens: int  # of all running requests
    cache_bytes: int
    prompt_tokens: int
    generated_tokens: int
    steps: int


class Engine:
    """Runs generations to completion; `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        deliver: Callable[[list[Delivery]], None],
        *,
        slots: int | None = None,
        context: int | None = None,
        max_waiting: int = 1024,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`deliver` is called from the engine's thread and must not block.

        `slots` requests are decoded together (default: the runner's). `context` limits prompt and
        answer together (default: the model's). `on_stop` is called from the engine's thread when it
        ends, for whatever reason. Raises ConfigError for impossible sizes.
        """
        self.context = context or runner.spec.max_positions
        self.cache = runner.new_cache(slots or runner.slots, self.context)
        self._runner = runner
        self._deliver = deliver
        self._on_stop = on_stop
        self._scored_chunk = max(1, min(CHUNK, _SCORED_LOGITS // runner.spec.vocab_size))
        self._max_waiting = max_waiting
        self._waiting: deque[Generation] = deque()
        self._reading: deque[Generation] = deque()
        self._decoding: list[Generation] = []
        self._pace = Pace()
        self._wake = threading.Condition()
        self._accepting = False
        self._draining = False  # the loop ends once nothing is left to do
        self._stopping = False  # the loop ends at once
        self._lost: RunnerLost | None = None
        self._prompt_tokens = self._generated_tokens = self._steps = 0
        self._thread = threading.Thread(target=self._run, name="octet-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """True if a generation submitted now would be run."""
        return self._accepting and self._thread.is_alive()

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._waiting),
            running=len(self._reading) + len(self._decoding),
            slots=self.cache.slots,
            cached_tokens=int(self.cache.lengths.sum()),
            cache_bytes=self.cache.size_bytes,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
        )

    def start(self) -> None:
        self._accepting = True
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Queues `generation`. Raises BackendUnavailable if too many wait, or after `close`."""
        with self._wake:
            if not self.alive:
                raise BackendUnavailable("the embedded engine is not running", kind="dead")
            if len(self._waiting) >= self._max_waiting:
                raise BackendUnavailable(
                    f"{self._max_waiting} requests are waiting for the embedded engine;"
                    " try again later",
                    kind="overloaded",
                    retry_after_s=self._pace.until_half(self._max_waiting),
                )
            self._waiting.append(generation)
            self._wake.notify()

    def cancel(self, generation: Generation) -> None:
        """Ends `generation`: its slot is freed at the next step, and no event follows."""
        generation.cancelled = True

    def close(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets running ones go on up to `drain_s`, fails the rest, stops."""
        with self._wake:
            self._accepting = False
            self._draining = True
            self._wake.notify()
        if self._thread.is_alive():
            # Only the loop knows when nothing is left: while it moves a request from one queue to
            # another, the request is in neither.
            self._thread.join(drain_s)
            with self._wake:
                self._stopping = True
                self._wake.notify()
            self._thread.join()

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._reading or self._decoding)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._drop_cancelled()
                self._admit()
                self._read_prompts()
                self._decode()
                if self._lost is not None:
                    log.error("the embedded engine stops: %s", self._lost)
                    self._fail_everything(self._lost)
                    return
            self._fail_everything(BackendError("the embedded engine was stopped", kind="lost"))
        except Exception:  # a defect of Octet: no request may wait for an answer that will not come
            log.exception("the embedded engine failed")
            failure = BackendError("the embedded engine failed; see the server's log", kind="dead")
            self._fail_everything(failure)
        finally:
            self._on_stop()

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._busy or self._draining or self._stopping):
                self._wake.wait()
        return self._busy and not self._stopping

    def _drop_cancelled(self) -> None:
        with self._wake:
            if any(g.cancelled for g in self._waiting):
                self._waiting = deque(g for g in self._waiting if not g.cancelled)
        for generation in [*self._reading, *self._decoding]:
            if generation.cancelled:
                self._retire(generation)

    def _admit(self) -> None:
        with self._wake:
            while self._waiting and (slot := self.cache.acquire()) is not None:
                generation = self._waiting.popleft()
                generation.slot = slot
                self._reading.append(generation)

    def _read_prompts(self) -> None:
        budget = CHUNK
        while self._reading and budget > 0:
            generation = self._reading[0]
            before = generation.read
            try:
                delivery: Delivery = (generation, self._read_chunk(generation))
            except Exception as error:
                delivery = (generation, self._failure(error))
            budget -= max(generation.read - before, 1)
            if isinstance(delivery[1], BackendError) or generation.finished:
                self._retire(generation)
            elif generation.read == len(generation.prompt):
                self._decoding.append(self._reading.popleft())
            if delivery[1]:
                self._deliver([delivery])

    def _read_chunk(self, generation: Generation) -> list[Event]:
        """Prefills one chunk; returns events only after the last chunk, with the first token."""
        size = self._scored_chunk if generation.scores_prompt else CHUNK
        tokens = generation.prompt[generation.read : generation.read + size]
        scored = np.arange(len(tokens)) if generation.scores_prompt else [len(tokens) - 1]
        step = StepBatch(tokens[None], [generation.slot], np.array([scored], np.int64))
        logits = self._runner.forward(step, self.cache)[0]  # [L, V]
        if generation.scores_prompt:
            generation.add_prompt_logits(logits)
        generation.read += len(tokens)
        self._steps += 1
        self._prompt_tokens += len(tokens)
        if generation.read < len(generation.prompt):
            return []
        if generation.limit == 0:
            return generation.echo() + generation.end_at_prompt()
        token = int(sample(logits[-1:], [generation.sampling])[0])
        self._generated_tokens += 1
        return generation.echo() + generation.accept(token, logits[-1])

    def _decode(self) -> None:
        batch = self._decoding
        if not batch:
            return
        tokens = np.array([[g.last_token] for g in batch], np.int64)
        step = StepBatch(tokens, [g.slot for g in batch], np.zeros((len(batch), 1), np.int64))
        try:
            logits = self._runner.forward(step, self.cache)[:, 0]  # [B, V]
            drawn = sample(logits, [g.sampling for g in batch]).tolist()
        except Exception as error:
            failure = self._failure(error)
            for generation in batch[:]:
                self._retire(generation)
            self._deliver([(generation, failure) for generation in batch])
            return
        self._steps += 1
        self._generated_tokens += len(batch)
        deliveries: list[Delivery] = []
        for generation, token, row in zip(batch, drawn, logits, strict=True):
            try:
                deliveries.append((generation, generation.accept(token, row)))
            except Exception as error:
                deliveries.append((generation, self._failure(error)))
        for generation, outcome in deliveries:
            if generation.finished or isinstance(outcome, BackendError):
                self._retire(generation)
        self._deliver(deliveries)

    def _retire(self, generation: Generation) -> None:
        """Removes a generation from the loop and frees its slot."""
        if generation in self._reading:
            self._reading.remove(generation)
        self._decoding = [g for g in self._decoding if g is not generation]
        self.cache.release(generation.slot)
        self._pace.ended(busy=self._busy)

    def _fail_everything(self, error: BackendError) -> None:
        with self._wake:
            self._accepting = False
            waiting, self._waiting = list(self._waiting), deque()
        running = [*self._reading, *self._decoding]
        for generation in running:
            self._retire(generation)
        if running or waiting:
            self._deliver([(generation, error) for generation in [*running, *waiting]])

    def _failure(self, error: Exception) -> BackendError:
        """Returns the error for the affected requests; logs it in full unless a BackendError."""
        if isinstance(error, RunnerLost):
            self._lost = error
        if isinstance(error, BackendError):
            return error
        log.error("a step of the embedded engine failed", exc_info=error)
        return BackendError(f"the embedded engine failed at this request: {error!r}")
