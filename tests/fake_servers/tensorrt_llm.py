"""A fake Triton with TensorRT-LLM's models, after the templates in its triton_backend."""

from typing import Any, Literal

import numpy as np

from octet.errors import RequestError
from serve.engine.request import Delta, Finished, GenerateRequest
from tests.fake_servers.triton import FakeTriton, tensors
from tests.fakes import END

__all__ = ["FakeTensorRtLlm"]

Model = Literal["ensemble", "bls", "engine"]
_TEXT_INPUTS = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "end_id": "INT32",
    "top_k": "INT32",
    "top_p": "FP32",
    "temperature": "FP32",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
}
_COUNTS = {"return_num_input_tokens": "BOOL", "return_num_output_tokens": "BOOL"}
_ENGINE_INPUTS = {
    "input_ids": "INT32",
    "input_lengths": "INT32",
    "request_output_len": "INT32",
    "end_id": "INT32",
    "pad_id": "INT32",
    "stop_words_list": "INT32",
    "runtime_top_k": "INT32",
    "runtime_top_p": "FP32",
    "temperature": "FP32",
    "seed": "UINT64",
    "streaming": "BOOL",
    "exclude_input_in_output": "BOOL",
}


class FakeTensorRtLlm(FakeTriton):
    """`ensemble` sends pieces of text, `bls` all of it each time, `engine` the ids.

    Without `counts`, it is of the time before TensorRT-LLM counted tokens.
    """

    def __init__(self, delay_s: float = 0.0, *, model: Model = "ensemble", counts: bool = True):
        super().__init__(delay_s)
        self.model = model
        self.counts = counts
        self.batched = True
        self.decoupled = model != "ensemble"  # an ensemble's configuration does not say
        self.platform = "ensemble" if model == "ensemble" else "python"
        self.parameters = {"accumulate_tokens": "true"} if model == "bls" else {}
        if model == "engine":
            self.inputs = _ENGINE_INPUTS
        else:
            seed = {"seed" if counts else "random_seed": "UINT64"}
            self.inputs = _TEXT_INPUTS | seed | (_COUNTS if counts else {})

    def dims(self, name: str) -> list[int]:
        if name == "stop_words_list":
            return [2, -1]
        return [-1] if name in ("input_ids", "stop_words", "bad_words") else [1]

    def read(self, inputs: dict[str, list[Any]]) -> dict[str, Any]:
        def first(*names: str) -> Any:
            return next((inputs[name][0] for name in names if name in inputs), None)

        top_k = first("top_k", "runtime_top_k")
        if not first("stream", "streaming") or top_k is None:
            raise ValueError("the fake was asked for no stream, or would default to top_k 1")
        return {
            "prompt": first("text_input") or inputs["input_ids"],
            "max_tokens": first("max_tokens", "request_output_len"),
            "temperature": 0.0 if top_k == 1 else first("temperature"),
            "top_p": 1.0 if top_k == 1 else first("top_p", "runtime_top_p"),
            "top_k": top_k,
            "seed": first("seed", "random_seed"),
            "stop_token_ids": _words(inputs.get("stop_words_list", [])),
            "stop_words": inputs.get("stop_words", []),
            # The engine knows no end of its own: its callers say, the ensemble's tokenizer else.
            "ignore_eos": first("end_id") == -1,
        }

    def write(self, event: Any, wanted: GenerateRequest, body: dict[str, Any]) -> Any:
        if isinstance(event, Finished):
            return tensors({})
        if self.model == "engine":
            padded = np.array([[[*event.token_ids, -1]]], np.int32)
            length = np.array([[len(event.token_ids)]], np.int32)
            return tensors({"output_ids": padded, "sequence_length": length})
        assert isinstance(event, Delta)
        whole = body["whole"] = body.get("whole", "") + event.text
        # A stop string ends the answer, and is part of it.
        body["stopped"] = any(word in whole for word in body["stop_words"])
        found: dict[str, Any] = {"text_output": whole if self.model == "bls" else event.text}
        if self.counts:
            prompt = wanted.prompt
            read = len(prompt.encode() if isinstance(prompt, str) else prompt)  # a byte a token
            # The executor leaves out an end token that ended the answer.
            ids = [token for token in event.token_ids if wanted.ignore_eos or token != END]
            found["num_output_tokens"] = np.array([[len(ids)]], np.int32)
            found["num_input_tokens"] = np.array([[read]], np.int32)
        return tensors(found)

    def refusal(self, error: RequestError) -> str:
        return (
            "Executor failed process requestId 1 due to the following error: Encountered an error "
            "when fetching new request: Prompt length (600) exceeds maximum input length (512)."
        )


def _words(flat: list[int]) -> list[int]:
    """The words of one token in [2, N]: tokens, then where each word ends."""
    tokens = flat[: len(flat) // 2]
    assert flat[len(flat) // 2 :] == list(range(1, len(tokens) + 1))
    return tokens
