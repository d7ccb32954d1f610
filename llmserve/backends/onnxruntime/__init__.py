"""Backend `onnxruntime`: ONNX models.

backend.py   config, instances
session.py   the one module that imports onnxruntime
"""

from llmserve.backends.onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
