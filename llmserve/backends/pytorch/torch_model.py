"""The one module of the serving path that imports torch: opens a model file and calls it with arrays."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.functions import Arrays, input_datatypes, output_datatypes
from llmserve.backends.pytorch.calling import Arguments, OutputBinding, bind_inputs
from llmserve.backends.pytorch.parameters import TorchParameters
from llmserve.errors import InvalidArgument, ModelConfigError, Unsupported

_LOADING = threading.Lock()  # torch can read only one exported program at a time

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedModule:
    """A module that instances call; they may share it."""

    forward: Any
    arguments: Arguments
    device: torch.device


def open_module(path: Path, gpu: int) -> OpenedModule:
    """`gpu` is -1 for the CPU."""
    device = _device(gpu)
    try:
        if path.suffix == ".pt2":
            with _LOADING:
                program = torch.export.load(path)
            module: Any = program.module().to(device)
            return OpenedModule(module, _exported_arguments(program, module), device)
        load: Any = torch.jit.load  # untyped
        module = load(path, map_location=device).eval()
        return OpenedModule(module, _script_arguments(module), device)
    except Exception as error:  # border: torch has no single error class for unusable files
        raise ModelConfigError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


def set_inter_op_threads(number: int) -> None:
    """Sets it for the whole process; only possible once."""
    if not number or number == torch.get_num_interop_threads():
        return
    try:
        torch.set_num_interop_threads(number)
    except RuntimeError:
        current = torch.get_num_interop_threads()
        logger.warning("INTER_OP_THREAD_COUNT can be set only once per process; it stays %d", current)


def _device(gpu: int) -> torch.device:
    if gpu < 0:
        return torch.device("cpu")
    if not torch.cuda.is_available() or gpu >= torch.cuda.device_count():
        raise Unsupported(
            f"instance_group requests KIND_GPU, but torch finds no GPU {gpu}; use KIND_CPU, or a CUDA build of torch"
        )
    return torch.device("cuda", gpu)


def _exported_arguments(program: torch.export.ExportedProgram, module: Any) -> Arguments:
    """An exported program only accepts keyword arguments that were exported as such."""
    names = tuple(inspect.signature(module.forward).parameters)
    positional, _ = program.call_spec.in_spec.children()
    return Arguments(names, num_positional=positional.num_children)


def _script_arguments(module: Any) -> Arguments:
    declared = module.forward.schema.arguments[1:]  # without self
    takes_dict = len(declared) == 1 and declared[0].type.kind() == "DictType"
    return Arguments(tuple(argument.name for argument in declared), takes_dict=takes_dict)


class TorchFunction:
    """`forward` of a module, for one instance's thread."""

    def __init__(self, opened: OpenedModule, config: ModelConfig, parameters: TorchParameters) -> None:
        self._opened = opened
        self._parameters = parameters
        self._datatypes = input_datatypes(config)
        self._inputs = bind_inputs(tuple(self._datatypes), opened.arguments)
        self._outputs = OutputBinding(list(output_datatypes(config)))
        self._has_thread_settings = False

    def __call__(self, inputs: Arrays) -> Arrays:
        self._set_threads()
        jit: Any = torch.jit  # untyped
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode() if self._parameters.inference_mode else torch.no_grad())
            if not self._parameters.optimized_execution:
                modes.enter_context(jit.optimized_execution(False))
            tensors = {name: self._to_torch(name, data) for name, data in inputs.items()}
            positional, keywords = self._inputs.bind(tensors)
            results = self._outputs.pick(self._opened.forward(*positional, **keywords))
            return {name: _to_array(name, result) for name, result in results.items()}

    def _set_threads(self) -> None:
        """The number of operator threads belongs to the calling thread."""
        if not self._has_thread_settings and self._parameters.intra_op_threads:
            torch.set_num_threads(self._parameters.intra_op_threads)
        self._has_thread_settings = True

    def _to_torch(self, name: str, data: NDArray[Any]) -> torch.Tensor | list[str]:
        if self._datatypes[name] == "BYTES":
            return _to_texts(name, data)
        tensor = torch.from_numpy(np.array(data, order="C"))  # a copy, because the model may work in place
        if self._datatypes[name] == "BF16":
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(self._opened.device)


def _to_texts(name: str, data: NDArray[Any]) -> list[str]:
    try:
        return [element.decode() for element in data.flat]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input '{name}' must be UTF-8 text: {error}") from None


def _to_array(name: str, result: Any) -> NDArray[Any]:
    if isinstance(result, torch.Tensor):
        tensor = result.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        array: NDArray[Any] = tensor.numpy()
        return array.copy() if result.device.type == "cpu" else array  # it may be a buffer of the module
    if isinstance(result, str | list):
        return _from_texts(result)
    raise Unsupported(f"the model returned {type(result).__name__} for output '{name}'; it must be a tensor or strings")


def _from_texts(result: str | Sequence[str]) -> NDArray[Any]:
    texts = [result] if isinstance(result, str) else result
    return np.array([text.encode() for text in texts], dtype=np.object_)
