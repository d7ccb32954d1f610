"""Iterative: answers in the COUNT-th execution, with the flags of them all."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.flags = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        flags = self.flags.setdefault(request.correlation_id(), [])
        flags.append(request.flags())
        if len(flags) < pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().item():
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        del self.flags[request.correlation_id()]
        return pb_utils.InferenceResponse([pb_utils.Tensor("FLAGS", np.array([flags], dtype=np.int32))])
