"""A streaming client like those that tensorrtllm_backend publishes: `client.py HOST:PORT PROMPT MAX_TOKENS`.

The client is a module variable that is never closed, so `tritonclient` closes its channel at interpreter exit.
"""

from __future__ import annotations

import queue
import sys
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype


def tensor(name: str, value: Any) -> Any:
    made = triton.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made


def answer(client: Any, prompt: str, max_tokens: int) -> str:
    """Returns the streamed answer as one text."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=partial(lambda into, result, error: into.put(error or result), answers))
    inputs = [
        tensor("text_input", np.array([[prompt]], dtype=object)),
        tensor("max_tokens", np.array([[max_tokens]], dtype=np.int32)),
        tensor("stream", np.array([[True]])),
    ]
    client.async_stream_infer("ensemble", inputs)
    client.stop_stream()  # waits for the end of the stream
    text = b""
    while not answers.empty():
        one = answers.get()
        if isinstance(one, Exception):
            raise one
        text += one.as_numpy("text_output").item()
    return text.decode()


if __name__ == "__main__":
    client = triton.InferenceServerClient(sys.argv[1])
    sys.stdout.write(answer(client, sys.argv[2], int(sys.argv[3])))
