"""The prompts of the proof study, many draws of what `calibrate` takes as golden prompts, and what
servers answered to them."""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from octet.artifacts.golden import POSITIONS

LENGTHS = np.geomspace(4, 500, 64).round().astype(int)  # of one draw: as calibrate/golden.py
TOP = 20
CONCURRENCY = 16

Prompt = tuple[str, list[int]]  # the text, and the token ids that it encodes to


def make_pool(texts: Sequence[str], tokenizer: Any, draws: int) -> list[list[Prompt]]:
    """For each of `LENGTHS`, `draws` different prompts of that many tokens, or one or two fewer.

    Each begins at the start of a line, anywhere in `texts` one after another, and is cut where its
    text encodes back to its tokens. Seeded: the same pool each time.
    """
    source = random.Random(0)
    whole = "\n".join(texts)
    starts = [0, *(at + 1 for at, c in enumerate(whole) if c == "\n")]
    seen: set[str] = set()
    pool: list[list[Prompt]] = []
    for length in LENGTHS:
        stratum: list[Prompt] = []
        while len(stratum) < draws:
            start = source.choice(starts)
            ids = tokenizer(whole[start : start + 16 * int(length)])["input_ids"][:length]
            found = _cut(ids, tokenizer) if len(ids) == length else None
            if found is not None and found[0] not in seen:
                seen.add(found[0])
                stratum.append(found)
        pool.append(stratum)
    return pool


def _cut(ids: list[int], tokenizer: Any) -> Prompt | None:
    for end in range(len(ids), max(len(ids) - 3, 3), -1):
        text = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        if tokenizer(text)["input_ids"] == ids[:end]:
            return text, ids[:end]
    return None


def ask(url: str, model: str, prompts: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Each prompt's greedy answer: {"tokens": [ids], "tops": [{id: logprob} per position]}."""

    async def all_of_them() -> list[dict[str, Any]]:
        timeout = aiohttp.ClientTimeout(total=600)
        connector = aiohttp.TCPConnector(limit=CONCURRENCY)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
            slots = asyncio.Semaphore(CONCURRENCY)
            return await asyncio.gather(*(one(session, slots, n) for n in range(len(prompts))))

    async def one(
        session: aiohttp.ClientSession, slots: asyncio.Semaphore, number: int
    ) -> dict[str, Any]:
        body = {
            "model": model,
            "prompt": list(prompts[number]),
            "max_tokens": POSITIONS,
            "temperature": 0,
            "logprobs": TOP,
            "return_tokens_as_token_ids": True,
            "cache_salt": f"study-{number}",  # no prompt is answered from another's blocks
        }
        async with slots, session.post("/v1/completions", json=body) as response:
            response.raise_for_status()
            answer = (await response.json())["choices"][0]["logprobs"]
        return {
            "tokens": [_token(name) for name in answer["tokens"]],
            "tops": [
                {_token(name): round(value, 6) for name, value in top.items()}
                for top in answer["top_logprobs"]
            ],
        }

    yield from asyncio.run(all_of_them())


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def save_answers(path: Path, answers: Iterator[dict[str, Any]]) -> None:
    """One JSON object a line, in the order of the prompts."""
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
