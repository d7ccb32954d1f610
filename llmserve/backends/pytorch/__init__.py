"""Backend `pytorch`: TorchScript (`model.pt`) and exported programs (`model.pt2`).

backend.py       config, instances
calling.py       tensors by name -> arguments, results -> tensors by name
torch_model.py   the one module that imports torch
"""

from llmserve.backends.pytorch.backend import PyTorchBackend

__all__ = ["PyTorchBackend"]
