"""One running request: its prompt, its output so far, and when it ends.

`Pace` measures how fast an engine finishes requests; `Retry-After` is computed from it.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octet.errors import BackendError
from serve.engine.detokenizer import StopChecker
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
from serve.engine.sampler import Sampling, log_softmax, top_logprobs
from serve.engine.tokenizer import Tokenizer

__all__ = ["Generation", "Pace"]


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
        assert 0 < len(prompt) < context
        room = context - len(prompt)
        self.request = request
        self.prompt = np.array(prompt, np.int64)
        self.limit = min(request.max_tokens or room, room)
        self.sampling = Sampling.of(request)
        self.cancelled = False
        self.finished = False
        self.slot = -1
        self.read = 0  # prompt tokens that the cache holds
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


_WEIGHT = 0.1  # of the newest interval in the exponential moving average
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
