"""Streams the numbers below `max_tokens`, one response each; `"cancellations"` asks for a count."""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.cancellations = 0

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        text = pb.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        if text == "cancellations":
            sender.send(response(str(self.cancellations)), flags=FINAL)
            return
        parameters = pb.get_input_tensor_by_name(request, "sampling_parameters")
        count = json.loads(parameters.as_numpy()[0])["max_tokens"]
        if count <= 0:
            error = pb.TritonError("max_tokens must be positive", pb.TritonError.INVALID_ARG)
            sender.send(pb.InferenceResponse(error=error), flags=FINAL)
            return
        for number in range(count):
            if request.is_cancelled():
                self.cancellations += 1
                error = pb.TritonError("cancelled", pb.TritonError.CANCELLED)
                sender.send(pb.InferenceResponse(error=error), flags=FINAL)
                return
            sender.send(response(f"{number} é"))
            time.sleep(0.02)
        sender.send(flags=FINAL)


def response(text):
    tensor = pb.Tensor("text_output", np.array([text.encode()], dtype=np.object_))
    return pb.InferenceResponse([tensor])
