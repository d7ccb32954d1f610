"""The sum and the difference of two tensors."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        outputs = [pb_utils.Tensor("SUM", left + right), pb_utils.Tensor("DIFFERENCE", left - right)]
        return pb_utils.InferenceResponse(outputs)
