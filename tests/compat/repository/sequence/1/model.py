"""Adds up the values of each sequence; FLAGS says what its controls were."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x, start, end, ready, sequence = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()
            for name in ("X", "START", "END", "READY", "CORRID")
        )
        totals, flags = [], []
        for place in range(len(x)):
            key = int(sequence[place])
            if ready[place]:
                self.sums[key] = (0 if start[place] else self.sums.get(key, 0)) + int(x[place])
            totals.append(self.sums.get(key, 0))
            flags.append(f"{start[place]}{end[place]}{ready[place]} {key}")
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("SUM", np.array(totals, dtype=np.int32)[:, None]),
                pb_utils.Tensor("FLAGS", np.array(flags, dtype=object)[:, None]),
            ]
        )
