"""Two sequences, in turn, on one gRPC stream."""

import queue

import numpy as np
import tritonclient.grpc as triton

VALUES = {1: [1.0, 2.0, 6.0], 2: [10.0, 20.0, 60.0]}
MEANS = {1: [1.0, 1.5, 3.0], 2: [10.0, 15.0, 30.0]}

answers: queue.SimpleQueue = queue.SimpleQueue()
with triton.InferenceServerClient("localhost:8001") as client:
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for place in range(3):
        for sequence, values in VALUES.items():
            x = triton.InferInput("X", [1, 1], "FP32")
            x.set_data_from_numpy(np.array([[values[place]]], dtype=np.float32))
            client.async_stream_infer(
                "running_mean", [x], sequence_id=sequence, sequence_start=place == 0, sequence_end=place == 2
            )
            result, error = answers.get(timeout=10)
            assert error is None, error
            mean = result.as_numpy("MEAN").item()
            print(f"sequence {sequence}: {values[place]} -> mean {mean}")
            assert mean == MEANS[sequence][place]
    client.stop_stream()
