"""Checks the token counts that backends report, because keys are charged for them."""

from serve.api.operation import Call, Tally
from serve.backends.bounds import MAX_TOKENS

__all__ = ["longest_answer", "reported", "written"]

# Tokens that a chat template may add to a request: a default system prompt, tools, roles.
TEMPLATE = 8192
# Content whose number of tokens does not depend on the bytes of the request.
_ATTACHED = (b"image", b"audio", b"video", b"file")


def reported(call: Call, tally: Tally, choices: int, context: int | None) -> tuple[int, int] | None:
    """Returns the tokens of prompt and answer that the backend reported.

    None if it reported none, or more than the request can have; the caller then estimates.
    `context` is the longest prompt and answer, in tokens, of the backend that answered, if known.
    """
    prompt, answer = tally.prompt_tokens, tally.completion_tokens or 0
    if prompt is None or prompt < 0:
        return None
    if prompt > len(call.raw) and prompt > _longest_prompt(call, choices, context):
        return None
    return (prompt, answer) if 0 <= answer <= longest_answer(call, choices, context) else None


def written(call: Call, events: int, choices: int) -> int:
    """Estimates the tokens of an answer of so many streamed events.

    The first event of each of vLLM's choices has one token, in a chat after one that only opens it;
    each further one has as many as the request asks for.
    """
    interval = call.data.get("stream_interval")
    each = interval if type(interval) is int and interval > 1 else 1
    first = min(events, choices * (2 if "messages" in call.data else 1))
    return first + (events - first) * each


def _longest_prompt(call: Call, choices: int, context: int | None) -> int:
    """Returns the most tokens of the prompt: each is a byte of the request, or of the template."""
    if any(kind in call.raw for kind in _ATTACHED):
        return (context or MAX_TOKENS) * choices
    return len(call.raw) + TEMPLATE * choices


def longest_answer(call: Call, choices: int, context: int | None) -> int:
    """Returns the most tokens of all choices together; some servers count the end token, too."""
    known = type(call.body).model_fields  # a backend may ignore any other field
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    limits = (getattr(call.body, name) for name in names if name in known)
    limit = next((limit for limit in limits if limit is not None), None)
    return choices * (((context or MAX_TOKENS) if limit is None else limit) + 1)
