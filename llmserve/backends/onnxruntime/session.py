"""The one module that imports onnxruntime: a session per instance, with the settings of the model's config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.functions import Arrays, output_datatypes
from llmserve.backends.onnxruntime.config import ModelTensor
from llmserve.errors import InvalidArgument, ModelConfigError, Unsupported, raise_problems

_LOG_ERRORS_ONLY = 3
_DATATYPES = {
    "float": "FP32", "double": "FP64", "float16": "FP16", "bool": "BOOL", "string": "BYTES",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64",
    "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
}  # fmt: skip
_LEVELS = {
    0: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_MODES = {
    0: onnxruntime.ExecutionMode.ORT_SEQUENTIAL,
    1: onnxruntime.ExecutionMode.ORT_PARALLEL,
}


class OnnxFunction:
    """A session. `gpu` is -1 for the CPU."""

    def __init__(self, path: Path, config: ModelConfig, gpu: int) -> None:
        self._session = _open(path, _session_options(config), _providers(config, gpu))
        self.inputs = tuple(map(_model_tensor, self._session.get_inputs()))
        self.outputs = tuple(map(_model_tensor, self._session.get_outputs()))
        self._text_inputs = frozenset(tensor.name for tensor in self.inputs if tensor.datatype == "BYTES")
        self._wanted = list(output_datatypes(config))

    def __call__(self, inputs: Arrays) -> Arrays:
        feeds = {name: _to_text(name, data) if name in self._text_inputs else data for name, data in inputs.items()}
        outputs: list[Any] = self._session.run(self._wanted, feeds)
        return {name: _from_model(output) for name, output in zip(self._wanted, outputs, strict=True)}


def read_tensors(path: Path) -> tuple[tuple[ModelTensor, ...], tuple[ModelTensor, ...]]:
    """Read the inputs and outputs of a model file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _LOG_ERRORS_ONLY
    options.graph_optimization_level = _LEVELS[2]
    session = _open(path, options, ["CPUExecutionProvider"])
    return tuple(map(_model_tensor, session.get_inputs())), tuple(map(_model_tensor, session.get_outputs()))


def _open(path: Path, options: onnxruntime.SessionOptions, providers: list[Any]) -> onnxruntime.InferenceSession:
    file = path / path.name if path.is_dir() else path  # a folder has the model and its external data
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=providers)
    except Exception as error:  # border: onnxruntime's error classes have no common base
        raise ModelConfigError(f"{file} cannot be loaded: {error}") from error


def _session_options(config: ModelConfig) -> onnxruntime.SessionOptions:
    problems: list[str] = []
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _LOG_ERRORS_ONLY
    options.intra_op_num_threads = _number(config, "intra_op_thread_count", problems)
    options.inter_op_num_threads = _number(config, "inter_op_thread_count", problems)
    mode = _number(config, "execution_mode", problems)
    level = config.optimization.graph.level
    if mode not in _MODES:
        problems.append(f"parameter execution_mode must be 0 (sequential) or 1 (parallel), got {mode}")
    if level not in _LEVELS:
        problems.append(f"optimization.graph.level must be one of {', '.join(map(str, _LEVELS))}, got {level}")
    options.enable_cpu_mem_arena = _number(config, "enable_mem_arena", problems, default=1) == 1
    options.enable_mem_pattern = _number(config, "enable_mem_pattern", problems, default=1) == 1
    raise_problems(ModelConfigError, f"model '{config.name}' cannot be loaded", problems)
    options.execution_mode = _MODES[mode]
    options.graph_optimization_level = _LEVELS[level]
    return options


def _number(config: ModelConfig, key: str, problems: list[str], *, default: int = 0) -> int:
    parameters: Mapping[str, Any] = config.parameters
    text = parameters[key].string_value if key in parameters else str(default)
    if not text.isdecimal():
        problems.append(f"parameter {key} must be an integer, got '{text}'")
        return default
    return int(text)


def _providers(config: ModelConfig, gpu: int) -> list[Any]:
    asked = config.optimization.execution_accelerators
    if names := [one.name for one in (*asked.gpu_execution_accelerator, *asked.cpu_execution_accelerator)]:
        raise Unsupported(
            f"model '{config.name}': execution_accelerators {', '.join(names)} are not supported; remove them"
        )
    if gpu < 0:
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise Unsupported(
            f"model '{config.name}': instance_group requests KIND_GPU, but this onnxruntime has no CUDA; use KIND_CPU, "
            "or install onnxruntime-gpu in its place"
        )
    return [("CUDAExecutionProvider", {"device_id": gpu}), "CPUExecutionProvider"]


def _model_tensor(described: Any) -> ModelTensor:
    kind = described.type.removeprefix("tensor(").removesuffix(")")
    if kind not in _DATATYPES:
        raise Unsupported(f"tensor '{described.name}' of the model is {described.type}, which cannot be served")
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in described.shape)
    return ModelTensor(described.name, _DATATYPES[kind], shape)


def _to_text(name: str, data: NDArray[Any]) -> NDArray[Any]:
    try:
        texts = [element.decode() for element in data.flat]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input '{name}' must be UTF-8 text: {error}") from None
    return np.array(texts, dtype=np.object_).reshape(data.shape)


def _from_model(output: Any) -> NDArray[Any]:
    array = np.asarray(output)
    if array.dtype.kind not in "OSU":
        return array
    texts = [element.encode() if isinstance(element, str) else bytes(element) for element in array.flat]
    return np.array(texts, dtype=np.object_).reshape(array.shape)
