"""A linear classifier of flowers as ONNX: make_model.py PATH."""

import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# sepal length and width, petal length and width, in centimetres: setosa, versicolor, virginica
MEANS = np.array([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]], dtype=np.float32)

graph = helper.make_graph(
    [
        helper.make_node("Gemm", ["measures", "weight", "bias"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ],
    "flowers",
    [helper.make_tensor_value_info("measures", TensorProto.FLOAT, ["batch", 4])],
    [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 3])],
    [numpy_helper.from_array(2 * MEANS.T, "weight"), numpy_helper.from_array(-(MEANS**2).sum(axis=1), "bias")],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), sys.argv[1])
