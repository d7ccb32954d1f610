"""The mean of all values of a sequence so far."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.seen = {}  # sequence -> number and sum of its values

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x, start, end = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy().item() for name in ("X", "START", "END")
        )
        sequence = request.correlation_id()
        count, total = (0, 0.0) if start else self.seen[sequence]
        self.seen[sequence] = (count + 1, total + x)
        mean = np.array([[(total + x) / (count + 1)]], dtype=np.float32)
        if end:
            del self.seen[sequence]
        return pb_utils.InferenceResponse([pb_utils.Tensor("MEAN", mean)])
