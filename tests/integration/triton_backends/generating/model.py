"""In place of Triton's vLLM backend and of TensorRT-LLM's models: their surfaces, our engine.

Triton itself checks names, types and shapes, and carries the rest. Parameters of config.pbtxt:
  interface  whose inputs and outputs these are: "vllm", "bls" (text, all of it each time),
             "ensemble" (text, piece by piece) or "engine" (token ids)
  export     an ONNX export to answer from
  live       a file for the number of requests under way, which Triton does not say: it counts a
             decoupled request as done once the model has taken it
"""

import dataclasses
import json
import os
import threading
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from octet.errors import RequestError
from serve.backends.embedded import Loaded, load_export
from serve.engine.engine import Engine
from serve.engine.request import Finished, GenerateRequest

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.interface = parameters["interface"]["string_value"]
        runner, tokenizer = load_export(Path(parameters["export"]["string_value"]), 1)
        self.loaded = Loaded(Engine(runner, self.deliver), tokenizer, runner.spec)
        self.live = {}
        self.telling = threading.Lock()  # by two threads: the last word must be true
        self.told = Path(parameters["live"]["string_value"])
        self.tell()
        self.loaded.engine.start()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            arrays = {t.name(): t.as_numpy().reshape(-1).tolist() for t in request.inputs()}
            asked = vllm(arrays) if self.interface == "vllm" else tensorrt_llm(arrays)
            # Both clip a limit to the context, where our engine refuses it.
            limit = min(asked.max_tokens, self.loaded.engine.context)
            asked, prompt = dataclasses.replace(asked, max_tokens=limit), asked.prompt
            ids = self.loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            try:
                generation = self.loaded.checked(asked, ids)
            except RequestError:
                message = REFUSALS[self.interface == "vllm"].format(len(ids))
                failure = pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
                sender.send(failure, flags=FINAL)
                continue
            words = [word.decode() for word in arrays.get("stop_words", [])]
            self.live[generation] = (sender, words, [""], len(ids))
            self.tell()
            self.loaded.engine.submit(generation)

    def tell(self):
        draft = self.told.with_suffix(".draft")
        with self.telling:
            draft.write_text(str(len(self.live)))
            os.replace(draft, self.told)

    def deliver(self, deliveries):
        for generation, outcome in deliveries:
            if generation not in self.live:
                continue
            sender, words, whole, read = self.live[generation]
            ended = not isinstance(outcome, list) or isinstance(outcome[-1], Finished)
            if sender.is_cancelled():
                self.loaded.engine.cancel(generation)
                del self.live[generation]
                self.tell()
                sender.send(flags=FINAL)
                continue
            text = "".join(getattr(event, "text", "") for event in outcome)
            ids = [i for event in outcome for i in getattr(event, "token_ids", ())]
            whole[0] += text
            stopped = any(word in whole[0] for word in words)
            end = outcome[-1] if ended else None
            tensors = getattr(self, self.interface)(text, ids, whole[0], read, end)
            response = pb_utils.InferenceResponse(tensors)
            sender.send(response, flags=FINAL if ended or stopped else 0)
            if ended or stopped:
                self.loaded.engine.cancel(generation)
                del self.live[generation]
                self.tell()

    def vllm(self, text, ids, _whole, read, end):
        reason = end.reason if end else "None"
        return [
            strings("text_output", text),
            strings("finish_reason", reason),
            pb_utils.Tensor("num_input_tokens", np.array([read], np.uint32)),
            pb_utils.Tensor("num_output_tokens", np.array([len(ids)], np.uint32)),
        ]

    def bls(self, _text, ids, whole, read, _end):
        return [strings("text_output", whole), *counts(read, self.shown(ids))]

    def ensemble(self, text, ids, _whole, read, _end):
        return [strings("text_output", text), *counts(read, self.shown(ids))]

    def engine(self, _text, ids, _whole, _read, _end):
        found = self.shown(ids)
        return [
            pb_utils.Tensor("output_ids", np.array([[[*found, -1]]], np.int32)),
            pb_utils.Tensor("sequence_length", np.array([[len(found)]], np.int32)),
        ]

    def shown(self, ids):
        return [token for token in ids if token not in self.loaded.spec.eos_token_ids]

    def finalize(self):
        self.loaded.engine.close()


# Of vLLM's input processor and of TensorRT-LLM's executor.
REFUSALS = (
    "Executor failed process requestId 1 due to the following error: Encountered an error when "
    "fetching new request: Prompt length ({}) exceeds maximum input length (1024).",
    "Error generating stream: The decoder prompt (length {}) is longer than the maximum model "
    "length of 1024. Make sure that `max_model_len` is no smaller than the number of text tokens.",
)


def vllm(arrays):
    sampling = json.loads(arrays["sampling_parameters"][0])
    sampling.pop("n", None)
    sampling["stop"] = tuple(sampling.get("stop", ()))
    sampling["stop_token_ids"] = tuple(sampling.get("stop_token_ids", ()))
    sampling = {name: value for name, value in sampling.items() if value is not None}
    sampling.setdefault("max_tokens", 16)
    prompt = arrays["text_input"][0].decode()
    return GenerateRequest(request_id="", model="", prompt=prompt, **sampling)


def tensorrt_llm(arrays):
    def first(*names, default=None):
        return next((arrays[name][0] for name in names if name in arrays), default)

    top_k = first("top_k", "runtime_top_k", default=1)
    text = first("text_input")
    return GenerateRequest(
        request_id="",
        model="",
        prompt=arrays["input_ids"] if text is None else text.decode(),
        max_tokens=first("max_tokens", "request_output_len"),
        temperature=0.0 if top_k == 1 else first("temperature", default=1.0),
        top_p=first("top_p", "runtime_top_p", default=1.0),
        top_k=top_k,
        seed=first("seed"),
        ignore_eos=first("end_id") == -1,
    )


def strings(name, text):
    return pb_utils.Tensor(name, np.array([text.encode()], np.object_))


def counts(read, ids):
    return [
        pb_utils.Tensor("num_input_tokens", np.array([[read]], np.int32)),
        pb_utils.Tensor("num_output_tokens", np.array([[len(ids)]], np.int32)),
    ]
