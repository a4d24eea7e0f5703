"""The bodies of completion and chat requests, checked before any backend sees them.

A body is one JSON object in UTF-8, without repeated keys, and bounded in every way. It is forwarded
to a backend byte for byte, so anything that two decoders might read differently is refused.

Fields outside the schema stay in `model_extra`, for the backend to accept or refuse
(unsupported.py). Types are strict: `"max_tokens": "5"` and `"n": true` are errors.
"""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from octet.errors import RequestError
from serve.api.strict_json import loads, loads_large
from serve.config import Limits

__all__ = [
    "LARGE",
    "PROMPT_FIELDS",
    "PROMPT_SCHEMA",
    "ChatRequest",
    "CompletionRequest",
    "MaybeMessages",
    "decode",
    "parse",
    "parse_body",
    "prompts_of",
    "require_json",
    "validate",
]

Prompt = str | tuple[int, ...]
S = TypeVar("S", bound=BaseModel)
_thread = ThreadPoolExecutor(1, "parse")  # not one per body: they would share one lock
MAX_STOP = 16  # stop strings
COMPLETION_MAX_TOKENS = 16  # OpenAI's and vLLM's default for /v1/completions


def _strings(value: Any) -> Any:
    """Returns `stop` as a tuple of non-empty strings, from null, a string or a list."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError("should be a string or a list of strings")
    if "" in items:
        raise ValueError("a stop string cannot be empty")
    if len(items) > MAX_STOP:
        raise ValueError(f"at most {MAX_STOP} stop strings are allowed, got {len(items)}")
    return tuple(items)


def prompts_of(value: Any) -> Any:
    """Returns OpenAI's four forms of `prompt` as a tuple of prompts, each text or token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_token(value[0])):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("should be a string, a list of strings, token ids, or lists of token ids")
    if not value:
        raise ValueError("is empty; at least one token is needed")
    return tuple(_prompt(item) for item in value)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        prompt: Prompt = value
    elif isinstance(value, list) and all(map(_is_token, value)):
        prompt = tuple(value)
    else:
        raise ValueError("should be a string, a list of strings, token ids, or lists of token ids")
    if not prompt:
        raise ValueError("is empty; at least one token is needed")
    return prompt


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _messages(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise ValueError("should be a list of at least one message")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} should be an object with a role")
    return tuple(value)


def _limits(info: ValidationInfo) -> Limits:
    assert isinstance(info.context, Limits)
    return info.context


def _limited(name: str) -> AfterValidator:
    """Makes the check of a number by the limit `name`."""

    def check(value: int, info: ValidationInfo) -> int:
        limit = getattr(_limits(info), name)
        if value > limit:
            raise ValueError(f"should be at most {limit}, got {value}")
        return value

    return AfterValidator(check)


_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT = {"type": "string", "minLength": 1}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _TEXT,
        _TOKENS,
        {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _TOKENS]}},
    ]
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": {}},
    "additionalProperties": True,
}
_STOP = {"anyOf": [{"type": "null"}, _TEXT, {"type": "array", "items": _TEXT}]}

_MESSAGES: dict[str, Any] = {"type": "array", "minItems": 1, "items": _MESSAGE}
_MAYBE_MESSAGES: dict[str, Any] = {"anyOf": [_MESSAGES, {"type": "null"}]}

Messages = Annotated[Any, BeforeValidator(_messages), WithJsonSchema(_MESSAGES)]
MaybeMessages = Annotated[
    Any,
    BeforeValidator(lambda value: None if value is None else _messages(value)),
    WithJsonSchema(_MAYBE_MESSAGES),
]
Logprobs = Annotated[int, Field(ge=0), _limited("max_logprobs")]
Limit = Annotated[int, Field(gt=0, lt=2**31)]
StopTokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=4096)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None


class _Sampling(BaseModel):
    """The fields that both dialects share; null is the default of each."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str
    max_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # 0 and -1: all
    n: Annotated[int, Field(gt=0), _limited("max_n")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_strings), WithJsonSchema(_STOP)] = ()
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # vLLM's: names of tokens in log-probabilities
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: allowed only with stream: true")
        return self

    def sampling(self) -> dict[str, Any]:
        """Returns the fields of a `GenerateRequest` that all choices share."""
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(self.top_k or 0, 0),
            "stop": self.stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
        }

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_Sampling):
    """The body of POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(prompts_of), WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None

    @field_validator("prompt")
    @classmethod
    def _few_prompts(cls, prompts: Any, info: ValidationInfo) -> Any:
        limit = _limits(info).max_prompts
        if len(prompts) > limit:
            raise ValueError(f"at most {limit} prompts are allowed, got {len(prompts)}")
        return prompts

    @model_validator(mode="after")
    def _something_to_return(self) -> Self:
        """Allows 0 tokens for the prompt alone, which clients score with `logprobs`."""
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: should be greater than 0, got 0, which needs echo: true")
        return self

    @model_validator(mode="after")
    def _few_choices(self, info: ValidationInfo) -> Self:
        limit, choices = _limits(info).max_choices, len(self.prompt) * (self.n or 1)
        if choices > limit:
            raise ValueError(
                f"n: {choices} choices (prompts times n) are over the limit of {limit}"
            )
        return self

    @property
    def answer_limit(self) -> int:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


# Fields of a chat, beside its messages, from which its prompt is made.
PROMPT_FIELDS = ("tools", "functions", "documents", "chat_template", "chat_template_kwargs")


class ChatRequest(_Sampling):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens: differs from max_completion_tokens; give one of them")
        return self

    @property
    def answer_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def parse(schema: type[S], body: bytes, limits: Limits) -> tuple[S, dict[str, Any]]:
    """Returns the checked request, and the decoded object it came from.

    Raises RequestError (400) naming the field for anything that does not fit the schema.
    """
    data = decode(body)
    return validate(schema, data, limits), data


async def parse_body(schema: type[S], body: bytes, limits: Limits) -> tuple[S, dict[str, Any]]:
    """Does the same as `parse`, but parses large bodies on a thread, one at a time."""
    if len(body) <= LARGE:
        return parse(schema, body, limits)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_thread, parse, schema, body, limits)


def validate(schema: type[S], data: dict[str, Any], limits: Limits) -> S:
    """Checks a decoded object. Raises RequestError naming the first field that does not fit."""
    try:
        return schema.model_validate(data, context=limits)
    except ValidationError as error:
        raise _request_error(error) from None


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return RequestError(f"'{param}' is required", param=param)
    if first["type"] == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        if not param:  # a rule over several fields: its message begins with the field at fault
            param, _, message = message.partition(": ")
        return RequestError(f"'{param}': {message}", param=param)
    message = first["msg"].replace("Input should", "should")
    given = first["input"]
    got = json.dumps(given[:40] if isinstance(given, str | list | tuple) else given)
    got = got if len(got) <= 40 else got[:37] + "..."
    return RequestError(f"'{param}' {message}, got {got}", param=param)


LARGE = 64 * 1024  # bytes; a body up to this size is decoded and checked in under 1 ms
MAX_DEPTH = 256  # nesting levels of arrays and objects


def require_json(content_type: bytes | None) -> None:
    """Raises RequestError if the content type is not JSON; a missing content type passes.

    The status is 400 and not 415, as in vLLM. The check matters because browsers send forms and
    plain text to any site without a preflight request.
    """
    if content_type is None:
        return
    media_type = content_type.partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise RequestError(
            "the body should be JSON: send the header Content-Type: application/json",
            code="unsupported_media_type",
        )


def decode(body: bytes) -> dict[str, Any]:
    """Raises RequestError (400) for anything but one JSON object."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}",
            code="invalid_utf8",
        ) from None
    try:
        data = loads(text) if len(body) <= LARGE else loads_large(text)
        if not isinstance(data, dict):
            raise RequestError("the body should be a JSON object")
        # The depth check takes longer the more brackets there are; most bodies have a handful.
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
            _require_shallow(data)
        if b"\\ud" in body or b"\\uD" in body:  # most likely an escaped surrogate
            for name, value in data.items():
                _require_unicode(name, name, value)
    except RecursionError:
        raise RequestError("the body is not usable JSON: nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    return data


def _require_shallow(data: dict[str, Any]) -> None:
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        inner = [item for outer in level for item in _items(outer)]
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError


def _require_unicode(name: str, *values: Any) -> None:
    """Raises RequestError for a lone surrogate: UTF-8 has none, but an escape can produce one.

    `name` is the name of the field.
    """
    for value in values:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _no_unicode(name) from None
        elif isinstance(value, dict):
            _require_unicode(name, *value, *value.values())
        elif isinstance(value, list):
            _require_unicode(name, *value)


def _no_unicode(name: str) -> RequestError:
    param = name[:100].encode(errors="replace").decode()
    message = f"'{param}': holds a lone surrogate, which is no Unicode text"
    return RequestError(message, param=param, code="invalid_unicode")


def _items(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container
