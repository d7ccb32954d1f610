"""Sleeps as long as the slowest request of the batch says; answers with the number of requests in the batch."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        waits = [request.inputs()[0].as_numpy() for request in requests]
        time.sleep(max(wait.max() for wait in waits) / 1000)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("BATCH", np.full(wait.shape, len(requests), np.int32))])
            for wait in waits
        ]
