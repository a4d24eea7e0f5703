"""The interface of Triton's vLLM backend, which Octet's Python entry shares.

Inputs are the text (Octet's entry also takes token ids) and SamplingParams as JSON. Outputs are
text, finish reason, counts and log-probabilities, each of one response alone.
"""

import json
from collections.abc import Mapping
from typing import Any

from octet.errors import BackendError
from serve.backends.bounds import MAX_REPORT
from serve.backends.triton_prompt import prompt_text, unsupported
from serve.backends.triton_tensors import Inputs, Outputs, Signature, count_in, text_in
from serve.engine.request import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from serve.engine.tokenizer import Tokenizer

__all__ = ["NO_LIMIT", "VllmDialect"]

NO_LIMIT = 1 << 20  # tokens: more than any context, so that the engine ends at its own
_REPORTS = ("finish_reason", "num_input_tokens", "num_output_tokens")
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class VllmDialect:
    """Writes inputs for the vLLM backend. `tokenizer` turns ids into text if it takes only text."""

    def __init__(self, name: str, signature: Signature, tokenizer: Tokenizer | None) -> None:
        self._name = name
        self._takes_ids = "input_ids" in signature.inputs
        self._returns_logprobs = "return_logprobs" in signature.inputs
        self._tokenizer = tokenizer

    def write(self, request: GenerateRequest, inputs: Inputs) -> None:
        """Writes the inputs. Raises RequestError for a field that the model has no input for."""
        prompt = request.prompt
        if not isinstance(prompt, str) and self._takes_ids:
            inputs.add("input_ids", *prompt)
        else:
            inputs.add("text_input", prompt_text(self._name, self._tokenizer, prompt))
        # vLLM's backend drops a null and falls back to 16 tokens; in Octet's entry it is no limit.
        limit = request.max_tokens or (None if self._takes_ids else NO_LIMIT)
        sampling = {
            "max_tokens": limit,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            **request.optional,
        }
        inputs.add("sampling_parameters", json.dumps(sampling))
        flags = ["stream", "exclude_input_in_output", *(f"return_{report}" for report in _REPORTS)]
        if request.logprobs is not None:
            if not self._returns_logprobs:
                raise unsupported(self._name, "logprobs", "its model does not return any")
            flags.append("return_logprobs")
        for flag in flags:
            inputs.add_if_known(flag, True)

    def answer(self, request: GenerateRequest) -> "VllmAnswer":
        return VllmAnswer(self._name, request)


class VllmAnswer:
    """Reads the responses of one request: deltas as they come, the counts at the end."""

    ended = False  # the backend itself ends the stream

    def __init__(self, name: str, request: GenerateRequest) -> None:
        self._name = name
        self._logprobs = request.logprobs
        self._reason = ""
        self._stop_reason: str | int | None = None
        self._read = self._written = 0
        self._offset = 0  # characters before the next token

    def read(self, outputs: Outputs) -> Delta | None:
        """Returns the Delta of one response; None if it has no text, token or log-probability."""
        reason = text_in(outputs, "finish_reason")
        if reason and reason != "None":  # the vLLM backend writes Python's None until the end
            self._reason = reason
        if "stop_reason" in outputs:  # of Octet's entry, as JSON
            self._stop_reason = json.loads(_short(text_in(outputs, "stop_reason")))
        self._read = count_in(outputs, "num_input_tokens", self._read)
        self._written += count_in(outputs, "num_output_tokens", 0)
        text = text_in(outputs, "text_output")
        positions = None
        if self._logprobs is not None:
            found = json.loads(_short(text_in(outputs, "logprobs", "[]"))) or ()
            positions = tuple(map(self._position, found))
        token_ids = tuple(p.chosen.token_id for p in positions or ())
        return Delta(text, token_ids, positions) if text or token_ids else None

    def finish(self) -> list[Event]:
        """Returns the events that end the answer. Raises BackendError if its end did not come."""
        if self._reason == "abort":  # vLLM ends all its requests like this when it is stopped
            raise BackendError(f"{self._name}: aborted the request", kind="lost")
        if self._reason not in _REASONS:
            message = f"with '{self._reason}'" if self._reason else "without a finish_reason"
            raise BackendError(
                f"{self._name}: the answer ended {message}",
                kind="failed" if self._reason else "garbled",
            )
        usage = Usage(self._read, self._written)
        return [Finished(_REASONS[self._reason], usage, self._stop_reason)]

    def _position(self, entries: dict[str, dict[str, Any]]) -> PositionLogprobs:
        """Reads a position: token id → {logprob, rank, decoded_token}, the chosen token first.

        Our own entry adds `bytes`, and to the chosen token its `text_offset`.
        """
        tokens = [
            TokenLogprob(int(i), e.get("decoded_token") or "", _bytes_of(e), e["logprob"])
            for i, e in entries.items()
        ]
        best = sorted(tokens, key=lambda token: -(token.logprob or 0.0))[: self._logprobs]
        chosen, first = tokens[0], next(iter(entries.values()))
        offset = first.get("text_offset", self._offset)
        self._offset = offset + len(chosen.text)
        return PositionLogprobs(chosen, tuple(best), offset)


def _short(text: str) -> str:
    if len(text) > MAX_REPORT:
        raise ValueError(f"its JSON has more than {MAX_REPORT} characters")
    return text


def _bytes_of(entry: Mapping[str, Any]) -> bytes:
    if "bytes" in entry:
        return bytes(list(entry["bytes"]))  # bytes(n) of a number would make n zeros
    return str(entry.get("decoded_token") or "").encode()
