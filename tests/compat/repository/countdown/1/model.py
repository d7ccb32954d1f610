"""Decoupled and iterative: COUNT executions, each with a response. FLAGS are those of the request."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            self.answer(request)

    def answer(self, request):
        key = request.correlation_id()
        left = self.left.pop(key, None)
        if left is None:
            left = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().item()
        left -= 1
        values = {"LEFT": left, "FLAGS": request.flags()}
        response = pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, np.array([[value]], dtype=np.int32)) for name, value in values.items()]
        )
        if left > 0:
            self.left[key] = left
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            request.get_response_sender().send(response)
        else:
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
