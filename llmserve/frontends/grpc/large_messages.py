"""Parses large `ModelInferRequest`s without protobuf for their data.

protobuf parses a message in one call, which holds the GIL: half a second for ten million elements. This module walks
the message's fields to find the tensors' data. Raw contents are not copied, and numbers are decoded many at a time.
Only the small rest goes to protobuf. Call it in a worker thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import service_pb2

from llmserve.frontends.grpc.packed_values import Values, decode_field, decoded_bytes, join_fields
from llmserve.frontends.grpc.wire_fields import LENGTH_DELIMITED, encoded_field, fields_of
from llmserve.frontends.shared.data_source import MAX_TEXTS, TEXT_BYTES
from llmserve.wire.event_loop import INLINE_BYTES
from llmserve.wire.http2.messages import Message
from llmserve.wire.request_memory import RequestTooLarge, Share

INPUTS, OUTPUTS, RAW_CONTENTS = 5, 6, 7  # of ModelInferRequest
SHAPE, CONTENTS = 3, 5  # of InferInputTensor
BYTES_CONTENTS = 8  # of InferTensorContents
MAX_FIELDS = 16 * 1024  # of a message, and of its inputs and outputs
MAX_KEPT_BYTES = 4 * 1024 * 1024  # most bytes of names, ids and parameters
MAX_SHAPE_BYTES = 512 * 1024  # protobuf decodes it in 10 ms; a longer shape is refused without details
CONTENT_NAMES = {
    1: "bool_contents", 2: "int_contents", 3: "int64_contents", 4: "uint_contents", 5: "uint64_contents",
    6: "fp32_contents", 7: "fp64_contents", BYTES_CONTENTS: "bytes_contents",
}  # fmt: skip


@dataclass(slots=True)
class LargeContents:
    """Like `InferTensorContents`, with arrays for numbers."""

    bool_contents: Values = ()
    int_contents: Values = ()
    int64_contents: Values = ()
    uint_contents: Values = ()
    uint64_contents: Values = ()
    fp32_contents: Values = ()
    fp64_contents: Values = ()
    bytes_contents: Sequence[bytes] = ()


@dataclass(slots=True)
class LargeInput:
    """Like `InferInputTensor`."""

    name: str
    datatype: str
    shape: Sequence[int]
    parameters: Any
    contents: LargeContents
    has_contents: bool

    def HasField(self, name: str) -> bool:  # noqa: N802  # protobuf's
        assert name == "contents"
        return self.has_contents


@dataclass(slots=True)
class LargeRequest:
    """Like `ModelInferRequest`."""

    small: service_pb2.ModelInferRequest  # without inputs and raw contents
    inputs: list[LargeInput] = field(default_factory=list)
    raw_input_contents: list[memoryview] = field(default_factory=list)

    @property
    def model_name(self) -> str:
        return str(self.small.model_name)

    @property
    def model_version(self) -> str:
        return str(self.small.model_version)

    @property
    def id(self) -> str:
        return str(self.small.id)

    @property
    def parameters(self) -> Any:
        return self.small.parameters

    @property
    def outputs(self) -> Any:
        return self.small.outputs


def parse_large(data: Message, share: Share) -> LargeRequest:
    """The request in a message. Raises `DecodeError` if it is invalid, and `RequestTooLarge`."""
    budget = _Budget(share)
    inputs: list[LargeInput] = []
    raw: list[memoryview] = []
    rest = bytearray()
    for number, kind, value in budget.counted(memoryview(data)):
        if kind == LENGTH_DELIMITED and number == RAW_CONTENTS:
            raw.append(value)
        elif kind == LENGTH_DELIMITED and number == INPUTS:
            inputs.append(_parse_input(value, budget))
        else:
            if kind == LENGTH_DELIMITED and number == OUTPUTS:
                budget.count_fields(value)
            rest += budget.kept(number, kind, value)
    return LargeRequest(service_pb2.ModelInferRequest.FromString(bytes(rest)), inputs, raw)


def _parse_input(data: memoryview, budget: _Budget) -> LargeInput:
    contents: dict[int, list[Any]] = {}
    has_contents = False
    rest = bytearray()
    for number, kind, value in budget.counted(data):
        if kind == LENGTH_DELIMITED and number == CONTENTS:
            has_contents = True
            for content_number, content_kind, content in budget.contents(value):
                contents.setdefault(content_number, []).append(decode_field(content_number, content_kind, content))
            continue
        if number == SHAPE and len(value) > MAX_SHAPE_BYTES:
            raise RequestTooLarge("the shape of an input has too many dimensions")
        rest += budget.kept(number, kind, value)
    small = service_pb2.ModelInferRequest.InferInputTensor.FromString(bytes(rest))
    found = {CONTENT_NAMES[number]: join_fields(number, pieces) for number, pieces in contents.items()}
    return LargeInput(small.name, small.datatype, small.shape, small.parameters, LargeContents(**found), has_contents)


class _Budget:
    """Limits the parts of one message, and counts their memory."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._num_fields = 0
        self._num_values = 0
        self._num_kept = 0  # bytes
        self._num_uncounted = 0  # bytes of values for which the share has not grown yet

    def counted(self, data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        for each in fields_of(data):
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise RequestTooLarge(f"the request has more than {MAX_FIELDS} fields besides the data of its tensors")
            yield each

    def kept(self, number: int, kind: int, value: memoryview) -> bytes:
        """The encoding of a field that protobuf will parse."""
        self._num_kept += len(value)
        if self._num_kept > MAX_KEPT_BYTES:
            raise RequestTooLarge(f"the request has more than {MAX_KEPT_BYTES} bytes besides the data of its tensors")
        return encoded_field(number, kind, value)

    def count_fields(self, data: memoryview) -> None:
        for _ in self.counted(data):
            pass

    def contents(self, data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        """The fields of an `InferTensorContents`: each has packed numbers, one number, or one text."""
        for number, kind, value in fields_of(data):
            if number not in CONTENT_NAMES:
                continue
            if kind == LENGTH_DELIMITED and number != BYTES_CONTENTS:
                self._share.grow(decoded_bytes(number, len(value)))
            else:
                self._num_values += 1
                if self._num_values > MAX_TEXTS:
                    raise RequestTooLarge(f"more than {MAX_TEXTS} BYTES elements or unpacked numbers")
                self._num_uncounted += TEXT_BYTES + len(value)
                if self._num_uncounted > INLINE_BYTES:
                    self._share.grow(self._num_uncounted)
                    self._num_uncounted = 0
            yield number, kind, value
