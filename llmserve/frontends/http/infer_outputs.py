"""Outputs of `POST .../infer`: how a client wants them, and the response body that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmserve.errors import InvalidArgument
from llmserve.frontends.http.json_fields import (
    Json,
    as_array,
    as_bool,
    as_object,
    as_string,
    as_unsigned,
    encode_json,
    required,
)
from llmserve.frontends.shared.delivery import PLAIN, Delivery
from llmserve.frontends.shared.raw_tensors import encode_tensor
from llmserve.frontends.shared.request_parameters import BYTE_SIZE, CLASSES, OFFSET, REGION
from llmserve.frontends.shared.shared_memory import Place, SharedMemory
from llmserve.serving.types import InferResponse, Tensor

BINARY_ONLY = ("FP16", "BF16")


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How the client wants its outputs: `binary` or not, but those that it names each in its own way."""

    binary: bool = False
    by_name: Mapping[str, bool] = field(default_factory=dict)
    delivery: Delivery = PLAIN

    def is_binary(self, name: str) -> bool:
        return self.by_name.get(name, self.binary)


ALL_JSON, ALL_BINARY = OutputForm(), OutputForm(binary=True)


def parse_outputs(
    document: Mapping[str, Json], memory: SharedMemory, *, binary: bool
) -> tuple[tuple[str, ...], OutputForm]:
    """The names of the wanted outputs (none: all), and their form; `binary` is that of outputs which are not named."""
    if "outputs" not in document:
        return (), ALL_BINARY if binary else ALL_JSON
    by_name: dict[str, bool] = {}
    names: dict[str, None] = {}
    num_classes: dict[str, int] = {}
    places: dict[str, Place] = {}
    for entry in as_array(document["outputs"], "outputs"):
        output = as_object(entry, "outputs")
        name = as_string(required(output, "name"), "name")
        parameters = as_object(output.get("parameters", {}), "parameters")
        names[name] = None
        if REGION in parameters:
            _check_alone(parameters)
            places[name] = parse_place(parameters)
        if CLASSES in parameters:
            num_classes[name] = as_unsigned(parameters[CLASSES], CLASSES)
        by_name[name] = as_bool(parameters.get("binary_data", False), "binary_data")
    delivery = Delivery(num_classes, places) if num_classes or places else PLAIN
    delivery.check(memory)
    return tuple(names), OutputForm(binary, by_name, delivery)


def parse_place(parameters: Mapping[str, Json]) -> Place:
    """Where in shared memory a tensor is, or goes."""
    return Place(
        as_string(parameters[REGION], REGION),
        as_unsigned(parameters.get(BYTE_SIZE, 0), BYTE_SIZE),
        as_unsigned(parameters.get(OFFSET, 0), OFFSET),
    )


def _check_alone(parameters: Mapping[str, Json]) -> None:
    for other in ("binary_data", CLASSES):
        if parameters.get(other):
            raise InvalidArgument(f"Output can't set both '{REGION}' and '{other}'")


def encode_response(response: InferResponse, form: OutputForm) -> tuple[bytes, int | None]:
    """The response body, and the length of its JSON when binary tensors follow it."""
    document: dict[str, Json] = {"id": response.request_id} if response.request_id else {}
    document |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    binary: list[bytes] = []
    document["outputs"] = [_encode_output(tensor, form, binary) for tensor in response.outputs]
    header = encode_json(document)
    return b"".join([header, *binary]), len(header) if binary else None


def _encode_output(tensor: Tensor, form: OutputForm, binary: list[bytes]) -> dict[str, Json]:
    entry: dict[str, Json] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    if tensor.name in form.delivery.places:
        return entry
    if form.is_binary(tensor.name):
        binary.append(encode_tensor(tensor))
        entry["parameters"] = {"binary_data_size": len(binary[-1])}
    else:
        entry["data"] = json_values(tensor)
    return entry


def json_values(tensor: Tensor) -> list[Json]:
    """The flat list of a tensor's elements as JSON has them; bytes that are not UTF-8 show as U+FFFD."""
    if tensor.datatype in BINARY_ONLY:
        raise InvalidArgument(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    if tensor.datatype == "BYTES":
        return [bytes(element).decode("utf-8", errors="replace") for element in tensor.data.flat]
    values: list[Json] = tensor.data.reshape(-1).tolist()
    return values
