"""Adds up the values of each sequence, which the oldest strategy brings one by one."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().item()
        key = request.correlation_id()
        self.sums[key] = x.item() + (0 if start else self.sums[key])
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.full(x.shape, self.sums[key], np.int32))])
