"""In place of Triton's TensorRT backend, on a machine without a GPU: it reads no plan.

It refuses what that backend's GetMostOptimizedProfile would, and answers zeros of the right shapes.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.outputs = [(t["name"], t["data_type"], t["dims"]) for t in config["output"]]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        batch, tokens = arrays["input_ids"].shape
        if batch > 1 and tokens > 1:
            raise pb_utils.TritonModelException("failed to find any Optimization Profile")
        past = arrays["past_key_values.0.key"]
        assert arrays["attention_mask"].shape == (batch, 1, tokens, past.shape[2] + tokens)
        free = {"logits": arrays["logit_positions"].shape}
        tensors = []
        for name, kind, dims in self.outputs:
            sizes = iter(free.get(name, (batch, tokens)))
            shape = [next(sizes) if int(size) == -1 else int(size) for size in dims]
            dtype = pb_utils.triton_string_to_numpy(kind)
            tensors.append(pb_utils.Tensor(name, np.zeros(shape, dtype)))
        return pb_utils.InferenceResponse(tensors)
