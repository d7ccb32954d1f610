"""A text, or a pair of texts, -> token ids. A shim: the work is done in llmserve.stages."""

import triton_python_backend_utils as pb_utils

from llmserve.errors import LlmserveError
from llmserve.stages.shim import path_parameter, triton_error
from llmserve.stages.token_lengths import tokenizing_memory
from llmserve.stages.whole_texts import WholeTexts, whole_text_arrays


class TritonPythonModel:
    llmserve_inline_bytes = 2048  # up to a text of a page, execute is a matter of microseconds

    def initialize(self, args):
        self.stage = WholeTexts.open(path_parameter(args, "tokenizer_dir"))

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def llmserve_execute_arrays(self, inputs):
        return whole_text_arrays(self.stage, inputs)

    def llmserve_memory(self, inputs):
        return tokenizing_memory(self.stage, inputs)

    def respond(self, request):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = self.llmserve_execute_arrays(inputs)
        except LlmserveError as error:
            return pb_utils.InferenceResponse([], triton_error(pb_utils, error))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
