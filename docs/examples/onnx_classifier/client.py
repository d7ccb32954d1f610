"""The best class of each flower, with its label."""

import numpy as np
import tritonclient.http as triton

FLOWERS = np.array([[5.9, 2.7, 4.2, 1.3], [6.5, 3.0, 5.8, 2.2]], dtype=np.float32)

measures = triton.InferInput("measures", FLOWERS.shape, "FP32")
measures.set_data_from_numpy(FLOWERS)
wanted = triton.InferRequestedOutput("probabilities", class_count=1)
with triton.InferenceServerClient("localhost:8000") as client:
    classes = client.infer("flowers", [measures], outputs=[wanted]).as_numpy("probabilities")
labels = []
for flower, (best,) in zip(FLOWERS, classes, strict=True):
    value, _, label = best.decode().split(":")
    print(f"{flower}: {label} ({float(value):.2f})")
    labels.append(label)
assert labels == ["versicolor", "virginica"]
