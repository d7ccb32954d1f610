"""Token ids -> the ids that follow, for a Triton server: `llmserve export triton` sets this model's backend to python.

A shim: the work is done in llmserve.backends.tensorrtllm. `llmserve serve` itself does without it.
"""

import triton_python_backend_utils as pb_utils

from llmserve.backends.tensorrtllm.triton_model import EngineModel


class TritonPythonModel:
    def initialize(self, args):
        self.model = EngineModel.open(args, pb_utils)

    def execute(self, requests):
        self.model.start(requests)

    def is_ready(self):  # asked by newer releases of Triton
        return self.model.healthy()

    def finalize(self):
        self.model.close()
