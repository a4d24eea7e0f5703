"""Requests and responses of Octet's Triton entry as tensors: those of Triton's vLLM backend.

Inputs, all optional and of shape [1] except the token ids:
  text_input               the prompt; or input_ids, INT64 [T]
  sampling_parameters      JSON object; without it, the request's own parameters are used
  stream                   true: the answer comes in pieces (default: false)
  exclude_input_in_output  true: the text starts after the prompt (default: same as stream)
  return_finish_reason, return_logprobs, return_num_input_tokens, return_num_output_tokens

Outputs of every response; the reports only if requested:
  text_output              the next piece of the answer, or all of it
  finish_reason            "None" until the last response, then "stop" or "length"
  stop_reason              with it: the stop string or token id that ended the answer, as JSON
  logprobs                 JSON, an object per new token: token id → {logprob, rank, decoded_token,
                           bytes}, the chosen token first and with its text_offset, then the most
                           likely; rank is null for a chosen token that is not among these
  num_input_tokens, num_output_tokens   the latter of this response alone
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octet.errors import RequestError
from serve.api.schemas import COMPLETION_MAX_TOKENS, CompletionRequest, validate
from serve.api.unsupported import refuse_unsupported
from serve.config import Limits
from serve.engine.request import (
    Delta,
    Event,
    Finished,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
)

__all__ = ["EntryRequest", "Tensors", "outputs", "read_request"]

# Name → array, for each tensor of a response.
Tensors = dict[str, Any]

SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "n", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "logprobs"),
)
REPORTS = ("finish_reason", "logprobs", "num_input_tokens", "num_output_tokens")

_TEXT = "a text goes into 'text_input', token ids into 'input_ids'"
# Fields of other APIs -> what this model has in their place.
_OTHER_NAMES = {
    "prompt": _TEXT,
    "inputs": _TEXT,
    "input": _TEXT,
    "text": _TEXT,
    "messages": "this model takes no conversation: give 'text_input', as the chat template renders"
    " it, or send it to `octet serve` in front of Triton",
}


@dataclass(frozen=True, slots=True)
class EntryRequest:
    """One request: what to generate, and in which form to return it."""

    request: GenerateRequest
    stream: bool
    with_prompt: bool  # the text begins with the prompt
    reports: frozenset[str]


def read_request(request: Any, pb_utils: Any) -> EntryRequest:
    """Reads a request of the Python backend. Raises RequestError naming the field at fault."""

    def value(name: str, default: Any = None) -> Any:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return default if tensor is None else tensor.as_numpy().reshape(-1)[0]

    stream = bool(value("stream", False))
    excluded = bool(value("exclude_input_in_output", stream))
    if stream and not excluded:
        raise RequestError(
            "'exclude_input_in_output' cannot be false where 'stream' is true",
            param="exclude_input_in_output",
        )
    ids = pb_utils.get_input_tensor_by_name(request, "input_ids")
    text = _text(value("text_input", b""), "text_input")
    if ids is not None and text:
        raise RequestError("give 'text_input' or 'input_ids', not both", param="input_ids")
    encoded = value("sampling_parameters")
    sampling = _sampling(_text(encoded, "sampling_parameters") if encoded else _own(request))
    return EntryRequest(
        request=_generate_request(
            request.request_id(), text if ids is None else ids.as_numpy().tolist(), sampling
        ),
        stream=stream,
        with_prompt=not excluded,
        reports=frozenset(r for r in REPORTS if value(f"return_{r}", False)),
    )


def outputs(
    received: EntryRequest, prompt_tokens: int, events: Sequence[Event], prefix: str
) -> Tensors:
    """Returns the tensors of one response with `events`; its text begins with `prefix`."""
    deltas = [event for event in events if isinstance(event, Delta)]
    end = next((event for event in events if isinstance(event, Finished)), None)
    tensors = {"text_output": _strings(prefix + "".join(delta.text for delta in deltas))}
    if "finish_reason" in received.reports:
        tensors["finish_reason"] = _strings(end.reason if end else "None")
        if end is not None:
            tensors["stop_reason"] = _strings(json.dumps(end.stop_reason))
    if "logprobs" in received.reports:
        positions = [_position(p) for delta in deltas for p in delta.logprobs or ()]
        with_logprobs = received.request.logprobs is not None
        tensors["logprobs"] = _strings(json.dumps(positions if with_logprobs else None))
    if "num_input_tokens" in received.reports:
        tensors["num_input_tokens"] = np.array([prompt_tokens], np.uint32)
    if "num_output_tokens" in received.reports:
        count = sum(len(delta.token_ids) for delta in deltas)
        tensors["num_output_tokens"] = np.array([count], np.uint32)
    return tensors


def _own(request: Any) -> str:
    """Returns the request's own parameters, without Triton's."""
    parameters = json.loads(request.parameters() or "{}")
    return json.dumps({k: v for k, v in parameters.items() if not k.startswith("triton_")})


def _sampling(encoded: str) -> dict[str, Any]:
    try:
        sampling = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise RequestError(
            f"'sampling_parameters' is not valid JSON: {reason}", param="sampling_parameters"
        ) from None
    if not isinstance(sampling, dict):
        raise RequestError(
            "'sampling_parameters' should be a JSON object", param="sampling_parameters"
        )
    return sampling


def _generate_request(
    request_id: str, prompt: str | list[int], sampling: Mapping[str, Any]
) -> GenerateRequest:
    """Makes the request, with the gateway's ranges and vLLM's default `max_tokens`.

    A `max_tokens` of null means no limit.
    """
    known = {name: sampling[name] for name in SAMPLING if name in sampling}
    extra = {name: value for name, value in sampling.items() if name not in known}
    if (other := next((name for name in _OTHER_NAMES if name in extra), None)) is not None:
        raise RequestError(
            f"unknown field '{other}': {_OTHER_NAMES[other]}", param=other, code="unknown_field"
        )
    refuse_unsupported(extra, dict.fromkeys(SAMPLING), "completion", "this model")
    body = validate(CompletionRequest, {"model": "", "prompt": prompt, **known}, Limits())
    if (body.n or 1) > 1:
        raise RequestError("'n': this model gives one answer to a request", param="n")
    return GenerateRequest(
        request_id=request_id,
        model=body.model,
        prompt=body.prompt[0],
        max_tokens=body.max_tokens if "max_tokens" in known else COMPLETION_MAX_TOKENS,
        seed=None if body.seed is None else body.seed % 2**64,
        logprobs=body.logprobs,
        **body.sampling(),
    )


def _text(encoded: bytes, name: str) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        raise RequestError(f"'{name}' is not UTF-8 text", param=name) from None


def _position(position: PositionLogprobs) -> dict[str, Any]:
    """Writes a position, keyed by token id because texts can collide.

    A chosen token that is also among the most likely ones has one entry.
    """
    ranks = {token.token_id: rank for rank, token in enumerate(position.top, 1)}
    chosen = _entry(position.chosen, ranks.get(position.chosen.token_id))
    entries = {str(position.chosen.token_id): chosen | {"text_offset": position.text_offset}}
    for token in position.top:
        entries.setdefault(str(token.token_id), _entry(token, ranks[token.token_id]))
    return entries


def _entry(token: TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {
        "logprob": token.logprob,
        "rank": rank,
        "decoded_token": token.text,
        "bytes": list(token.bytes),
    }


def _strings(text: str) -> Any:
    return np.array([text.encode()], np.object_)
