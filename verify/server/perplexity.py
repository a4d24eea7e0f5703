"""Gets a server's log-probabilities of the golden prompts, for the change in perplexity.

A second pass over each prompt: the server returns its tokens with their log-probabilities (`echo`).
Only `octet verify URL` runs it: a gateway's probes leave a server's time to its clients.
"""

import asyncio
import secrets
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from octet.artifacts.golden import GoldenSet
from octet.errors import BackendError, RequestError
from octet.proof.responses import Response
from serve.backends.base import Backend
from serve.engine.request import Delta, GenerateRequest

__all__ = ["with_prompts"]


async def with_prompts(
    backend: Backend,
    golden: GoldenSet,
    responses: Sequence[Response],
    *,
    concurrency: int = 8,
    timeout_s: float = 60.0,
) -> tuple[list[Response], str | None]:
    """Returns `responses` with their prompts' log-probabilities, and None.

    If the server does not send them all, returns `responses` unchanged, and the reason: a change
    over only some prompts would be another figure.
    """
    room = asyncio.Semaphore(concurrency)
    extra = {"cache_salt": uuid.uuid4().hex} if backend.accepts_extra else {}

    async def one(response: Response) -> Response:
        record = golden.records[response.record]
        if record.prompt_nll is None:  # a list of token ids: no text, whose perplexity matters
            return response
        request = GenerateRequest(
            request_id=secrets.token_hex(16),
            model=backend.models[0],
            prompt=record.prompt,
            max_tokens=1,
            temperature=0.0,
            logprobs=0,
            echo=True,
            extra=extra,
        )
        found: list[float | None] = []
        async with room, aclosing(backend.generate(request)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    found += [position.chosen.logprob for position in event.logprobs or ()]
        count = len(record.prompt_token_ids)
        if len(found) < count or any(value is None for value in found[1:count]):
            raise BackendError(f"{backend.name}: sends no log-probabilities of a prompt")
        return replace(response, prompt_logprobs=(None, *found[1:count]))

    tasks = [asyncio.create_task(one(response)) for response in responses]
    try:
        async with asyncio.timeout(timeout_s):
            return list(await asyncio.gather(*tasks)), None
    except TimeoutError:
        return list(responses), f"its prompts' log-probabilities did not come in {timeout_s:g} s"
    except (BackendError, RequestError) as error:
        return list(responses), str(error)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
