"""TensorRT-LLM's two interfaces in Triton: text in and out, and the engine's own token ids.

`ensemble` and `tensorrt_llm_bls` tokenize: text_input → text_output. The bare `tensorrt_llm` takes
and returns ids, and the gateway's tokenizer does the rest. From TensorRT-LLM's triton_backend
source:

- A streamed response has only the new tokens, except from a BLS model with `accumulate_tokens`,
  which sends the whole text each time.
- No response gives the reason why an answer ended. Counts are those of one response.
- A stop string is part of the text. A limit beyond the context is clipped to it.
- Log-probabilities are those of the chosen tokens only, so requests for them are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from octet.errors import BackendUnavailable
from serve.backends.triton_prompt import prompt_ids, prompt_text, unsupported
from serve.backends.triton_tensors import Inputs, Outputs, Signature, count_in, text_in
from serve.backends.triton_vllm import NO_LIMIT
from serve.engine.request import Delta, Event, Finished, GenerateRequest, Usage
from serve.engine.tokenizer import StopChecker, Tokenizer

__all__ = ["IdsDialect", "TextDialect"]

_NO_LOGPROBS = "its model returns those of the chosen tokens alone"
_COUNTS = ("return_num_input_tokens", "return_num_output_tokens")


@dataclass(frozen=True)
class TextDialect:
    """`text_input` and `max_tokens` → `text_output`."""

    name: str
    signature: Signature
    tokenizer: Tokenizer | None
    cumulative: bool  # each response has the whole text
    stream: bool  # there may be several responses

    def write(self, request: GenerateRequest, inputs: Inputs) -> None:
        """Writes the inputs. Raises RequestError for a field that the model does not support."""
        if request.logprobs is not None:
            raise unsupported(self.name, "logprobs", _NO_LOGPROBS)
        if request.stop_token_ids:
            raise unsupported(self.name, "stop_token_ids", "its model takes stop strings")
        if self.tokenizer is None and not all(flag in self.signature.inputs for flag in _COUNTS):
            raise BackendUnavailable(
                f"{self.name}: its model does not count tokens: give the backend a tokenizer",
                kind="failed",
            )
        inputs.add("text_input", prompt_text(self.name, self.tokenizer, request.prompt))
        inputs.add("max_tokens", request.max_tokens or NO_LIMIT)
        _add_sampling(self.name, request, inputs, "top_k", "top_p")
        if request.stop and "stop_words" in inputs:
            inputs.add("stop_words", *request.stop)
        if request.ignore_eos and not inputs.add_if_known("end_id", -1):
            raise unsupported(self.name, "ignore_eos", "its model has no input 'end_id'")
        inputs.add_if_known("stream", self.stream)
        for flag in ("exclude_input_in_output", *_COUNTS):
            inputs.add_if_known(flag, True)

    def answer(self, request: GenerateRequest) -> "TextAnswer":
        return TextAnswer(request, self.tokenizer, cumulative=self.cumulative)


@dataclass(frozen=True)
class IdsDialect:
    """`input_ids` and `request_output_len` → `output_ids`."""

    name: str
    tokenizer: Tokenizer | None
    ends: tuple[int, ...]  # the model's end tokens
    stream: bool  # there may be several responses

    def write(self, request: GenerateRequest, inputs: Inputs) -> None:
        """Writes the inputs. Raises RequestError for a field that the model does not support."""
        if request.logprobs is not None:
            raise unsupported(self.name, "logprobs", _NO_LOGPROBS)
        if self.tokenizer is None or not (self.ends or request.ignore_eos):
            raise BackendUnavailable(
                f"{self.name}: its model returns token ids: give the backend a tokenizer, with "
                "the config.json or generation_config.json that names the end token",
                kind="failed",
            )
        ids = prompt_ids(self.name, self.tokenizer, request.prompt)
        inputs.add("input_ids", *ids)
        inputs.add("input_lengths", len(ids))
        inputs.add("request_output_len", request.max_tokens or NO_LIMIT)
        _add_sampling(self.name, request, inputs, "runtime_top_k", "runtime_top_p")
        ends = () if request.ignore_eos else self.ends
        inputs.add_if_known("end_id", ends[0] if ends else -1)
        if ends:
            inputs.add_if_known("pad_id", ends[0])
        words = [(token,) for token in (*ends[1:], *request.stop_token_ids)]
        if words and "stop_words_list" in inputs:
            flat = [token for word in words for token in word]
            offsets = list(accumulate(map(len, words)))  # where each word ends
            inputs.add("stop_words_list", *flat, *offsets, shape=(2, len(flat)))
        inputs.add_if_known("streaming", self.stream)
        inputs.add_if_known("exclude_input_in_output", True)

    def answer(self, request: GenerateRequest) -> "IdsAnswer":
        assert self.tokenizer is not None  # else `write` has refused
        ids = prompt_ids(self.name, self.tokenizer, request.prompt)
        ends = () if request.ignore_eos else self.ends
        return IdsAnswer(request, ids, self.tokenizer, ends)


class _Answer:
    """The text of one answer up to the first stop string, and why it ended."""

    def __init__(self, request: GenerateRequest) -> None:
        self.ended = False  # True once it is complete, though the model may go on
        self._stops = StopChecker(request.stop)
        self._limit = request.max_tokens or NO_LIMIT
        self._stopped_by: str | int | None = None
        self._read = self._written = 0  # tokens

    def _show(self, text: str) -> str:
        """Returns the part of `text` that cannot be the beginning of a stop string."""
        safe, stop = self._stops.push(text)
        if stop is not None:
            self.ended, self._stopped_by = True, stop
        return safe

    def _finish(self, rest: str) -> list[Event]:
        """Returns the last events; `rest` is text held back because a character was incomplete."""
        length = not self.ended and self._written >= self._limit
        text = "" if self._stopped_by is not None else self._show(rest) + self._stops.flush()
        length = length and self._stopped_by is None
        end = Finished(
            "length" if length else "stop", Usage(self._read, self._written), self._stopped_by
        )
        return [Delta(text, ()), end] if text else [end]


class TextAnswer(_Answer):
    """Reads responses with the next piece of the text, or with all of it so far."""

    def __init__(
        self, request: GenerateRequest, tokenizer: Tokenizer | None, *, cumulative: bool
    ) -> None:
        super().__init__(request)
        self._prompt = request.prompt
        self._tokenizer = tokenizer
        self._cumulative = cumulative
        self._text = ""  # all that came
        self._shown = 0  # characters of it

    def read(self, outputs: Outputs) -> Delta | None:
        self._read = count_in(outputs, "num_input_tokens", self._read)
        self._written += count_in(outputs, "num_output_tokens", 0)
        piece = text_in(outputs, "text_output")
        self._text = piece or self._text if self._cumulative else self._text + piece
        if self._cumulative:
            # An incomplete character is U+FFFD until a later response completes it.
            piece = self._text.rstrip("\ufffd")[self._shown :]
        self._shown += len(piece)
        text = self._show(piece)
        return Delta(text, ()) if text else None

    def finish(self) -> list[Event]:
        if self._tokenizer is not None and not self._read:
            self._read = len(prompt_ids("", self._tokenizer, self._prompt))
        if self._tokenizer is not None and not self._written:
            self._written = len(self._tokenizer.encode(self._text, add_special_tokens=False))
        return self._finish(self._text[self._shown :])


class IdsAnswer(_Answer):
    """Reads responses with new token ids, padded with -1."""

    def __init__(
        self,
        request: GenerateRequest,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        ends: Sequence[int],
    ) -> None:
        super().__init__(request)
        self._read = len(prompt)
        self._detokenizer = tokenizer.detokenizer(prompt)
        self._ends = frozenset(ends)
        self._stop_ids = frozenset(request.stop_token_ids)

    def read(self, outputs: Outputs) -> Delta | None:
        text, ids = "", []
        for token in outputs.get("output_ids", ()):
            if token < 0 or self.ended:
                break
            ids.append(token)
            self._written += 1
            if token in self._stop_ids:
                self.ended, self._stopped_by = True, token
            elif token in self._ends:
                self.ended = True
            else:
                text += self._show(self._detokenizer.push(token))
        return Delta(text, tuple(ids)) if ids else None

    def finish(self) -> list[Event]:
        return self._finish(self._detokenizer.flush())


def _add_sampling(
    name: str, request: GenerateRequest, inputs: Inputs, top_k: str, top_p: str
) -> None:
    """Writes top_k, top_p, temperature and seed.

    If top_k is left out, the model uses 1; 0 turns it off. Greedy is sent as top_k 1, because the
    model would divide by a temperature of 0. Raises UnsupportedField for a seed without an input.
    """
    greedy = request.temperature == 0
    inputs.add(top_k, 1 if greedy else request.top_k)
    if not greedy:
        inputs.add(top_p, request.top_p)
        inputs.add("temperature", request.temperature)
    if request.seed is None:
        return
    for seed in ("seed", "random_seed"):  # the latter is its older name
        if inputs.add_if_known(seed, request.seed):
            return
    raise unsupported(name, "seed", "its model has no such input")
