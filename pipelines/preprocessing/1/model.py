"""Text or chat messages -> token ids, word lists and limits. A shim: the work is done in llmserve.stages."""

import triton_python_backend_utils as pb_utils

from llmserve.errors import LlmserveError
from llmserve.stages.preprocess import Preprocessor
from llmserve.stages.shim import flag_parameter, path_parameter, text_parameter, triton_error
from llmserve.stages.stage_arrays import prepare_arrays
from llmserve.stages.token_lengths import tokenizing_memory


class TritonPythonModel:
    def initialize(self, args):
        self.stage = Preprocessor.open(
            path_parameter(args, "tokenizer_dir"),
            add_special_tokens=flag_parameter(args, "add_special_tokens", True),
            tool_format=text_parameter(args, "tool_format", "auto"),
            reasoning_format=text_parameter(args, "reasoning_format", "auto"),
            allows_templates=flag_parameter(args, "allow_chat_template", False),
            template_file=text_parameter(args, "chat_template", ""),
            tells_date=flag_parameter(args, "template_dates", False),
        )
        self.llmserve_inline_bytes = 2048 if self.stage.is_brief else 0  # microseconds, up to a prompt of a page

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def llmserve_execute_arrays(self, inputs):
        return prepare_arrays(self.stage, inputs)

    def llmserve_memory(self, inputs):
        return tokenizing_memory(self.stage, inputs)

    def respond(self, request):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = self.llmserve_execute_arrays(inputs)
        except LlmserveError as error:
            return pb_utils.InferenceResponse([], triton_error(pb_utils, error))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
