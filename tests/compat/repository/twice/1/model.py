"""Twice its input; 13 is refused."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, x):
        if x.item() == 13:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("unlucky", pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * x)])
