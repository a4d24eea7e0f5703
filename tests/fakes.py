"""Fakes that stand at a protocol: deterministic, small, and needing no model file."""

import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from octet.errors import BackendError
from octet.model.spec import ModelSpec
from serve.backends.base import Backend
from serve.backends.embedded import EmbeddedBackend
from serve.engine.chat_template import ChatTemplate
from serve.engine.tokenizer import Tokenizer
from serve.runner.protocol import CacheDtype, Runner, SlotCache, StepBatch

END = 256  # <|end|>: the end token of the byte vocabulary
VOCABULARY = 257
B = TypeVar("B", bound=Backend)


def byte_tokenizer(template: str | None = None) -> Tokenizer:
    """One token a byte, whose id is the byte, and `<|end|>`."""
    alphabet = {chr(c) for c in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    assert alphabet <= set(pre_tokenizers.ByteLevel.alphabet())
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - alphabet)
    spare = iter(others)
    vocabulary = {chr(b) if chr(b) in alphabet else next(spare): b for b in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return Tokenizer(inner, ChatTemplate(template))


def fake_spec(context: int = 512) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        layers=2,
        hidden_size=8,
        intermediate_size=8,
        heads=1,
        kv_heads=1,
        head_dim=4,
        vocab_size=VOCABULARY,
        max_positions=context,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
        eos_token_ids=(END,),
        bos_token_id=None,
    )


class FakeRunner:
    """A model whose next token depends on every token before it, read back from the cache.

    Its keys and values are the token ids, so whatever mixes up slots or positions changes what it
    says. It mostly says printable ASCII, ends after some forty tokens, and now and then a letter of
    several bytes. `delay_s` is slept in every step. Tokens in `poison` make a step that has one
    raise. `gate`, when cleared, holds the next step until it is set; `hold` clears it for those
    after the next few. `model` gives the logits after
    the tokens that it is called with, such as another's than `fake_logits`.
    """

    def __init__(
        self,
        *,
        context: int = 512,
        delay_s: float = 0.0,
        poison: frozenset[int] = frozenset(),
        model: Callable[[list[int]], NDArray[np.float32]] | None = None,
    ) -> None:
        self.spec = fake_spec(context)
        self.kv_dtype: CacheDtype = "e5m2"
        self.slots = 16
        self.delay_s = delay_s
        self.poison = poison
        self.model = model or fake_logits
        self.gate = threading.Event()
        self.gate.set()
        self.ahead = 0  # steps that are made though the gate is closed
        self.batches: list[int] = []  # rows of each step
        self.lengths: list[int] = []  # tokens a row of each step

    def new_cache(self, slots: int, positions: int) -> SlotCache:
        return SlotCache(self.spec, slots, positions, self.kv_dtype)

    def hold(self, ahead: int) -> None:
        self.ahead = ahead
        self.gate.clear()

    def forward(self, step: StepBatch, cache: SlotCache) -> NDArray[np.float32]:
        if self.ahead:
            self.ahead -= 1
        else:
            assert self.gate.wait(120), "nobody opened the gate"
        if self.delay_s:
            time.sleep(self.delay_s)
        if not self.poison.isdisjoint(step.token_ids.ravel().tolist()):
            raise BackendError("the fake runner was told to fail here")
        self.batches.append(len(step.slots))
        self.lengths.append(step.token_ids.shape[1])
        batch = len(step.slots)
        live = int(cache.lengths[step.slots].max())
        past = np.empty((4, batch, 1, live, 4), np.uint8)
        cache.read(step.slots, past)
        logits = np.empty((batch, step.logit_positions.shape[1], VOCABULARY), np.float32)
        for row, slot in enumerate(step.slots):
            length = int(cache.lengths[slot])
            assert not past[:, row, :, length:].any(), "an unfilled position is not zero"
            for tensor in past[:, row, 0, :length]:
                assert (tensor == past[0, row, 0, :length]).all(), "layers disagree"
            before = _ids(past[0, row, 0, :length])
            for index, position in enumerate(step.logit_positions[row].tolist()):
                seen = [*before, *step.token_ids[row, : position + 1].tolist()]
                logits[row, index] = self.model(seen)
        cache.append(step.slots, _rows(step.token_ids))
        return logits


def fake_logits(tokens: list[int]) -> NDArray[np.float32]:
    """The fake model itself: float32 [V] after `tokens`."""
    seed = zlib.crc32(np.array(tokens, np.int32).tobytes())
    generator = np.random.Generator(np.random.PCG64(seed))
    logits = generator.standard_normal(VOCABULARY).astype(np.float32)
    logits[0x20:0x7F] += 3  # printable
    if tokens[-1] == 0xC3:  # the first byte of é and its like: the second must follow
        logits[0x80:0xC0] += 20
    logits[0xC3] += 3.4
    logits[END] += 3.5
    return logits


def fake_backend(
    runner: Runner | None = None,
    *,
    model: str = "fake",
    template: str | None = None,
    **options: int,
) -> EmbeddedBackend:
    """An embedded backend over a FakeRunner and the byte tokenizer; not yet started."""
    runner = runner or FakeRunner()
    return EmbeddedBackend(
        Path(model), model=model, load=lambda: (runner, byte_tokenizer(template)), **options
    )


@asynccontextmanager
async def opened(backend: B) -> AsyncIterator[B]:
    """Starts a backend, and closes it at the end."""
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


def _rows(token_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Token ids [B, T] as cache rows [4, B, 1, T, 4], two bytes each."""
    row = np.zeros((*token_ids.shape, 4), np.uint8)
    row[..., 0], row[..., 1] = token_ids & 0xFF, token_ids >> 8
    row[..., 2] = 1
    return np.broadcast_to(row[None, :, None], (4, len(token_ids), 1, *row.shape[1:]))


def _ids(rows: NDArray[np.uint8]) -> list[int]:
    assert (rows[:, 2] == 1).all(), "a filled position was never written"
    ids: list[int] = (rows[:, 0].astype(int) | rows[:, 1].astype(int) << 8).tolist()
    return ids
