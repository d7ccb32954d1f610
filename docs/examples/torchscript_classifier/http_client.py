"""Two flowers, classified over HTTP."""

import json
import urllib.request

KINDS = ("setosa", "versicolor", "virginica")
FLOWERS = [[5.1, 3.5, 1.4, 0.2], [6.5, 3.0, 5.8, 2.2]]

request = {"inputs": [{"name": "measures", "datatype": "FP32", "shape": [2, 4], "data": FLOWERS}]}
url = "http://localhost:8000/v2/models/flowers/infer"
with urllib.request.urlopen(url, json.dumps(request).encode(), timeout=10) as answer:
    (output,) = json.load(answer)["outputs"]
rows, columns = output["shape"]
found = []
for row in range(rows):
    probabilities = output["data"][row * columns : (row + 1) * columns]
    best = max(range(columns), key=probabilities.__getitem__)
    print(f"{FLOWERS[row]}: {KINDS[best]} ({probabilities[best]:.2f})")
    found.append(KINDS[best])
assert found == ["setosa", "virginica"]
