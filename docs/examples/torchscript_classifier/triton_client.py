"""Two flowers, classified over gRPC."""

import numpy as np
import tritonclient.grpc as triton

KINDS = ("setosa", "versicolor", "virginica")
FLOWERS = np.array([[5.9, 2.7, 4.2, 1.3], [5.0, 3.3, 1.5, 0.3]], dtype=np.float32)

measures = triton.InferInput("measures", FLOWERS.shape, "FP32")
measures.set_data_from_numpy(FLOWERS)
with triton.InferenceServerClient("localhost:8001") as client:
    probabilities = client.infer("flowers", [measures]).as_numpy("probabilities")
found = [KINDS[place] for place in probabilities.argmax(axis=1)]
for flower, kind, row in zip(FLOWERS, found, probabilities, strict=True):
    print(f"{flower}: {kind} ({row.max():.2f})")
assert found == ["versicolor", "setosa"]
