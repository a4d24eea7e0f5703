"""In place of Triton's vLLM backend: its surface as that backend's src/model.py has it, no vLLM.

It reads model.json where that does, finds the checkpoint as vLLM does (a path, from the working
directory) and answers with what it found, in one response or in two.
"""

import asyncio
import json
import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

INPUTS = {"text_input": "TYPE_STRING", "stream": "TYPE_BOOL", "sampling_parameters": "TYPE_STRING"}


class TritonPythonModel:
    @classmethod
    def auto_complete_config(cls, config):
        for name, kind in INPUTS.items():
            optional = name != "text_input"
            config.add_input({"name": name, "data_type": kind, "dims": [1], "optional": optional})
        config.add_output({"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]})
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        with open(os.path.join(pb_utils.get_model_dir(), "model.json")) as file:
            self.arguments = json.load(file)
        with open(os.path.join(self.arguments["model"], "config.json")) as file:
            self.quantization = json.load(file)["quantization_config"]["quant_method"]
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def execute(self, requests):
        for request in requests:
            asyncio.run_coroutine_threadsafe(self.answer(request), self.loop)

    async def answer(self, request):
        def text(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0].decode()

        sender = request.get_response_sender()
        facts = [self.quantization, self.arguments["kv_cache_dtype"], os.getcwd()]
        said = json.dumps([text("text_input"), json.loads(text("sampling_parameters")), *facts])
        output = pb_utils.Tensor("text_output", np.array([said.encode()], np.object_))
        sender.send(
            pb_utils.InferenceResponse([output]),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    def finalize(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
