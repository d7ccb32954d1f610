"""Answers with the version that is served."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        tensor = pb_utils.Tensor("VERSION", np.array([self.version], dtype=np.int32))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
