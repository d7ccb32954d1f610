"""Calls the model that the request names, and answers with what it answers."""

import numpy as np
import triton_python_backend_utils as pb_utils

OUTPUTS = {"repeat": "INDEX", "twice": "Y"}


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        model = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy().item().decode()
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        decoupled = model == "repeat"
        name, output = ("COUNT" if decoupled else "X"), OUTPUTS.get(model, "Y")
        inner = pb_utils.InferenceRequest(
            model_name=model, requested_output_names=[output], inputs=[pb_utils.Tensor(name, x)]
        )
        answers = list(inner.exec(decoupled=True)) if decoupled else [inner.exec()]
        errors = [answer.error().message() for answer in answers if answer.has_error()]
        tensors = [pb_utils.get_output_tensor_by_name(answer, output) for answer in answers if not answer.has_error()]
        values = [tensor.as_numpy() for tensor in tensors if tensor is not None]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("Y", np.concatenate([*values, np.zeros(0, np.int32)]).astype(np.int32)),
                pb_utils.Tensor("ERROR", np.array(errors, dtype=object)),
            ]
        )
