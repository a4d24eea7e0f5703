"""Compares a server's defaults, which apply to what requests leave out, with the artifact's.

A probe of the golden prompts sets every field, so it does not show the defaults. A few requests
that leave fields out show them, and cost about seventy tokens:

| what           | how                                                                       |
|----------------|---------------------------------------------------------------------------|
| tokenizer      | /tokenize of every token's text; costs no tokens                          |
| chat template  | /tokenize of a conversation; else the prompt tokens of a chat completion  |
| stop tokens    | each of the artifact's, forced by `logit_bias`, must end an answer        |
| penalties      | greedy answers must be the likeliest tokens, as log-probabilities precede |
|                | penalties                                                                 |
| sampling       | tokens drawn without settings, see `sampling`                             |

Not detected: a default `max_tokens`, and additional stop tokens of the server.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from octet.artifacts.golden import GoldenRecord, GoldenSet
from octet.artifacts.manifest import Manifest
from octet.errors import BackendError, CheckpointError, OctetError, RequestError
from octet.model.chat_template import GENERATION_CONFIG, template_of
from octet.storage.files import read_object, sha256_file
from serve.backends.base import Backend
from serve.backends.bounds import MAX_TOKENS
from serve.backends.openai_http import OpenAiHttpBackend
from serve.engine.tokenizer import Tokenizer
from serve.proof.probe import LADDER, NO_PENALTIES, ClientView
from serve.proof.sampling import Sampled, Sampling, divergence, other_sampling

__all__ = ["Defaults", "client_view"]

_DRAWN = 28  # tokens after one prompt: enough to tell common settings from neutral ones
_GREEDY = 24  # tokens
_SHORT = 24  # tokens of a prompt, if there is one so short
_PIECE = 2000  # tokens whose texts are one request to /tokenize
_CLOSE = 1e-3  # nats: tokens this close may be a tie
_STOPS = 4  # stop tokens that are examined at most
_CHAT = (
    {"role": "user", "content": "Which port does it use?"},
    {"role": "assistant", "content": "8000."},
    {"role": "user", "content": "And the metrics?"},
)
_GARBLED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
_REMEDY = "start vLLM with `--generation-config` and the artifact's directory"


@dataclass(frozen=True)
class Defaults:
    """The artifact's values for settings that a request leaves out; None where it has none."""

    generation: dict[str, Any] | None = None
    tokenizer: Tokenizer | None = None
    template: str | None = None

    @classmethod
    def load(cls, directory: Path, manifest: Manifest) -> "Defaults":
        """Reads an export's own files; a calibration has none, so its checkpoint's if unaltered."""
        if not (directory / "tokenizer.json").is_file():
            directory = Path(str(manifest.details.get("source", "")))
            if not _is_calibrated_tokenizer(directory, manifest):
                return cls()
        try:
            path = directory / GENERATION_CONFIG
            generation = read_object(path, CheckpointError) if path.is_file() else {}
            return cls(generation, Tokenizer.load(directory), template_of(directory))
        except OctetError:
            return cls()


def _is_calibrated_tokenizer(directory: Path, manifest: Manifest) -> bool:
    """Returns whether the tokenizer in `directory` is the one that was calibrated with."""
    known = manifest.model.tokenizer
    try:
        return bool(known) and all(sha256_file(directory / n) == d for n, d in known.items())
    except OSError:
        return False


async def client_view(
    backend: Backend, golden: GoldenSet, defaults: Defaults, *, timeout_s: float = 60.0
) -> ClientView:
    """Examines a server of OpenAI's protocol; finds nothing of any other, which has no defaults.

    Never raises a BackendError or RequestError: what cannot be examined is listed as such.
    """
    if not isinstance(backend, OpenAiHttpBackend):
        return ClientView()
    examiner = _Examiner(backend, golden, defaults)
    examined = {
        "tokenizer": examiner.tokenizer(),
        "chat template": examiner.chat(),
        "stop tokens": examiner.stops(),
        "penalties": examiner.penalties(),
        "sampling": examiner.sampling(),
    }
    lines = await asyncio.gather(
        *(_compared(name, examine, timeout_s) for name, examine in examined.items())
    )
    view = ClientView(tokens=examiner.tokens)
    for name, (difference, unchecked) in zip(examined, lines, strict=True):
        if unchecked is not None:
            view.unchecked.append(unchecked)
        elif difference is not None and name == "tokenizer":
            view.tokenizer = difference
        elif difference is not None:
            view.differences.append(difference)
    return view


async def _compared(
    name: str, examine: Awaitable[str | None], timeout_s: float
) -> tuple[str | None, str | None]:
    """Returns how a default differs, or why that is unknown."""
    try:
        async with asyncio.timeout(timeout_s):
            return await examine, None
    except TimeoutError:
        reason = "no answer in time"
    except (_Unknown, BackendError, RequestError) as error:
        reason = str(error)
    except _GARBLED:
        reason = "its answer has another form"
    return None, f"what clients get by default, {name}: {reason}"


class _Unknown(Exception):
    """Raised for something that cannot be compared; the text says why."""


class _Examiner:
    """Sends the requests. Each method returns how a default differs, with a remedy, or None."""

    def __init__(self, backend: OpenAiHttpBackend, golden: GoldenSet, defaults: Defaults) -> None:
        self._backend = backend
        self._golden = golden
        self._defaults = defaults
        self.tokens = 0  # prompts and answers
        self._logprobs: int | None = LADDER[0]

    async def tokenizer(self) -> str | None:
        ours = self._defaults.tokenizer
        if ours is None:
            raise _Unknown("the artifact has none here")
        texts = await asyncio.to_thread(ours.plain_texts)
        for start in range(0, len(texts), _PIECE):
            text = "\n".join(texts[start : start + _PIECE])
            theirs = await self._tokenized(prompt=text, add_special_tokens=False)
            wanted = await asyncio.to_thread(ours.encode, text, add_special_tokens=False)
            if theirs != wanted:
                return _other_token(ours, wanted, theirs)
        return None

    async def chat(self) -> str | None:
        ours, template = self._defaults.tokenizer, self._defaults.template
        if ours is None or template is None:
            raise _Unknown("the artifact has no template here")
        if "strftime_now" in template:
            raise _Unknown("the template writes the date")
        wanted = list(ours.chat_prompt(_CHAT))
        try:
            same = await self._tokenized(messages=list(_CHAT)) == wanted
        except RequestError:
            answer = await self._post("/v1/chat/completions", messages=list(_CHAT), max_tokens=1)
            same = answer["usage"]["prompt_tokens"] == len(wanted)
        if same:
            return None
        return (
            "its chat template is not the artifact's, so conversations become other prompts:"
            " start it without --chat-template, or with the artifact's"
        )

    async def stops(self) -> str | None:
        ids = self._generation.get("eos_token_id")
        missing = []
        for token in (ids if isinstance(ids, list) else [] if ids is None else [ids])[:_STOPS]:
            bias = {str(token): 100.0}
            answer = await self._complete(
                _short(self._golden)[0], 2, temperature=0.0, logprobs=None, logit_bias=bias
            )
            if answer["choices"][0]["finish_reason"] != "stop":
                missing.append(str(token))
        if not missing:
            return None
        return f"it does not stop at the artifact's stop token {', '.join(missing)}: {_REMEDY}"

    async def penalties(self) -> str | None:
        wanted = self._generation.get("repetition_penalty") or 1.0
        record = _uncertain(self._golden)
        plain = _is_not_greedy(await self._complete(record, _GREEDY, temperature=0.0))
        if wanted == 1.0 and not plain:
            return None
        explicit = await self._complete(record, _GREEDY, temperature=0.0, repetition_penalty=wanted)
        if _is_not_greedy(explicit) != plain:
            line = f"its default repetition_penalty is not the artifact's, which is {wanted:g}"
        elif wanted == 1.0:
            line = (
                "its default presence_penalty or frequency_penalty is not the artifact's, which"
                " has none"
            )
        else:
            return None
        return f"{line}: {_REMEDY}"

    async def sampling(self) -> str | None:
        declared = Sampling.of(self._generation)
        answer = await self._complete(_distinguishing(self._golden), 1, n=_DRAWN, **NO_PENALTIES)
        tokens = _sampled(answer["choices"])
        if len(tokens) < _DRAWN:  # it ignores `n`
            raise _Unknown(f"it drew {len(tokens)} of {_DRAWN} tokens")
        other = await asyncio.to_thread(other_sampling, declared, tokens)
        if other is None:
            return None
        return (
            f"its default sampling is not the artifact's ({declared}); of the settings tried,"
            f" {other} explains its tokens best: {_REMEDY}"
        )

    @property
    def _generation(self) -> dict[str, Any]:
        if self._defaults.generation is None:
            raise _Unknown("the artifact has no generation_config.json here")
        return self._defaults.generation

    async def _complete(self, record: GoldenRecord, max_tokens: int, **fields: Any) -> Any:
        """Completes the prompt of `record`, without any setting that is not in `fields`."""
        context = self._backend.context_length or 1 << 30
        most = min(max_tokens, context - len(record.prompt_token_ids) - 1)
        if most < min(max_tokens, 2):
            raise _Unknown(f"its context of {context} tokens is too short")
        # vLLM alone knows the first field; others ignore it, or name tokens by their text.
        fields = {"return_tokens_as_token_ids": True, "logprobs": self._logprobs, **fields}
        try:
            return await self._post(
                "/v1/completions", prompt=record.prompt, max_tokens=most, **fields
            )
        except RequestError as error:
            if "logprobs" not in f"{error.param} {error}" or fields["logprobs"] in (None, 1):
                raise
            if fields["logprobs"] == self._logprobs:  # no other request has lowered it yet
                self._logprobs = LADDER[LADDER.index(self._logprobs) + 1]
            fields["logprobs"] = self._logprobs
            return await self._complete(record, max_tokens, **fields)

    async def _tokenized(self, **fields: Any) -> list[int]:
        answer = await self._backend.post("/tokenize", fields)
        return list(map(_count, answer["tokens"]))

    async def _post(self, path: str, **fields: Any) -> Any:
        answer = await self._backend.post(path, fields)
        self.tokens += _count(answer["usage"]["total_tokens"])
        return answer


def _count(value: Any) -> int:
    """Checks a number of tokens, or a token id. Raises TypeError."""
    if type(value) is not int or not 0 <= value < MAX_TOKENS:
        raise TypeError("no number of tokens, nor the id of one")
    return value


def _other_token(tokenizer: Tokenizer, ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Describes the first token that differs."""
    wanted, given = next((a, b) for a, b in zip_longest(ours, theirs) if a != b)
    text = "" if wanted is None else tokenizer.token_bytes(wanted).decode(errors="replace")
    return (
        f"its tokenizer is not the artifact's: it encodes {text!r} as token {given} instead of"
        f" {wanted}: serve the artifact's tokenizer.json"
    )


def _short(golden: GoldenSet) -> list[GoldenRecord]:
    """Returns the records with short prompts, the shortest first."""
    records = sorted(golden.records, key=lambda record: len(record.prompt_token_ids))
    most = max(len(records[0].prompt_token_ids), _SHORT)
    return [record for record in records if len(record.prompt_token_ids) <= most]


def _uncertain(golden: GoldenSet) -> GoldenRecord:
    """Selects the short prompt with the least certain continuation: a penalty changes it first."""
    return min(_short(golden), key=lambda x: sum(max(top.logprobs) for top in x.tops))


def _distinguishing(golden: GoldenSet) -> GoldenRecord:
    """Selects the short prompt whose next token best distinguishes usual sampling from neutral."""
    usual, neutral = Sampling(0.6), Sampling()
    return max(_short(golden), key=lambda x: divergence(usual, neutral, x.top.values()))


def _positions(choice: Any) -> list[tuple[float, list[float]]]:
    """Reads the log-probability of each chosen token, and the top ones, the likeliest first."""
    found = choice.get("logprobs")
    if not found or not found.get("top_logprobs"):
        raise _Unknown("it returns no log-probabilities")
    return [
        (float(chosen), sorted(map(float, top.values()), reverse=True))
        for chosen, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True)
    ]


def _is_not_greedy(answer: Any) -> bool:
    """Returns whether greedy decoding chose a token that is not the likeliest."""
    return any(chosen < top[0] - _CLOSE for chosen, top in _positions(answer["choices"][0]))


def _sampled(choices: Sequence[Any]) -> list[Sampled]:
    """Reads sampled tokens; a chosen token outside of the top is listed in addition."""
    positions = [position for choice in choices for position in _positions(choice)]
    size = min((len(values) for _, values in positions), default=0)
    found = []
    for chosen, values in positions:
        top = values[:size]
        rank = top.index(chosen) if chosen in top else None
        found.append(Sampled(rank, tuple(top)))
    return found
