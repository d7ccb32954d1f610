"""A model's tensors as its config declares them: checks requests, applies `reshape`, and puts responses in order.

Created once per loaded model. Requests of all protocols, ensemble steps and BLS calls use it. Messages are Triton's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from llmserve.errors import InternalError, InvalidArgument, nearest
from llmserve.serving.types import NUMPY_DTYPES, InferRequest, Tensor

BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
logger = logging.getLogger(__name__)
_CONFIG_NAMES = {"TYPE_STRING": "BYTES"}


def datatype_name(data_type: int) -> str:
    """KServe's name of a config's data type: TYPE_FP32 -> FP32, TYPE_STRING -> BYTES."""
    name: str = DataType.Name(data_type)
    return _CONFIG_NAMES.get(name, name.removeprefix("TYPE_"))


def datatype_advice(datatype: str) -> str:
    """The end of an error message: the datatype to write instead of a config's name."""
    known = _CONFIG_NAMES.get(datatype, datatype.removeprefix("TYPE_"))
    return f": unknown datatype '{datatype}'; write {known}" if known in NUMPY_DTYPES else ""


def id_label(request_id: str) -> str:
    """The prefix of the core's own error messages."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def request_label(request: InferRequest) -> str:
    return id_label(request.request_id)


def format_shape(shape: Iterable[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One declared tensor. `dims` are without the batch dimension; -1 stands for any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None  # the shape that the model gets instead of `dims`
    optional: bool = False
    ragged: bool = False
    fixed: tuple[tuple[int, int], ...] = field(init=False)  # (which dimension, its size)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fixed", tuple((at, dim) for at, dim in enumerate(self.dims) if dim != -1))

    def accepts(self, shape: Sequence[int], batch_dims: int) -> bool:
        """Whether a shape fits that has `batch_dims` dimensions before the declared ones."""
        if len(shape) != len(self.dims) + batch_dims:
            return False
        for at, size in self.fixed:  # noqa: SIM110 - runs for every tensor: a generator would take twice as long
            if shape[at + batch_dims] != size:
                return False
        return True


def _reshaped(tensor: Tensor, source: Sequence[int], target: Sequence[int], batch_dims: int) -> Tensor:
    """`tensor` in the shape `target`, whose -1s stand for the sizes at the -1s of `source`, in order."""
    sizes = iter([size for size, dim in zip(tensor.shape[batch_dims:], source, strict=True) if dim == -1])
    shape = (*tensor.shape[:batch_dims], *(next(sizes) if dim == -1 else dim for dim in target))
    return Tensor(tensor.name, tensor.datatype, tensor.data.reshape(shape))


class ModelSignature:
    def __init__(self, config: ModelConfig) -> None:
        self.model_name = config.name
        self.max_batch_size = config.max_batch_size
        self.inputs = {spec.name: spec for spec in map(_input_spec, config.input)}
        self.outputs = {spec.name: spec for spec in map(_output_spec, config.output)}
        self.sorts_outputs = config.HasField("ensemble_scheduling")  # ensembles answer alphabetically
        self._batch_dims = 1 if self.max_batch_size > 0 else 0
        self._required = frozenset(name for name, spec in self.inputs.items() if not spec.optional)
        self.reshapes_outputs = any(spec.reshape is not None for spec in self.outputs.values())
        self._reshapes_inputs = any(spec.reshape is not None for spec in self.inputs.values())
        names = sorted(self.outputs) if self.sorts_outputs else list(self.outputs)
        self._unseen = set(self.outputs)  # outputs whose shape has not been checked yet
        self._output_order = {name: place for place, name in enumerate(names)}

    def batch_size(self, request: InferRequest) -> int:
        """The batch size of a checked request; 1 for a model that does not batch."""
        if not self._batch_dims:
            return 1
        for tensor in request.inputs.values():
            return tensor.shape[0]
        return 1

    def check(self, request: InferRequest) -> None:
        """Raise `InvalidArgument` when the request does not fit the config."""
        inputs, batch_dims = request.inputs, self._batch_dims
        if len(inputs) > len(self.inputs) or len(inputs) < len(self._required):
            self._refuse_inputs(request)
        batch_size = -1
        for name, tensor in inputs.items():
            spec = self.inputs.get(name)
            if spec is None:
                self._refuse(
                    request,
                    f"unexpected inference input '{name}' for model '{self.model_name}'{nearest(name, self.inputs)}",
                )
            if tensor.datatype != spec.datatype:
                self._refuse(
                    request,
                    f"inference input '{name}' data-type is '{tensor.datatype}', but model '{self.model_name}' "
                    f"expects '{spec.datatype}'",
                )
            shape = tensor.data.shape
            if batch_dims and not (shape and shape[0] == batch_size):
                batch_size = self._check_batch_size(request, tensor, batch_size)
            if not spec.accepts(shape, batch_dims):
                self._refuse_shape(request, spec, tensor)
        if not self._required.issubset(inputs):
            self._refuse_inputs(request)
        for name in request.requested_outputs:
            if name not in self.outputs:
                self._refuse(
                    request,
                    f"unexpected inference output '{name}' for model '{self.model_name}'{nearest(name, self.outputs)}",
                )

    def to_model(self, request: InferRequest) -> InferRequest:
        """A checked request with `reshape` applied, as the model gets it."""
        if not self._reshapes_inputs:
            return request
        inputs = {
            name: tensor if spec.reshape is None else _reshaped(tensor, spec.dims, spec.reshape, self._batch_dims)
            for name, tensor in request.inputs.items()
            for spec in (self.inputs[name],)
        }
        return request.with_inputs(inputs)

    def from_model(self, outputs: tuple[Tensor, ...], wanted: frozenset[str]) -> tuple[Tensor, ...]:
        """The declared and wanted outputs in the order of the config, with `reshape` undone. Empty `wanted`: all.

        Returns `outputs` itself if there is nothing to do. Raises `InternalError` for a shape that cannot be reshaped
        back.
        """
        order = self._output_order
        places = [order.get(tensor.name, -1) for tensor in outputs]
        if self._unseen:
            self._check_shapes(outputs)
        if not wanted and not self.reshapes_outputs and -1 not in places and places == sorted(places):
            return outputs
        kept = []
        for tensor in outputs:
            spec = self.outputs.get(tensor.name)
            if spec is None or (wanted and tensor.name not in wanted):
                continue
            kept.append(tensor if spec.reshape is None else self._restored(tensor, spec, spec.reshape))
        kept.sort(key=lambda tensor: order[tensor.name])
        return tuple(kept)

    def _check_shapes(self, outputs: Iterable[Tensor]) -> None:
        """Log outputs whose first shape is not the declared one. A model may return any shape, as in Triton. Published
        pipelines often omit the batch dimension, so that is not logged."""
        for tensor in outputs:
            if tensor.name not in self._unseen:
                continue
            self._unseen.remove(tensor.name)
            spec, shape = self.outputs[tensor.name], tensor.shape
            seen = spec if spec.reshape is None else replace(spec, dims=spec.reshape)
            if any(each.accepts(shape, dims) for each in (seen, spec) for dims in (self._batch_dims, 0)):
                continue
            logger.warning(
                "model '%s' returned output '%s' of shape %s, which its config declares as %s; clients get it as "
                "it is, as from Triton",
                self.model_name,
                spec.name,
                format_shape(shape),
                format_shape((-1,) * self._batch_dims + spec.dims),
            )

    def _restored(self, tensor: Tensor, spec: TensorSpec, reshape: tuple[int, ...]) -> Tensor:
        if len(tensor.shape) != len(reshape) + self._batch_dims:
            return tensor  # already as the client expects it
        try:
            return _reshaped(tensor, reshape, spec.dims, self._batch_dims)
        except ValueError:
            batch = (-1,) * self._batch_dims
            raise InternalError(
                f"model '{self.model_name}' returned output '{spec.name}' of shape {format_shape(tensor.shape)}, "
                f"which its config cannot reshape to {format_shape(batch + spec.dims)}"
            ) from None

    def _check_batch_size(self, request: InferRequest, tensor: Tensor, batch_size: int) -> int:
        if not tensor.shape:
            self._refuse(
                request,
                f"input '{tensor.name}' has no shape but model requires batch dimension for '{self.model_name}'",
            )
        size = tensor.shape[0]
        if batch_size not in (-1, size):
            self._refuse(
                request, f"input '{tensor.name}' batch size does not match other inputs for '{self.model_name}'"
            )
        if size > self.max_batch_size:
            self._refuse(
                request, f"inference request batch-size must be <= {self.max_batch_size} for '{self.model_name}'"
            )
        if size == 0:
            self._refuse(request, f"inference request batch-size must be >= 1 for '{self.model_name}'")
        return size

    def _refuse_shape(self, request: InferRequest, spec: TensorSpec, tensor: Tensor) -> NoReturn:
        expected = (-1,) * self._batch_dims + spec.dims
        self._refuse(
            request,
            f"unexpected shape for input '{spec.name}' for model '{self.model_name}'. Expected "
            f"{format_shape(expected)}, got {format_shape(tensor.shape)}. {BATCH_NOTE if self._batch_dims else ''}",
        )

    def _refuse_inputs(self, request: InferRequest) -> NoReturn:
        least, most = len(self._required), len(self.inputs)
        expected = f"{most}" if least == most else f"number of inputs between {least} and {most}"
        counted = f"expected {expected}{' inputs' if least == most else ''} but got {len(request.inputs)} inputs"
        if least <= len(request.inputs) <= most:  # an allowed number, but not the required ones
            counted = "not all required inputs"
        missing = [name for name in self.inputs if name in self._required and name not in request.inputs]
        self._refuse(
            request,
            f"{counted} for model '{self.model_name}'. Got input(s) {_quoted(request.inputs)}, but missing required "
            f"input(s) {_quoted(missing)}. Please provide all required input(s).",
        )

    def _refuse(self, request: InferRequest, problem: str) -> NoReturn:
        raise InvalidArgument(request_label(request) + problem)


def _input_spec(declared: ModelConfig) -> TensorSpec:
    reshape = tuple(declared.reshape.shape) if declared.HasField("reshape") else None
    datatype = datatype_name(declared.data_type)
    return TensorSpec(
        declared.name, datatype, tuple(declared.dims), reshape, declared.optional, declared.allow_ragged_batch
    )


def _output_spec(declared: ModelConfig) -> TensorSpec:
    reshape = tuple(declared.reshape.shape) if declared.HasField("reshape") else None
    return TensorSpec(declared.name, datatype_name(declared.data_type), tuple(declared.dims), reshape)
