"""Every input comes back as the output of its datatype; all are optional."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.echo(tensor) for tensor in request.inputs()]) for request in requests]

    def echo(self, tensor):
        name = tensor.name().replace("IN_", "OUT_")
        if tensor.name() == "IN_BF16":
            return pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())
        return pb_utils.Tensor(name, tensor.as_numpy())
