"""A streamed answer over gRPC with tritonclient: triton_client.py TEXT."""

import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton


def tensor(name: str, datatype: str, data: np.ndarray) -> triton.InferInput:
    made = triton.InferInput(name, [1, 1], datatype)
    made.set_data_from_numpy(data.reshape(1, 1))
    return made


inputs = [
    tensor("messages", "BYTES", np.array([json.dumps([{"role": "user", "content": sys.argv[1]}])], dtype=object)),
    tensor("max_tokens", "INT32", np.array([24], dtype=np.int32)),
    tensor("stream", "BOOL", np.array([True])),
]
answers: queue.SimpleQueue = queue.SimpleQueue()
num_answers = 0
with triton.InferenceServerClient("localhost:8001") as client:
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
    while True:
        result, error = answers.get(timeout=60)
        if error is not None:
            sys.exit(str(error))
        text = result.as_numpy("text_output")
        if text is not None:
            print(text.item().decode(), end="", flush=True)
            num_answers += 1
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
print()
assert num_answers > 1
