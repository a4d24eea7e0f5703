"""Classifies a failed call to Triton: the request's fault, or which failure of the server.

The gRPC status is not enough: an error of the model comes as a message of the stream, without a
status, and a model whose process died stays "ready". So the text of Triton's and its backends'
messages decides.
"""

import json
import re

import grpc

from octet.errors import BackendError, FailureKind, RequestError, printable
from serve.backends.bounds import PARSED
from serve.backends.openai_errors import Refusal, is_dead

__all__ = ["error_of"]

MOST = 2000  # characters of a message
_Signs = tuple[tuple[FailureKind, re.Pattern[str]], ...]

# In the order in which they are tried.
_KINDS: _Signs = (
    # From the Python backend about a dead process, from the vLLM backend about a dead engine, from
    # Octet's entry about its engine or its GPU.
    ("dead", re.compile(r"Stub process .* is not healthy|due to unhealthy vLLM engine")),
    ("dead", re.compile(r"^the embedded engine (is not running|failed;)|^the GPU failed \(")),
    ("lost", re.compile(r"^the embedded engine was stopped")),
    ("refused", re.compile(r"Request for unknown model|is not ready|failed to connect to all")),
    # dynamic_batching's queue policy; the queue of Octet's entry.
    ("overloaded", re.compile(r"[Ee]xceeds maximum queue size|are waiting for the embedded")),
    ("timeout", re.compile(r"[Rr]equest timeout expired")),
    ("garbled", re.compile(r"Received message larger than max")),  # gRPC's, with a status
)
# The backends' messages about a request that is plainly the client's mistake: pattern, param, code.
_CONTEXT = ("prompt", "context_length_exceeded")
_CLIENT = (
    # vLLM's input processor and its renderer.
    (re.compile(r"prompt \(length \d+\).* is longer than the maximum model length"), *_CONTEXT),
    (re.compile(r"This model's maximum context length is \d+ tokens"), *_CONTEXT),
    (re.compile(r"prompt cannot be empty"), "prompt", None),
    (re.compile(r"Token id \d+ is out of vocabulary"), "prompt", None),
    (re.compile(r"Requested sample logprobs of \d+.*max allowed"), "logprobs", None),
    # vLLM's backend for Triton logs why it cannot make SamplingParams, and goes on with None.
    (re.compile(r"'NoneType' object has no attribute 'lora_name'"), "sampling_parameters", None),
    # TensorRT-LLM's executor.
    (re.compile(r"[Pp]rompt length \(\d+\) exceeds maximum input length"), *_CONTEXT),
    (re.compile(r"number of context tokens \(\d+\) exceeds the limit"), *_CONTEXT),
    (re.compile(r"max_tokens must be a single value > 0"), "max_tokens", None),
)
# Addresses in gRPC's messages: "ipv4:10.0.0.1:8001: ", "for triton.internal:8001".
_ADDRESS = re.compile(
    r"\b(?:ipv[46]|unix|dns|vsock):\S*\s?|\bname=\S+\s?"
    r"|(?<=failed) for \S+?(?=:? )|(?<=resolving) \S+?(?=:? )"
)
_STATUS: dict[grpc.StatusCode, FailureKind] = {
    grpc.StatusCode.CANCELLED: "lost",
    grpc.StatusCode.NOT_FOUND: "refused",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overloaded",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
}


def error_of(name: str, code: grpc.StatusCode | None, details: str) -> BackendError | RequestError:
    """Returns the error for a call that ended with `details`."""
    message = printable(" ".join(details[:MOST].split()))
    # Refusals first: they may quote the request, which may contain anything.
    if (refusal := _own_refusal(details) or _known_refusal(message)) is not None:
        return refusal
    if code is not None:  # an error of gRPC itself
        message = _ADDRESS.sub("", message)
    return BackendError(f"{name}: {message}", kind=_kind(code, message) or "failed")


def _kind(code: grpc.StatusCode | None, message: str) -> FailureKind | None:
    if is_dead(message):
        return "dead"
    for kind, sign in _KINDS:
        if sign.search(message):
            return kind
    if code == grpc.StatusCode.UNAVAILABLE:  # the connection broke, or could not be made
        unmade = ("onnect" in message and "reset" not in message) or "resol" in message
        return "refused" if unmade else "lost"
    return _STATUS.get(code) if code is not None else None


def _own_refusal(details: str) -> RequestError | None:
    """Reads the refusal that Octet's entry returns: JSON, with the field at fault. Else None."""
    if len(details) > PARSED:
        return None
    try:
        error = json.loads(details)
        return Refusal(
            printable(str(error["message"])[:MOST]), param=error["param"], code=error["code"]
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _known_refusal(message: str) -> RequestError | None:
    for sign, param, code in _CLIENT:
        if sign.search(message):
            return RequestError(
                message.removeprefix("Error generating stream: "), param=param, code=code
            )
    return None
