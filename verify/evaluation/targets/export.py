"""Evaluates an ONNX export or an engine, as the embedded engine would serve it.

Each sample is prefilled by itself through the cache, in the engine's own chunks, so keys and values
are rounded as they are in service.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from octet.artifacts.manifest import Manifest
from octet.errors import NumericsError
from serve.engine.load import load_runner
from serve.engine.prompts import teacher_forced
from serve.engine.sampler import log_softmax
from serve.engine.tokenizer import Tokenizer
from serve.runner.protocol import Runner, Slots
from verify.evaluation.target import Answer, top_k

__all__ = ["Export"]


class Export:
    """A `Target`; `answers` loads the model."""

    lasting = True

    def __init__(self, path: Path, threads: int = 0) -> None:
        """Raises ArtifactError if `path` is not a complete export or engine."""
        self.name = str(path)
        self._path, self._threads = path, threads
        manifest = Manifest.load(path, verify=False)
        self.identity: Mapping[str, str] = {"manifest": manifest.identity}
        self.longest: int | None = manifest.model.spec.max_positions
        self.vocabulary: int | None = manifest.model.spec.vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self._path)

    def encode(self, text: str) -> list[int] | None:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.inner.decode(list(ids), skip_special_tokens=False))

    def answers(self, samples: Sequence[Sequence[int]], k: int) -> Iterator[tuple[int, Answer]]:
        runner = load_runner(self._path, self._threads)
        cache = runner.new_cache(1, max(map(len, samples)))
        for index, ids in enumerate(samples):
            yield index, self._answer(runner, cache, list(ids), k)

    def _answer(self, runner: Runner, cache: Slots, ids: list[int], k: int) -> Answer:
        parts = []
        following = 1
        for logits in teacher_forced(runner, cache, ids):
            targets = np.array(ids[following : following + len(logits)])
            following += len(logits)
            if len(targets):  # nothing follows the last token
                logprobs = log_softmax(logits[: len(targets)])
                chosen = logprobs[np.arange(len(targets)), targets].astype(np.float32)
                parts.append((chosen, *top_k(logprobs, k)))
        answer = Answer(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        if not answer.finite:
            raise NumericsError(f"{self.name}: NaN or Inf in its logits")
        return answer
