"""The values that pass through the server core: tensors, requests, responses.

Datatypes are KServe's names (BOOL, UINT8 .. INT64, FP16, BF16, FP32, FP64, BYTES). A BYTES tensor's `data` is an object
array of `bytes`; a BF16 tensor's `data` is the raw `uint16` pattern (numpy has no bfloat16). Shapes are as on the wire,
with the batch dimension if the model has one.

They are never modified. Their fields are `Final`, which the type checker enforces: creating a `frozen` dataclass takes
several times as long, and a streamed token passes through a dozen of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.core import EVERYBODY, Tenant
from llmserve.errors import InvalidArgument, LlmserveError
from llmserve.serving.instruments.trace import Trace

ParameterValue: TypeAlias = str | int | bool | float

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_), "UINT8": np.dtype(np.uint8), "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32), "UINT64": np.dtype(np.uint64), "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16), "INT32": np.dtype(np.int32), "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16), "BF16": np.dtype(np.uint16), "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64), "BYTES": np.dtype(np.object_),
}  # fmt: skip


@dataclass(slots=True)
class Tensor:
    name: Final[str]
    datatype: Final[str]
    data: Final[NDArray[Any]]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


# The request parameter that names an adapter of a model, and TensorRT-LLM's input for the same purpose.
ADAPTER_NAME, ADAPTER_ID = "lora_name", "lora_task_id"


@dataclass(slots=True)
class InferRequest:
    """A request for one model. Front ends and ensembles create it; the core checks it against the model's config."""

    model_name: Final[str]
    inputs: Final[Mapping[str, Tensor]]
    model_version: Final[str] = ""  # "": the highest version served
    request_id: Final[str] = ""
    requested_outputs: Final[tuple[str, ...]] = ()  # empty: all that are meaningful for the request
    needed_outputs: Final[tuple[str, ...]] = ()  # read by a later step of an ensemble: every response has them
    parameters: Final[Mapping[str, ParameterValue]] = field(default_factory=dict)
    priority: Final[int] = 0
    timeout_us: Final[int] = 0  # 0: none
    deadline: Final[float | None] = None  # time.monotonic() seconds: the client's own deadline
    sequence_id: Final[int | str] = 0
    sequence_start: Final[bool] = False
    sequence_end: Final[bool] = False
    tenant: Final[Tenant] = EVERYBODY
    trace: Final[Trace | None] = field(default=None, compare=False, repr=False)  # set for requests that are traced
    wants_candidate: Final[bool] = False  # use the rollout's candidate for its adapter; clients cannot set it

    @property
    def tenant_request_id(self) -> tuple[str, str]:
        """The key of a running request. Clients choose ids, so an id refers only to requests of the same tenant."""
        return self.tenant.name, self.request_id

    @property
    def tenant_sequence_id(self) -> tuple[str, int | str]:
        """The key of a sequence. An id refers only to sequences of the same tenant."""
        return self.tenant.name, self.sequence_id

    @property
    def chooses_adapter(self) -> bool:
        return ADAPTER_NAME in self.parameters or ADAPTER_ID in self.inputs

    @property
    def asked_adapter(self) -> str:
        """The adapter's name in the parameter, or its number in the input; empty: none. Raises `InvalidArgument`."""
        name, ids = self.parameters.get(ADAPTER_NAME, ""), self.inputs.get(ADAPTER_ID)
        if not isinstance(name, str):
            raise InvalidArgument(f"{ADAPTER_NAME} must be a string, the name of an adapter")
        if ids is None or not ids.data.size:
            return name
        number = str(ids.data.reshape(-1)[0])
        if ids.data.size > 1 or name not in ("", number):
            raise InvalidArgument(f"{ADAPTER_ID} must be one number, and that of {ADAPTER_NAME} if both are given")
        return number

    def with_inputs(self, inputs: Mapping[str, Tensor]) -> InferRequest:
        return replace(self, inputs=inputs)


@dataclass(slots=True)
class InferResponse:
    """One response of a stream; a unary call is a stream of one. More may follow an error unless it is final."""

    model_name: Final[str]
    model_version: Final[str]
    request_id: Final[str] = ""
    outputs: Final[tuple[Tensor, ...]] = ()
    parameters: Final[Mapping[str, ParameterValue]] = field(default_factory=dict)
    error: Final[LlmserveError | None] = None
    final: Final[bool] = False  # nothing follows; a final response without outputs only marks the end

    def output(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self.outputs if tensor.name == name), None)


class Rescheduled(InferResponse):
    """Ends one execution's responses: the model asks for the request again in a later batch. For schedulers only."""

    __slots__ = ()
