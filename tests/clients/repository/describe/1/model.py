"""What a model is told beside its inputs, as JSON; headers that the server forwards are among it."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = np.array([request.parameters()], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("PARAMETERS", text)])
