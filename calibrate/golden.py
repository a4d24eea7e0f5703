"""Golden records: the unquantized model's answers to prompts of mixed lengths.

Each prompt runs by itself, in float32 arithmetic on the checkpoint's weights, so that a record
depends on its prompt alone.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from octet.artifact import software
from octet.checkpoint import Checkpoint
from octet.errors import SampleError
from octet.golden import GoldenRecord, GoldenSet

__all__ = ["CONTINUATION", "LONGEST", "choose_prompts", "golden_set", "record"]

PROMPTS = 64
SHORTEST, LONGEST = 4, 500  # prompt lengths in tokens, spread evenly on a logarithmic scale
TOP = 20
CONTINUATION = 16  # tokens; fewer where the model ends its text


def golden_set(
    model: Any,
    checkpoint: Checkpoint,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    advance: Callable[[int], None] = lambda tokens: None,
) -> GoldenSet:
    """A record for each of `prompts` (text, token ids); `model` computes in float32.

    `advance` is told the tokens of each prompt as it is done.
    """
    if model.dtype != torch.float32:
        raise ValueError(f"the reference computes in float32, not {model.dtype}")
    records = []
    with _threads(model):
        for prompt, ids in prompts:
            records.append(record(model, prompt, ids, checkpoint.spec.eos_token_ids))
            advance(len(ids))
    identity = json.dumps(checkpoint.weight_hashes, sort_keys=True)
    return GoldenSet(
        weights_sha256=hashlib.sha256(identity.encode()).hexdigest(),
        compute_dtype="float32",
        software=software("torch", "transformers", "tokenizers"),
        records=tuple(records),
    )


@contextmanager
def _threads(model: Any) -> Iterator[None]:
    """torch's threads for decoding one token at a time: one for each 50 M parameters.

    With less to do in each operation, threads wait for each other longer than they work: the 6.9 M
    example decodes faster with one than with two, and far faster on a machine that is busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, 1 + model.num_parameters() // 50_000_000))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_prompts(
    sequences: Sequence[Sequence[int]], tokenizer: Any, max_positions: int
) -> list[tuple[str, list[int]]]:
    """64 prompts, shortest first, as (text, token ids), where the text encodes to those very ids.

    Each is the beginning of a held-out sequence; sequences take turns, longest prompts first. A
    length that cuts through a character, or where the tokenizer would join what was cut, is
    shortened until it does not. Raises SampleError if nothing can be cut from `sequences`.
    """
    longest = max(1, min(LONGEST, max_positions - CONTINUATION))
    lengths = np.geomspace(min(SHORTEST, longest), longest, PROMPTS).round().astype(int)
    by_length = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    prompts = []
    for turn, length in enumerate(lengths[::-1]):
        for offset in range(len(by_length)):
            ids = sequences[by_length[(turn + offset) % len(by_length)]]
            found = _cut(ids, int(length), tokenizer)
            if found is not None:
                prompts.append(found)
                break
        else:
            raise SampleError("no held-out sample starts with text that encodes back to its tokens")
    return prompts[::-1]


def _cut(ids: Sequence[int], length: int, tokenizer: Any) -> tuple[str, list[int]] | None:
    for end in range(min(length, len(ids)), 0, -1):
        head = list(ids[:end])
        for text in _spelled(head, tokenizer):
            if text and tokenizer(text)["input_ids"] == head:
                return text, head
    return None


def _spelled(ids: list[int], tokenizer: Any) -> Iterator[str]:
    """Texts that may encode to `ids`: a conversation's special tokens have to be spelled out.

    Its first one is not where the tokenizer adds it to any text.
    """
    special = bool(set(ids) & set(tokenizer.all_special_ids))
    for part, skip in ((ids, True), (ids, False), (ids[1:], False)) if special else ((ids, True),):
        yield tokenizer.decode(part, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@torch.inference_mode()
def record(model: Any, prompt: str, ids: list[int], eos_token_ids: Sequence[int]) -> GoldenRecord:
    """The answer to one prompt: top log-probabilities of the next token, then greedy tokens.

    Of equally likely tokens the one with the lower id comes first. An end token ends the
    continuation and is its last.
    """
    output = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    logits = output.logits[0, -1].double().numpy()
    logprobs = logits - logits.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    top = np.argsort(-logprobs, kind="stable")[:TOP]
    continuation = [int(top[0])]
    while len(continuation) < CONTINUATION and continuation[-1] not in eos_token_ids:
        output = model(
            torch.tensor([continuation[-1:]]),
            past_key_values=output.past_key_values,
            use_cache=True,
        )
        continuation.append(int(output.logits[0, -1].numpy().argmax()))
    return GoldenRecord(
        prompt=prompt,
        prompt_token_ids=tuple(ids),
        top_token_ids=tuple(int(token) for token in top),
        top_logprobs=tuple(float(value) for value in logprobs[top]),
        continuation_token_ids=tuple(continuation),
    )
