"""Outputs of `POST .../infer`: the form that the client requests, and the response body."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmserve.errors import InvalidArgument
from llmserve.frontends.http.json_fields import (
    PIECE_VALUES,
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
from llmserve.frontends.shared.raw_tensors import Raw, num_bytes, tensor_bytes
from llmserve.frontends.shared.request_parameters import BYTE_SIZE, CLASSES, OFFSET, REGION
from llmserve.frontends.shared.shared_memory import Place, SharedMemory
from llmserve.serving.types import InferResponse, Tensor

BINARY_ONLY = ("FP16", "BF16")
PIECE_TEXT_BYTES = 256 * 1024  # of texts that are encoded at once


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The form of outputs that the client requests: `binary` or JSON; `by_name` has those that it names."""

    binary: bool = False
    by_name: Mapping[str, bool] = field(default_factory=dict)
    delivery: Delivery = PLAIN

    def is_binary(self, name: str) -> bool:
        return self.by_name.get(name, self.binary)


ALL_JSON, ALL_BINARY = OutputForm(), OutputForm(binary=True)


def parse_outputs(
    document: Mapping[str, Json], memory: SharedMemory, *, binary: bool
) -> tuple[tuple[str, ...], OutputForm]:
    """The names of the requested outputs (none: all), and their form; `binary` applies to outputs without a name."""
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
    """The place of a tensor in shared memory."""
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
    """The response body, and the length of its JSON if binary tensors follow it."""
    binary: list[Raw] = []
    document = _document(response)
    document["outputs"] = [_encode_output(tensor, form, binary) for tensor in response.outputs]
    header = encode_json(document)
    return b"".join([header, *binary]), len(header) if binary else None


def encode_large_response(response: InferResponse, form: OutputForm) -> tuple[list[Raw], int | None]:
    """Like `encode_response`, but in parts, because joining them is slow."""
    binary: list[Raw] = []
    header = _encode_large(_document(response), response.outputs, form, binary)
    return [*header, *binary], sum(map(len, header)) if binary else None


def large_cost(response: InferResponse, form: OutputForm) -> int:
    """The approximate number of bytes that `encode_large_response` converts one by one, or that delivery copies."""
    if not form.delivery.is_plain:
        return 2 * num_bytes(response.outputs)
    return num_bytes([each for each in response.outputs if each.datatype == "BYTES" or not form.is_binary(each.name)])


def _document(response: InferResponse) -> dict[str, Json]:
    document: dict[str, Json] = {"id": response.request_id} if response.request_id else {}
    document |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    return document


def _encode_large(
    document: Mapping[str, Json], outputs: Sequence[Tensor], form: OutputForm, binary: list[Raw]
) -> list[bytes]:
    """The document with its outputs, with values encoded in pieces."""
    parts = [encode_json(document)[:-1], b',"outputs":[']
    for number, tensor in enumerate(outputs):
        parts.append(b"," if number else b"")
        in_pieces = tensor.data.size > PIECE_VALUES or _is_long(tensor)
        if not in_pieces or form.is_binary(tensor.name) or tensor.name in form.delivery.places:
            parts.append(encode_json(_encode_output(tensor, form, binary)))
            continue
        entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        parts += [encode_json(entry)[:-1], b',"data":[']
        flat = tensor.data.reshape(-1)
        for at in range(0, len(flat), PIECE_VALUES):
            piece = Tensor(tensor.name, tensor.datatype, flat[at : at + PIECE_VALUES])
            parts.append(b"," if at else b"")
            if _is_long(piece):
                parts += _long_texts(piece)
            else:
                parts.append(encode_json(json_values(piece))[1:-1])
        parts.append(b"]}")
    parts.append(b"]}")
    return parts


def _is_long(tensor: Tensor) -> bool:
    """Whether its texts are long: the number of elements does not limit their length."""
    return tensor.datatype == "BYTES" and sum(map(len, tensor.data.flat)) > PIECE_TEXT_BYTES


def _long_texts(tensor: Tensor) -> Iterator[bytes]:
    for number, text in enumerate(tensor.data.flat):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        yield b',"' if number else b'"'
        for start in range(0, len(text), PIECE_TEXT_BYTES):
            yield encode_json(decoder.decode(text[start : start + PIECE_TEXT_BYTES]))[1:-1]
        yield encode_json(decoder.decode(b"", final=True))[1:-1] + b'"'


def _encode_output(tensor: Tensor, form: OutputForm, binary: list[Raw]) -> dict[str, Json]:
    entry: dict[str, Json] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    if tensor.name in form.delivery.places:
        return entry
    if form.is_binary(tensor.name):
        binary.append(tensor_bytes(tensor))
        entry["parameters"] = {"binary_data_size": len(binary[-1])}
    else:
        entry["data"] = json_values(tensor)
    return entry


def json_values(tensor: Tensor) -> list[Json]:
    """A tensor's elements as a flat list of JSON values; bytes that are not UTF-8 become U+FFFD."""
    if tensor.datatype in BINARY_ONLY:
        raise InvalidArgument(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    if tensor.datatype == "BYTES":
        return [bytes(element).decode("utf-8", errors="replace") for element in tensor.data.flat]
    values: list[Json] = tensor.data.reshape(-1).tolist()
    return values
