"""Records what happened to one request in the format of Triton's trace files: a list of JSON objects.

The front end that samples a request creates its `Trace` and puts it into the `InferRequest`. The model that executes
the request records in it; an ensemble gives each step a child. Times are time.monotonic_ns(), the clock of the
statistics, so the phases of a trace are those that the statistics count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmserve.core import TokenEvent
from llmserve.serving.instruments.model_statistics import RequestTiming
from llmserve.serving.instruments.spans import AnswerSteps, RequestSpan, SpanIds

if TYPE_CHECKING:
    from llmserve.serving.types import InferRequest, Tensor

Record = dict[str, Any]
PIECE = 4096  # elements of a tensor: one call for all of them would block other threads


@dataclass(slots=True)
class Trace:
    """The trace of one request in one model. `ids` numbers the traces of a server."""

    ids: Iterator[int]
    timestamps: bool  # level TIMESTAMPS
    tensors: bool  # level TENSORS
    parent_id: int = 0
    request_id: str = ""  # of the client's request, for requests without an id of their own
    request: RequestSpan | None = None  # if spans are created from it and it is not a child
    ids_of_span: SpanIds | None = None  # of the model's span; None: there will be no spans
    model: str = ""
    version: str = ""
    error: str = ""  # why the request has failed; "": it has not
    answers: dict[int, AnswerSteps] = field(default_factory=dict)  # of an LLM, by sequence
    children: list[Trace] = field(default_factory=list)
    id: int = field(init=False)
    _records: list[Record] = field(default_factory=list)
    _queue_ns: int = 0
    _prepare_ns: int = 0

    def __post_init__(self) -> None:
        self.id = next(self.ids)

    def __reduce__(self) -> tuple[Callable[..., Trace | None], tuple[SpanIds | None]]:
        """Only the ids of its span are sent along when its request is sent to another process."""
        return _elsewhere, (self.ids_of_span,)

    def child(self) -> Trace:
        """The trace of a request that this one's model sends to another."""
        made = Trace(
            self.ids,
            self.timestamps,
            self.tensors,
            parent_id=self.id,
            request_id=self.request_id,
            ids_of_span=None if self.ids_of_span is None else self.ids_of_span.child(),
        )
        self.children.append(made)
        return made

    def stamp(self, name: str, ns: int | None = None) -> None:
        """Record that something happened at `ns`, or now."""
        if self.timestamps:
            ns = time.monotonic_ns() if ns is None else ns
            self._records.append({"id": self.id, "timestamps": [{"name": name, "ns": ns}]})

    def begin(self, model: str, version: str, request: InferRequest, timing: RequestTiming) -> None:
        """The model has accepted the request, which now waits for an instance."""
        head: Record = {"id": self.id, "model_name": model, "model_version": int(version)}
        if request_id := request.request_id or self.request_id:
            head["request_id"] = request_id
        if self.parent_id:
            head["parent_id"] = self.parent_id
        self._records.append(head)
        self.model, self.version = model, version
        self._prepare_ns = timing.input_ns
        self._queue_ns = time.monotonic_ns()
        self.stamp("REQUEST_START", timing.start_ns)
        self.stamp("QUEUE_START", self._queue_ns)
        self._tensors("TENSOR_QUEUE_INPUT", request.inputs.values())

    def response(self, outputs: Iterable[Tensor]) -> None:
        """The model has sent a response."""
        if not self.parent_id:
            self.stamp("INFER_RESPONSE_COMPLETE")
        self._tensors("TENSOR_BACKEND_OUTPUT", outputs)

    def generated(self, event: TokenEvent) -> None:
        """An LLM has computed a part of an answer."""
        if self.ids_of_span is not None:
            self.answers.setdefault(event.sequence_index, AnswerSteps()).add(event)

    def end(self, timing: RequestTiming, *, composed: bool, error: str = "") -> None:
        """The request is over. `composed`: nothing was computed here, but by other models with their own traces."""
        self.error = error
        if not composed:
            moment = self._queue_ns + timing.queue_ns
            self.stamp("COMPUTE_START", moment)
            for name, duration_ns in (
                ("COMPUTE_INPUT_END", timing.input_ns - self._prepare_ns),
                ("COMPUTE_OUTPUT_START", timing.infer_ns),
                ("COMPUTE_END", timing.output_ns),
            ):
                moment += duration_ns
                self.stamp(name, moment)
        self.stamp("REQUEST_END")

    def records(self) -> list[Record]:
        """Its own records and its children's. Not for the event loop: the text of a large tensor takes seconds."""
        return [*map(_written, self._records), *(record for child in self.children for record in child.records())]

    def times(self) -> dict[str, int]:
        """Its own stamps by name, in time.monotonic_ns(); the last one if there are several of a name."""
        stamps = (stamp for record in self._records for stamp in record.get("timestamps", ()))
        return {stamp["name"]: stamp["ns"] for stamp in stamps}

    def _tensors(self, activity: str, tensors: Iterable[Tensor]) -> None:
        if not self.tensors:
            return
        self._records += [{"id": self.id, "activity": activity, "tensor": tensor} for tensor in tensors]


def _elsewhere(ids: SpanIds | None) -> Trace | None:
    """The trace in another process, whose records do not come back."""
    if ids is None:
        return None
    return Trace(itertools.repeat(0), timestamps=False, tensors=False, ids_of_span=ids)


def _written(record: Record) -> Record:
    """The record as it is in the file."""
    if (tensor := record.get("tensor")) is None:
        return record
    flat = tensor.data.reshape(-1)
    pieces = (flat[start : start + PIECE].tolist() for start in range(0, flat.size, PIECE))
    content = {
        "name": tensor.name,
        "data": ",".join(_text(value) for piece in pieces for value in piece),
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype,
    }
    return {**record, "tensor": content}


def _text(value: Any) -> str:
    """The value as a C++ stream writes it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return f"{value:g}" if isinstance(value, float) else str(int(value))
