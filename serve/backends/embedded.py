"""The engine in this process as a backend: tokenizes, submits, and streams the engine's events."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from octet.artifacts.live import Counting
from octet.errors import BackendError, BackendUnavailable, RequestError
from octet.model.spec import ModelSpec
from serve.backends.base import Incarnation, LoadReport, generate_one_token, sooner_or_later
from serve.config import EmbeddedConfig
from serve.engine.engine import Delivery, Engine, EngineStats, Generation
from serve.engine.load import load_runner
from serve.engine.request import Event, Finished, GenerateRequest
from serve.engine.tokenizer import Tokenizer, beside
from serve.runner.protocol import Runner

__all__ = ["EmbeddedBackend", "Loaded", "load_export"]


# From the engine to the iterator of one request; the error is what ended the request.
_Stream: TypeAlias = "asyncio.Queue[Event | BackendError]"


class EmbeddedBackend:
    """Serves one ONNX export, or one engine. A `Backend`."""

    accepts_extra = False

    def __init__(
        self,
        path: Path,
        *,
        model: str | None = None,
        slots: int | None = None,
        context: int | None = None,
        threads: int = 0,
        max_waiting: int = 1024,
        count: Counting | None = None,
        load: Callable[[], tuple[Runner, Tokenizer]] | None = None,
    ) -> None:
        """`path` is opened by `start`: an ONNX export, an engine, or what `load` opens.

        `model` is the name that it serves (default: the directory's). `slots` requests are decoded
        together (default: 16, or what an engine was built for). `context` limits prompt and answer
        together (default: the model's). `threads` compute one operator on the CPU (0: one per
        core). With `count`, activations of a share of the steps are counted.
        """
        self.name = "embedded"
        self._model = model or path.resolve().name
        self._slots = slots
        self._context = context
        self._max_waiting = max_waiting
        self._load = load or (lambda: load_export(path, threads, count=count))
        self._started: Loaded | None = None
        self._stopped = asyncio.Event()
        self._streams: dict[Generation, _Stream] = {}

    @classmethod
    def from_config(cls, model: str, config: EmbeddedConfig) -> Self:
        return cls(
            config.path,
            model=model,
            slots=config.slots,
            context=config.context,
            threads=config.threads,
            count=None if config.count is None else config.count.options,
        )

    @property
    def models(self) -> tuple[str, ...]:
        return (self._model,)

    @property
    def context_length(self) -> int | None:
        return self._started.engine.context if self._started else self._context

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._started.tokenizer if self._started else None

    @property
    def stats(self) -> EngineStats | None:
        """The engine's counters; None before `start`."""
        return self._started.engine.stats if self._started else None

    async def start(self) -> None:
        """Loads the model. Raises ArtifactError for an incomplete or altered export."""
        runner, tokenizer = await asyncio.to_thread(self._load)
        loop = asyncio.get_running_loop()

        def deliver(deliveries: list[Delivery]) -> None:
            loop.call_soon_threadsafe(self._dispatch, deliveries)

        def stopped() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop may be closed already
                loop.call_soon_threadsafe(self._stopped.set)

        engine = Engine(
            runner,
            deliver,
            slots=self._slots,
            context=self._context,
            max_waiting=self._max_waiting,
            on_stop=stopped,
        )
        engine.start()
        self._started = Loaded(engine, tokenizer, runner.spec)

    async def close(self) -> None:
        if self._started is not None:
            await asyncio.to_thread(self._started.engine.close)

    async def ready(self) -> bool:
        return self._started is not None and self._started.engine.alive

    async def load(self) -> LoadReport | None:
        stats = self.stats
        if stats is None or self.context_length is None:
            return None
        capacity = stats.slots * self.context_length
        return LoadReport(stats.running, stats.waiting, stats.cached_tokens / capacity, capacity)

    async def probe(self) -> None:
        await generate_one_token(self, self._model)

    async def hold(self, reopened: Callable[[], None] = lambda: None) -> None:
        if not await self.ready():
            raise BackendUnavailable(f"{self._model}: the embedded engine is not running")
        await self._stopped.wait()

    async def incarnation(self) -> Incarnation | None:
        """Returns a constant: an engine that has stopped does not restart."""
        return Incarnation((self._model,), started=0.0)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        started = self._require_started()
        started.require_fitting(sum(len(m["content"]) for m in messages), "messages")
        return started.tokenizer.chat_prompt(messages)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        started = self._require_started()
        generation = await started.generation(request)
        stream: _Stream = asyncio.Queue()
        self._streams[generation] = stream
        begun = False
        try:
            started.engine.submit(generation)
            while True:
                event = await stream.get()
                if isinstance(event, BackendError):
                    raise event
                begun = True
                yield event
                if isinstance(event, Finished):
                    return
        except BackendError as error:
            raise sooner_or_later(error, started=begun) from error
        finally:
            del self._streams[generation]
            started.engine.cancel(generation)

    def _require_started(self) -> "Loaded":
        if self._started is None:
            raise BackendUnavailable(f"{self._model}: the embedded engine has not been started")
        return self._started

    def _dispatch(self, deliveries: list[Delivery]) -> None:
        """Hands one step's outcomes to the waiting requests; runs in the event loop."""
        for generation, outcome in deliveries:
            stream = self._streams.get(generation)  # None: cancelled meanwhile
            if stream is not None:
                for event in [outcome] if isinstance(outcome, BackendError) else outcome:
                    stream.put_nowait(event)


@dataclass(frozen=True)
class Loaded:
    """A loaded model: its engine, its tokenizer and its specification."""

    engine: Engine
    tokenizer: Tokenizer
    spec: ModelSpec

    async def generation(self, request: GenerateRequest) -> Generation:
        """Tokenizes and checks `request`. Raises RequestError for one that cannot be run."""
        if request.extra:
            field = min(request.extra)
            raise RequestError(f"{field}: the embedded engine has no such field", param=field)
        return self.checked(request, await self._prompt_ids(request))

    def require_fitting(self, characters: int, param: str) -> None:
        """Raises RequestError for a text too long for the context, however it is tokenized.

        Called before tokenizing: a megabyte of text takes a second, and hundreds of megabytes of
        memory.
        """
        most = self.engine.context * self.tokenizer.longest_token
        if characters > most:
            raise RequestError(
                f"the prompt has {characters} characters; this model's context of"
                f" {self.engine.context} tokens holds {most} at most",
                param=param,
                code="context_length_exceeded",
            )

    def checked(self, request: GenerateRequest, prompt: Sequence[int]) -> Generation:
        """Makes the Generation of `request` with its prompt as token ids.

        Raises RequestError for a request that cannot be run.
        """
        if not prompt:
            raise RequestError("the prompt is empty: it has no token", param="prompt")
        least = 0 if request.max_tokens == 0 else 1
        if len(prompt) + least > self.engine.context:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; this model's context of"
                f" {self.engine.context} must hold it{' and at least one more' * least}",
                param="prompt",
                code="context_length_exceeded",
            )
        wrong = next((t for t in prompt if not 0 <= t < self.spec.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"the prompt has token id {wrong}; this model's are 0 to"
                f" {self.spec.vocab_size - 1}",
                param="prompt",
            )
        if request.max_tokens is not None and request.max_tokens > self.engine.context:
            # As in vLLM: a max_tokens beyond what the prompt leaves of the context is clipped;
            # one beyond the whole context is a mistake.
            raise RequestError(
                f"max_tokens of {request.max_tokens} is more than this model's context of"
                f" {self.engine.context}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return Generation(
            request,
            prompt,
            context=self.engine.context,
            tokenizer=self.tokenizer,
            eos_token_ids=self.spec.eos_token_ids,
        )

    async def _prompt_ids(self, request: GenerateRequest) -> Sequence[int]:
        prompt = request.prompt
        if not isinstance(prompt, str):
            return prompt
        self.require_fitting(len(prompt), "prompt")
        return await beside(self.tokenizer.encode, prompt, size=len(prompt))


def load_export(
    path: Path, threads: int = 0, device: int = 0, count: Counting | None = None
) -> tuple[Runner, Tokenizer]:
    """Loads the runner (see `load_runner`) and the tokenizer of the same directory."""
    return load_runner(path, threads, device, count), Tokenizer.load(path)
