"""Limits what a backend may send: all limits that cannot be configured.

docs/limits.md lists them beside the configurable ones (`serve/config/gateway.py`), and the tests
that check them.
"""

__all__ = [
    "MAX_ELEMENTS",
    "MAX_EVENT",
    "MAX_EVENTS",
    "MAX_FIELDS",
    "MAX_PREAMBLE",
    "MAX_REFUSAL",
    "MAX_REPORT",
    "MAX_TOKENS",
    "PARSED",
    "PIECE",
]

PIECE = 32 * 1024  # bytes of a response that are handled before other requests get their turn
MAX_EVENT = 8 * 1024 * 1024  # bytes; log-probabilities of an echoed prompt can take 1M
MAX_EVENTS = 2048  # in one piece of a stream: only comments (":") are so short
MAX_PREAMBLE = 1024 * 1024  # bytes of a stream before its first token: comments, a chat's roles
MAX_REPORT = 1024 * 1024  # bytes of a load report, a list of models, a probe's answer
MAX_REFUSAL = 64 * 1024  # bytes of an error's body
# Bytes of JSON that are parsed, in 0.3 ms; in a larger answer, only single fields are searched for.
PARSED = 64 * 1024
MAX_FIELDS = 1024  # occurrences of one of these fields in an answer
MAX_ELEMENTS = 16 * 1024  # of an output tensor of Triton, in one response
MAX_TOKENS = 2**31  # no count of tokens is as large
