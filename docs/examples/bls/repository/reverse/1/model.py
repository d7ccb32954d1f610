"""From the end to the beginning."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.inputs()[0].as_numpy().item().decode()) for request in requests]

    def answer(self, text):
        return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", np.array([text[::-1]], dtype=object))])
