"""The composition root: which backends a server has. The core knows them by name only."""

from __future__ import annotations

from llmserve.backends.identity import IdentityBackend
from llmserve.backends.onnxruntime import OnnxRuntimeBackend
from llmserve.backends.python import PythonBackend
from llmserve.backends.pytorch import PyTorchBackend
from llmserve.backends.repeat import RepeatBackend
from llmserve.backends.tensorrtllm import TensorrtLlmBackend
from llmserve.engine.open import open_engine
from llmserve.serving.backend import Backend


def make_backends() -> dict[str, Backend]:
    """By the name that `config.pbtxt` gives in `backend`."""
    backends: tuple[Backend, ...] = (
        TensorrtLlmBackend(open_engine),
        PythonBackend(),
        PyTorchBackend(),
        OnnxRuntimeBackend(),
        IdentityBackend(),
        RepeatBackend(),
    )
    return {backend.name: backend for backend in backends}
