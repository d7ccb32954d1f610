"""The tensors that the sequence scheduler adds to a request: control inputs and implicit state.

They have a batch dimension of 1 if the model batches. Controls have one element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelSequenceBatching

from llmserve.errors import InternalError, InvalidArgument, ModelConfigError, raise_problems
from llmserve.serving.config.files import read_inside
from llmserve.serving.signature import datatype_name, format_shape
from llmserve.serving.tensor_data import tensor_from_bytes, zero_tensor
from llmserve.serving.types import NUMPY_DTYPES, InferRequest, Tensor

INITIAL_STATE_FOLDER = "initial_state"
MAX_CORRELATION_ID_BYTES = 128
_Control = ModelSequenceBatching.Control


@dataclass(frozen=True, slots=True)
class Flag:
    """A control with one of two values."""

    name: str
    datatype: str
    off: Any
    on: Any

    def tensor(self, is_on: bool, shape: tuple[int, ...]) -> Tensor:
        return _element(self.name, self.datatype, self.on if is_on else self.off, shape)


class Controls:
    """Control inputs as a config declares them."""

    def __init__(self, config: ModelConfig) -> None:
        self._model_name = config.name
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        self._flags: dict[int, list[Flag]] = {}
        self._ids: list[tuple[str, str]] = []  # name, datatype
        for declared in config.sequence_batching.control_input:
            for control in declared.control:
                if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
                    self._ids.append((declared.name, datatype_name(control.data_type)))
                else:
                    self._flags.setdefault(control.kind, []).append(_flag(declared.name, control))

    def check(self, sequence_id: int | str) -> None:
        """Raise `InvalidArgument` for a correlation ID that the model's tensor cannot hold."""
        for name, datatype in self._ids:
            if _fits(sequence_id, datatype):
                continue
            raise InvalidArgument(
                f"inference request to model '{self._model_name}' has correlation ID {sequence_id!r}, which input "
                f"'{name}' of type {datatype} cannot hold"
            )

    def of(self, request: InferRequest) -> dict[str, Tensor]:
        return self._make(request.sequence_start, request.sequence_end, True, request.sequence_id)

    def of_nothing(self) -> dict[str, Tensor]:
        """The controls of a batch slot without a request."""
        return self._make(False, False, False, 0)

    def _make(self, start: bool, end: bool, ready: bool, sequence_id: int | str) -> dict[str, Tensor]:
        states = {
            _Control.CONTROL_SEQUENCE_START: start,
            _Control.CONTROL_SEQUENCE_END: end,
            _Control.CONTROL_SEQUENCE_READY: ready,
        }
        tensors = [flag.tensor(states[kind], self._shape) for kind, flags in self._flags.items() for flag in flags]
        tensors += [_id_tensor(name, datatype, sequence_id, self._shape) for name, datatype in self._ids]
        return {tensor.name: tensor for tensor in tensors}


def _flag(name: str, control: ModelSequenceBatching.Control) -> Flag:
    for datatype, values in (
        ("INT32", control.int32_false_true),
        ("FP32", control.fp32_false_true),
        ("BOOL", control.bool_false_true),
    ):
        if values:
            return Flag(name, datatype, values[0], values[1])
    raise AssertionError(f"control input '{name}' has no values")


def _fits(sequence_id: int | str, datatype: str) -> bool:
    if datatype == "BYTES":
        return len(str(sequence_id).encode()) <= MAX_CORRELATION_ID_BYTES
    if isinstance(sequence_id, str):
        return True
    limits = np.iinfo(NUMPY_DTYPES[datatype])
    return bool(limits.min <= sequence_id <= limits.max)


def _id_tensor(name: str, datatype: str, sequence_id: int | str, shape: tuple[int, ...]) -> Tensor:
    if datatype == "BYTES":
        return _element(name, datatype, str(sequence_id or "").encode(), shape)
    if isinstance(sequence_id, str):
        sequence_id = _number_for(sequence_id, np.iinfo(NUMPY_DTYPES[datatype]).max)
    return _element(name, datatype, sequence_id, shape)


def _number_for(sequence_id: str, largest: int) -> int:
    """The correlation ID for a text if the model expects a number: a hash, so texts rarely share one."""
    return 1 + int.from_bytes(hashlib.blake2b(sequence_id.encode(), digest_size=8).digest(), "little") % largest


def _element(name: str, datatype: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    data = np.empty(shape, NUMPY_DTYPES[datatype])
    data[...] = value
    return Tensor(name, datatype, data)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One implicit state: the model reads `input_name` and answers with `output_name`."""

    input_name: str
    output_name: str
    dims: tuple[int, ...]  # with the batch dimension; -1: any
    initial: Tensor

    def next(self, model_name: str, answered: Tensor) -> Tensor:
        """The input of the sequence's next request. Raises `InternalError` if the tensor does not fit the state."""
        fits = len(answered.shape) == len(self.dims) and all(
            want in (-1, have) for want, have in zip(self.dims, answered.shape, strict=True)
        )
        if not fits or answered.datatype != self.initial.datatype:
            raise InternalError(
                f"model '{model_name}' returned state '{self.output_name}' as {answered.datatype} of shape "
                f"{format_shape(answered.shape)}, but its config says {self.initial.datatype} {format_shape(self.dims)}"
            )
        return Tensor(self.input_name, answered.datatype, answered.data)


class ImplicitState:
    """The tensors that a sequence carries from request to request."""

    def __init__(self, model_name: str, specs: Iterable[StateSpec]) -> None:
        self._model_name = model_name
        self._specs = {spec.output_name: spec for spec in specs}

    def initial(self) -> dict[str, Tensor]:
        return {spec.input_name: spec.initial for spec in self._specs.values()}

    def updated(self, state: Mapping[str, Tensor], outputs: Iterable[Tensor]) -> dict[str, Tensor]:
        """The state after a response. States that the model has not returned do not change. Raises `InternalError`."""
        answered = [
            spec.next(self._model_name, tensor)
            for tensor in outputs
            if (spec := self._specs.get(tensor.name)) is not None
        ]
        return {**state, **{tensor.name: tensor for tensor in answered}}


def read_states(config: ModelConfig, model_dir: Path) -> list[StateSpec]:
    """Read the declared states. Blocking: reads files. Raises `ModelConfigError` that lists all problems."""
    problems: list[str] = []
    specs = []
    for declared in config.sequence_batching.state:
        try:
            specs.append(_state(declared, config.max_batch_size > 0, model_dir))
        except (OSError, ValueError) as error:
            problems.append(f"initial state of '{declared.input_name}': {error}")
    raise_problems(ModelConfigError, f"model '{config.name}' cannot be loaded", problems)
    return specs


def _state(declared: ModelSequenceBatching.State, batches: bool, model_dir: Path) -> StateSpec:
    batch = (1,) if batches else ()
    name, datatype = declared.input_name, datatype_name(declared.data_type)
    shape = (*batch, *(max(1, dim) for dim in declared.dims))
    initial = zero_tensor(name, datatype, shape)
    for given in declared.initial_state:
        shape = (*batch, *given.dims)
        if given.WhichOneof("state_data") == "data_file":
            data = read_inside(model_dir, f"{INITIAL_STATE_FOLDER}/{given.data_file}")
            initial = tensor_from_bytes(name, datatype, shape, data)
        else:
            initial = zero_tensor(name, datatype, shape)
    return StateSpec(name, declared.output_name, (*batch, *declared.dims), initial)
