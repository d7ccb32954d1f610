"""Fails in the way that the request names."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        hows = [request.inputs()[0].as_numpy().item().decode() for request in requests]
        if "raise" in hows:
            raise ValueError("boom")
        if "too few" in hows:
            return []
        if "not a list" in hows:
            return 7
        return [self.answer(how) for how in hows]

    def answer(self, how):
        y = pb_utils.Tensor("Y", np.array([1], dtype=np.int32))
        if how == "plain":
            return pb_utils.InferenceResponse([], pb_utils.TritonError("no code"))
        if how == "wrong name":
            return pb_utils.InferenceResponse([pb_utils.Tensor("Z", np.array([1], dtype=np.int32))])
        if how == "wrong dtype":
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([1.5], dtype=np.float32))])
        if how == "wrong shape":
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[1, 2]], dtype=np.int32))])
        if how == "fine":
            return pb_utils.InferenceResponse([y])
        return pb_utils.InferenceResponse([], pb_utils.TritonError(f"as {how}", getattr(pb_utils.TritonError, how)))
