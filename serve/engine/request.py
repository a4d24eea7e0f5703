"""Messages between the gateway and a backend: one request in, a stream of events out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = [
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateRequest",
    "PositionLogprobs",
    "TokenLogprob",
    "Usage",
]

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt to continue once. The gateway has checked ranges and made n requests of `n`."""

    request_id: str
    model: str
    prompt: str | tuple[int, ...]  # text, or token ids
    max_tokens: int | None = None  # None: until the end of the context; 0: only the `echo`
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0: all
    seed: int | None = None
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # alternatives per token; 0: only the chosen token; None: none
    echo: bool = False  # the first Delta is the prompt
    ignore_eos: bool = False
    # Fields that this type does not know, as the client sent them. Only a backend that
    # `accepts_extra` gets a request with any.
    extra: Mapping[str, Any] = field(default_factory=dict)
    # Headers for the server, names in lower case: the request's id and its trace context.
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def optional(self) -> dict[str, Any]:
        """The optional fields that are set, under the names of OpenAI and vLLM."""
        fields = {
            "seed": self.seed,
            "stop": list(self.stop) or None,
            "stop_token_ids": list(self.stop_token_ids) or None,
            "logprobs": self.logprobs,
            "ignore_eos": self.ignore_eos or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability: the natural logarithm of the softmax of the raw logits.

    `text` decodes the token alone: bytes that are not whole UTF-8 become U+FFFD; `bytes` has them.
    """

    token_id: int
    text: str
    bytes: bytes
    logprob: float | None  # None for the first token of an echoed prompt


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token of one position and the most likely ones there, most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    text_offset: int  # characters of the whole answer (echoed prompt included) before this token


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of the answer.

    `text` may lag behind `token_ids`: half a UTF-8 character, or what may become a stop string, is
    held back. `logprobs` has one entry per token id, or is None if none were requested.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. `stop_reason` is the stop string or stop token id that ended the answer."""

    reason: FinishReason  # stop: end token, stop token or stop string; length: limit or context
    usage: Usage
    stop_reason: str | int | None = None


Event: TypeAlias = Delta | Finished
