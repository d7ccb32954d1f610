"""Backend `python`: `model.py` files with a `TritonPythonModel`, unchanged, each instance in a thread of its own."""

from llmserve.backends.python.backend import PythonBackend

__all__ = ["PythonBackend"]
