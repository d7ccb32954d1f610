"""The names of the inputs that came."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        names = sorted(tensor.name() for tensor in request.inputs())
        return pb_utils.InferenceResponse([pb_utils.Tensor("NAMES", np.array([names], dtype=object))])
