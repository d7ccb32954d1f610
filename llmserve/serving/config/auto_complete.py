"""Completes a config from the model's files: the backend, and the name of the file.

Backends complete the rest (`Backend.complete_config`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A format of model files. `platform`: its name in older configs; "" if it never had one."""

    filename: str
    backend: str
    platform: str = ""


FORMATS = (
    FileFormat("model.plan", "tensorrt", "tensorrt_plan"),
    FileFormat("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    FileFormat("model.xml", "openvino"),
    FileFormat("model.pt", "pytorch", "pytorch_libtorch"),
    FileFormat("model.pt2", "pytorch"),
    FileFormat("model.py", "python"),
    FileFormat("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
    FileFormat("model.graphdef", "tensorflow", "tensorflow_graphdef"),
)


def complete_backend(config: ModelConfig, version_dir: Path, backends: Collection[str]) -> None:
    """Fill in `backend`, `platform` and `default_model_filename` as far as they follow from each other or the files."""
    known = _format_of(config, version_dir)
    if known is not None:
        config.backend = config.backend or known.backend
        config.platform = config.platform or known.platform
        config.default_model_filename = config.default_model_filename or known.filename
    elif not config.backend and not config.platform:
        suffix = config.name.partition(".")[2]  # a directory `classifier.identity`
        config.backend = suffix if suffix in backends else ""


def _format_of(config: ModelConfig, version_dir: Path) -> FileFormat | None:
    formats = [known for known in FORMATS if _agrees(config, known)]
    if config.backend or config.platform or config.default_model_filename:
        present = [known for known in formats if (version_dir / known.filename).exists()]
        return next(iter(present or formats), None)
    return next((known for known in formats if (version_dir / known.filename).exists()), None)


def _agrees(config: ModelConfig, known: FileFormat) -> bool:
    if config.backend and config.backend != known.backend:
        return False
    if config.platform and config.platform != known.platform:
        return False
    return config.default_model_filename in ("", known.filename) or bool(config.backend or config.platform)
