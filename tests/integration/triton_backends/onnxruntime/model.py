"""In place of Triton's ONNX Runtime backend: the same library on the same file, from Python.

Session options are those that the backend sets, and no more; types and dims of config.pbtxt are
compared with the graph's as its ValidateInputs does; requests that Triton has batched run as one.
"""

import json
import os

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
TYPES = {
    "TYPE_BOOL": "tensor(bool)",
    "TYPE_INT64": "tensor(int64)",
    "TYPE_FP16": "tensor(float16)",
    "TYPE_FP32": "tensor(float)",
}


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = LEVELS[int(config["optimization"]["graph"]["level"])]
        options.intra_op_num_threads = 2
        path = os.path.join(pb_utils.get_model_dir(), "model.onnx")
        self.session = onnxruntime.InferenceSession(path, options)
        self.batched = config["max_batch_size"] > 0
        self.check(config["input"], self.session.get_inputs())
        self.check(config["output"], self.session.get_outputs())
        self.outputs = [tensor["name"] for tensor in config["output"]]

    def check(self, declared, actual):
        assert {tensor["name"] for tensor in declared} == {tensor.name for tensor in actual}
        by_name = {tensor.name: tensor for tensor in actual}
        for tensor in declared:
            found = by_name[tensor["name"]]
            assert TYPES[tensor["data_type"]] == found.type, (tensor, found.type)
            dims = [-1] * self.batched + [int(size) for size in tensor["dims"]]
            shape = [size if isinstance(size, int) else -1 for size in found.shape]
            assert dims == shape, (tensor, shape)

    def execute(self, requests):
        names = [tensor.name() for tensor in requests[0].inputs()]
        rows = [
            {name: pb_utils.get_input_tensor_by_name(r, name).as_numpy() for name in names}
            for r in requests
        ]
        joined = {name: np.concatenate([row[name] for row in rows]) for name in names}
        results = self.session.run(self.outputs, joined)
        ends = np.cumsum([len(row[names[0]]) for row in rows])[:-1]
        split = [np.split(result, ends) for result in results]
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(name, np.ascontiguousarray(part[index]))
                    for name, part in zip(self.outputs, split, strict=True)
                ]
            )
            for index in range(len(requests))
        ]
