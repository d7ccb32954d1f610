"""Not decoupled, and answers through its response sender: COUNT responses, the final flag with the last or after it."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request)

    def answer(self, request):
        sender = request.get_response_sender()
        count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
        how = pb_utils.get_input_tensor_by_name(request, "HOW")
        with_last = how is not None and how.as_numpy()[0] == b"with last"
        for index in range(count):
            response = pb_utils.InferenceResponse([pb_utils.Tensor("INDEX", np.array([index], np.int32))])
            if with_last and index == count - 1:
                sender.send(response, flags=FINAL)
                return
            sender.send(response)
        sender.send(flags=FINAL)
