"""`choose` with tritonclient."""

import numpy as np
import tritonclient.http as triton


def text(name: str, value: str) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value], dtype=object))
    return tensor


with triton.InferenceServerClient("localhost:8000") as client:
    for style, expected in (("shout", "A WORD"), ("reverse", "drow a")):
        result = client.infer("choose", [text("TEXT", "a word"), text("STYLE", style)])
        answer = result.as_numpy("ANSWER").item().decode()
        print(f"{style}: {answer}")
        assert answer == expected
