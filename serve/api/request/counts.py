"""Decides which counts of tokens an answer can have: keys are charged for what backends report."""

from serve.api.operation import Call, Tally
from serve.backends.bounds import MAX_TOKENS

__all__ = ["longest_answer", "reported"]

# Tokens that a chat template may add to a request: a default system prompt, tools, roles.
TEMPLATE = 8192
# Kinds of content whose number of tokens has nothing to do with the length of the request.
_ATTACHED = (b"image", b"audio", b"video", b"file")


def reported(call: Call, tally: Tally, choices: int) -> tuple[int, int] | None:
    """Returns prompt and answer tokens as the backend reports them.

    None if it reports none, or more than the request can have: then they are estimated.
    """
    prompt, answer = tally.prompt_tokens, tally.completion_tokens or 0
    if prompt is None or prompt < 0:
        return None
    if prompt > len(call.raw) and prompt > _longest_prompt(call, choices):
        return None
    return (prompt, answer) if 0 <= answer <= longest_answer(call, choices) else None


def _longest_prompt(call: Call, choices: int) -> int:
    """Every token is at least one byte of the request, or belongs to the template."""
    if any(kind in call.raw for kind in _ATTACHED):
        return _context(call) * choices
    return len(call.raw) + TEMPLATE * choices


def longest_answer(call: Call, choices: int) -> int:
    """Returns the tokens that all choices together can have; some servers count the end, too."""
    known = type(call.body).model_fields  # any other field is for the backend: no limit to rely on
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    limits = (getattr(call.body, name) for name in names if name in known)
    limit = next((limit for limit in limits if limit is not None), None)
    return choices * ((_context(call) if limit is None else limit) + 1)


def _context(call: Call) -> int:
    return call.route.context_length or MAX_TOKENS
