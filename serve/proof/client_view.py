"""Compares what clients get with the artifact: the defaults behind what their requests leave out.

A probe of the golden prompts sends every value itself, so it does not show them. A few requests
that leave them out do, and cost about a hundred tokens:

| what           | how                                                                       |
|----------------|---------------------------------------------------------------------------|
| tokenizer      | /tokenize of every token's text; costs no tokens                          |
| chat template  | /tokenize of a conversation; else the prompt tokens of a chat completion  |
| stop tokens    | each of the artifact's, forced by `logit_bias`, must end an answer        |
| penalties      | greedy answers must be the likeliest tokens, as log-probabilities precede |
|                | penalties                                                                 |
| sampling       | tokens drawn without settings, see `sampling`                             |

Not seen: a default `max_tokens`, and stop tokens that the server has in addition.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octet.artifacts.golden import GoldenRecord, GoldenSet
from octet.artifacts.manifest import Manifest
from octet.errors import BackendError, CheckpointError, OctetError, RequestError
from octet.model.chat_template import template_of
from octet.storage.files import read_object, sha256_file
from serve.backends.base import Backend
from serve.backends.bounds import MAX_TOKENS
from serve.backends.openai_http import OpenAiHttpBackend
from serve.engine.tokenizer import Tokenizer
from serve.proof.probe import ClientView
from serve.proof.sampling import Sampled, Sampling, other_sampling

__all__ = ["Defaults", "client_view"]

_DRAWN = 64  # tokens: enough to tell common settings from neutral ones
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
    """What the artifact says of what a request leaves out; None where it says nothing."""

    generation: dict[str, Any] | None = None
    tokenizer: Tokenizer | None = None
    template: str | None = None

    @classmethod
    def load(cls, directory: Path, manifest: Manifest) -> "Defaults":
        """Reads an export's own files; a calibration has none, so its checkpoint's if unaltered."""
        if not (directory / "tokenizer.json").is_file():
            directory = Path(str(manifest.details.get("source", "")))
            if not _is_of(directory, manifest):
                return cls()
        try:
            path = directory / "generation_config.json"
            generation = read_object(path, CheckpointError) if path.is_file() else {}
            return cls(generation, Tokenizer.load(directory), template_of(directory))
        except OctetError:
            return cls()


def _is_of(directory: Path, manifest: Manifest) -> bool:
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
    view = ClientView()
    if not isinstance(backend, OpenAiHttpBackend):
        return view
    examiner = _Examiner(backend, golden, defaults, view)
    end = asyncio.get_running_loop().time() + timeout_s
    for name, examine in (
        ("tokenizer", examiner.tokenizer),
        ("chat template", examiner.chat),
        ("stop tokens", examiner.stops),
        ("penalties", examiner.penalties),
        ("sampling", examiner.sampling),
    ):
        try:
            async with asyncio.timeout_at(end):
                await examine()
        except TimeoutError:
            view.unchecked.append(f"what clients get by default, {name}: no answer in time")
        except _Unknown as error:
            view.unchecked.append(f"what clients get by default, {name}: {error}")
        except (BackendError, RequestError, *_GARBLED) as error:
            line = str(error) if isinstance(error, OctetError) else "its answer has another form"
            view.unchecked.append(f"what clients get by default, {name}: {line}")
    return view


class _Unknown(Exception):
    """Raised for something that cannot be compared; the text says why."""


class _Examiner:
    """Sends the requests, and adds to the view."""

    def __init__(
        self, backend: OpenAiHttpBackend, golden: GoldenSet, defaults: Defaults, view: ClientView
    ) -> None:
        self._backend = backend
        self._golden = golden
        self._defaults = defaults
        self._view = view

    async def tokenizer(self) -> None:
        ours = self._defaults.tokenizer
        if ours is None:
            raise _Unknown("the artifact has none here")
        texts = _texts(ours)
        for start in range(0, len(texts), _PIECE):
            text = "\n".join(texts[start : start + _PIECE])
            theirs = await self._tokenized(prompt=text, add_special_tokens=False)
            wanted = ours.encode(text, add_special_tokens=False)
            if theirs != wanted:
                at = next(
                    (n for n, (a, b) in enumerate(zip(wanted, theirs, strict=False)) if a != b),
                    min(len(wanted), len(theirs)),
                )
                token = wanted[at : at + 1]
                named = f"{ours.token_bytes(token[0]).decode(errors='replace')!r}" if token else ""
                self._view.tokenizer = (
                    f"its tokenizer is not the artifact's: it reads {named or 'a text'} as token"
                    f" {theirs[at] if at < len(theirs) else 'none'} instead of"
                    f" {token[0] if token else 'none'}: serve the artifact's tokenizer.json"
                )
                return

    async def chat(self) -> None:
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
        if not same:
            self._view.differences.append(
                "its chat template is not the artifact's, so conversations become other prompts:"
                " start it without --chat-template, or with the artifact's"
            )

    async def stops(self) -> None:
        config = self._defaults.generation
        if config is None:
            raise _Unknown("the artifact has no generation_config.json here")
        ids = config.get("eos_token_id")
        missing = []
        for token in (ids if isinstance(ids, list) else [] if ids is None else [ids])[:_STOPS]:
            answer = await self._complete(
                2, temperature=0.0, logprobs=None, logit_bias={str(token): 100.0}
            )
            if answer["choices"][0]["finish_reason"] != "stop":
                missing.append(str(token))
        if missing:
            self._view.differences.append(
                f"it does not stop at the artifact's stop token {', '.join(missing)}: {_REMEDY}"
            )

    async def penalties(self) -> None:
        config = self._defaults.generation
        if config is None:
            raise _Unknown("the artifact has no generation_config.json here")
        wanted = config.get("repetition_penalty") or 1.0
        plain = _displaced(await self._complete(_GREEDY, temperature=0.0))
        if wanted == 1.0 and not plain:
            return
        explicit = await self._complete(_GREEDY, temperature=0.0, repetition_penalty=wanted)
        if _displaced(explicit) == plain:
            if plain and wanted == 1.0:
                self._view.differences.append(
                    "its default presence_penalty or frequency_penalty is not the artifact's, which"
                    f" has none: {_REMEDY}"
                )
            return
        self._view.differences.append(
            f"its default repetition_penalty is not the artifact's, which is {wanted:g}: {_REMEDY}"
        )

    async def sampling(self) -> None:
        config = self._defaults.generation
        if config is None:
            raise _Unknown("the artifact has no generation_config.json here")
        declared = Sampling.of(config)
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        tokens = _sampled(await self._complete(_DRAWN, **neutral))
        if (other := other_sampling(declared, tokens)) is not None:
            self._view.differences.append(
                f"its default sampling is not the artifact's ({declared}); of the settings tried,"
                f" {other} explains its tokens best: {_REMEDY}"
            )

    async def _complete(self, max_tokens: int, **fields: Any) -> Any:
        """Completes a short prompt, without any setting that is not in `fields`."""
        record = _prompt(self._golden)
        context = self._backend.context_length or 1 << 30
        most = min(max_tokens, context - len(record.prompt_token_ids) - 1)
        if most < 2:
            raise _Unknown(f"its context of {context} tokens is too short")
        # vLLM alone knows the last field; others ignore it, or name tokens by their text.
        fields = {"logprobs": 20, "return_tokens_as_token_ids": True, **fields}
        return await self._post("/v1/completions", prompt=record.prompt, max_tokens=most, **fields)

    async def _tokenized(self, **fields: Any) -> list[int]:
        answer = await self._backend.post("/tokenize", fields)
        return list(map(_count, answer["tokens"]))

    async def _post(self, path: str, **fields: Any) -> Any:
        answer = await self._backend.post(path, fields)
        self._view.tokens += _count(answer["usage"]["total_tokens"])
        return answer


def _count(value: Any) -> int:
    """Checks a number of tokens, or a token id. Raises TypeError."""
    if type(value) is not int or not 0 <= value < MAX_TOKENS:
        raise TypeError("no number of tokens, nor the id of one")
    return value


def _texts(tokenizer: Tokenizer) -> list[str]:
    """Returns the texts of all tokens that are text by themselves."""
    found = (tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
    texts = (spelled.decode(errors="replace") for spelled in found)
    return [text for text in texts if text and "\ufffd" not in text]


def _prompt(golden: GoldenSet) -> GoldenRecord:
    """Selects the short prompt whose continuation is the least certain, which shows sampling."""
    shortest = min(len(record.prompt_token_ids) for record in golden.records)
    most = max(shortest, _SHORT)
    short = [record for record in golden.records if len(record.prompt_token_ids) <= most]
    return min(short, key=lambda record: sum(max(top.logprobs) for top in record.tops))


def _positions(answer: Any) -> list[tuple[float, list[float]]]:
    """Reads the log-probability of each chosen token, and the top ones, the likeliest first."""
    found = answer["choices"][0].get("logprobs")
    if not found or not found.get("top_logprobs"):
        raise _Unknown("it returns no log-probabilities")
    return [
        (float(chosen), sorted(map(float, top.values()), reverse=True))
        for chosen, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True)
    ]


def _displaced(answer: Any) -> bool:
    """Returns whether greedy decoding chose a token that is not the likeliest."""
    return any(chosen < top[0] - _CLOSE for chosen, top in _positions(answer))


def _sampled(answer: Any) -> Sequence[Sampled]:
    """Reads sampled tokens; vLLM lists a chosen token outside of the top in addition."""
    found = []
    for chosen, values in _positions(answer):
        top = values[:20]
        rank = top.index(chosen) if chosen in top else None
        found.append(Sampled(rank, tuple(top)))
    return found
