"""Decoupled: COUNT responses, which end in the way that HOW names."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request)

    def answer(self, request):
        count = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().item()
        how = pb_utils.get_input_tensor_by_name(request, "HOW")
        how = "" if how is None else how.as_numpy().item().decode()
        sender, final = request.get_response_sender(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if how == "raise":
            raise ValueError("boom")
        for index in range(count):
            if sender.is_cancelled():
                break
            if how == "slow":
                time.sleep(0.02)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("INDEX", np.array([index], dtype=np.int32))])
            if how == "with last" and index == count - 1:
                sender.send(response, flags=final)
                return
            sender.send(response)
            if how == "error in the middle" and index == 1:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("unlucky")))
        if how == "error at the end":
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("unlucky")), flags=final)
            return
        sender.send(flags=final)
