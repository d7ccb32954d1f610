"""Token ids -> the text that they add to what was sent before. A shim: the work is done in llmserve.stages."""

import triton_python_backend_utils as pb_utils

from llmserve.errors import LlmserveError
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.shim import flag_parameter, path_parameter, triton_error
from llmserve.stages.stage_arrays import text_arrays


class TritonPythonModel:
    llmserve_inline_bytes = 8192  # up to 2,000 ids and their window, execute is a matter of microseconds

    def initialize(self, args):
        skip_special_tokens = flag_parameter(args, "skip_special_tokens", True)
        self.stage = Postprocessor.open(path_parameter(args, "tokenizer_dir"), skip_special_tokens=skip_special_tokens)

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def llmserve_execute_arrays(self, inputs):
        return text_arrays(self.stage, inputs)

    def respond(self, request):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = self.llmserve_execute_arrays(inputs)
        except LlmserveError as error:
            return pb_utils.InferenceResponse([], triton_error(pb_utils, error))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
