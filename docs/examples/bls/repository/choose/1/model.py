"""Asks the model that the request's STYLE names."""

import asyncio

import triton_python_backend_utils as pb_utils

STYLES = ("shout", "reverse")


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        style = pb_utils.get_input_tensor_by_name(request, "STYLE").as_numpy().item().decode()
        if style not in STYLES:
            error = pb_utils.TritonError(f"no model for style '{style}'", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        inner = pb_utils.InferenceRequest(
            model_name=style,
            requested_output_names=["ANSWER"],
            inputs=[pb_utils.get_input_tensor_by_name(request, "TEXT")],
        )
        answer = await inner.async_exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        return pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(answer, "ANSWER")])
