"""Request fields beyond those that every backend serves: refused by name, never dropped.

A server that speaks OpenAI's protocol gets them verbatim and decides itself. The other backends
refuse a field that would change the answer. A value that changes nothing (`presence_penalty: 0`)
passes.
"""

from collections.abc import Mapping
from typing import Any

from octet.errors import UnsupportedField, nearest

__all__ = ["UNSUPPORTED", "elsewhere", "refuse_unsupported"]

# Field -> the values, besides null, that have no effect.
_PENALTIES: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "priority": (0,),
    "return_token_ids": (False,),
}
# vLLM 0.32's own fields, besides those above.
_VLLM: dict[str, tuple[Any, ...]] = {
    "thinking_token_budget": (),
    "include_reasoning": (True, False),
    "watermarking": (),
    "truncation_side": (),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "stream_interval": (1,),
}
# Fields that describe the caller or the accounting of the call: they do not affect the answer.
_ANY = object()
_CALLER: dict[str, tuple[Any, ...]] = {
    "user": (_ANY,),
    "request_id": (_ANY,),
    "session_id": (_ANY,),
    "cache_salt": (_ANY,),
    "safety_identifier": (_ANY,),
    "prompt_cache_key": (_ANY,),
    "prompt_cache_retention": (_ANY,),
    "service_tier": ("auto", "default"),
    "store": (_ANY,),
    "metadata": (_ANY,),
}
_COMPLETION: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}
_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools, nothing to choose
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}
UNSUPPORTED = {
    "completion": _PENALTIES | _VLLM | _CALLER | _COMPLETION,
    "chat": _PENALTIES | _VLLM | _CALLER | _CHAT,
}

# Fields of OpenAI's API, or of old releases, that `vllm serve` does not honour either.
_NOWHERE = (
    *("suffix", "best_of", "functions", "function_call", "modalities", "audio", "prediction"),
    *("verbosity", "web_search_options"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


def elsewhere(field: str) -> str:
    """Returns what helps with a field that a backend refuses; "" if nothing does."""
    if field in _NOWHERE:
        return ""
    return "; vLLM accepts it: serve the model with `vllm serve`, from `octet export checkpoint`"


def refuse_unsupported(
    extra: Mapping[str, Any], known: Mapping[str, Any], dialect: str, backend: str
) -> None:
    """Raises UnsupportedField for the first of `extra` that `backend` would have to ignore.

    `extra` are the fields of the request outside its schema, `known` those of the schema.
    """
    neutral = UNSUPPORTED[dialect]
    for name, value in extra.items():
        if name not in neutral:
            close = nearest(name, [*known, *neutral])
            hint = close if close.startswith("; did") else ""
            raise UnsupportedField(
                f"unknown field '{name}'{hint}", param=name, code="unknown_field"
            )
        allowed = neutral[name]
        if value is not None and _ANY not in allowed and not any(_same(value, v) for v in allowed):
            raise UnsupportedField(
                f"'{name}' is not supported by {backend}{elsewhere(name)}",
                param=name,
                code="unsupported_field",
            )


def _same(value: Any, neutral: Any) -> bool:
    # 0 and 0.0 are the same number, but False is not 0.
    return bool(isinstance(value, bool) == isinstance(neutral, bool) and value == neutral)
