"""What happened to one request, in the form of Triton's trace files: a list of JSON objects.

The front end that samples a request makes its `Trace` and puts it into the `InferRequest`; the model that executes the
request records in it, an ensemble gives each step a child. Times are time.monotonic_ns(): the clock of the statistics,
so the phases of a trace are those that the statistics count.
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
PIECE = 4096  # elements of a tensor: a call for all of them would keep other threads waiting


@dataclass(slots=True)
class Trace:
    """One request in one model. `ids` numbers the traces of a server."""

    ids: Iterator[int]
    timestamps: bool  # level TIMESTAMPS
    tensors: bool  # level TENSORS
    parent_id: int = 0
    request_id: str = ""  # of whoever asked the server, for requests that have none of their own
    request: RequestSpan | None = None  # where spans are made of it, and it is no other trace's child
    ids_of_span: SpanIds | None = None  # of the model's; None: there will be none
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
        """A request that goes to another process leaves its trace behind, but for what it may tell others of it."""
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
        """Something happened at `ns`, or now."""
        if self.timestamps:
            ns = time.monotonic_ns() if ns is None else ns
            self._records.append({"id": self.id, "timestamps": [{"name": name, "ns": ns}]})

    def begin(self, model: str, version: str, request: InferRequest, timing: RequestTiming) -> None:
        """The model has accepted the request, and looks for an instance."""
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
        """An LLM has computed something of an answer."""
        if self.ids_of_span is not None:
            self.answers.setdefault(event.sequence_index, AnswerSteps()).add(event)

    def end(self, timing: RequestTiming, *, composed: bool, error: str = "") -> None:
        """The request is over. `composed`: by other models, which have traces of their own, so nothing was computed."""
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
        """Its own and its children's. Not for the event loop: the text of a large tensor takes seconds."""
        return [*map(_written, self._records), *(record for child in self.children for record in child.records())]

    def times(self) -> dict[str, int]:
        """Its own stamps, in time.monotonic_ns(); of several of a name the last."""
        stamps = (stamp for record in self._records for stamp in record.get("timestamps", ()))
        return {stamp["name"]: stamp["ns"] for stamp in stamps}

    def _tensors(self, activity: str, tensors: Iterable[Tensor]) -> None:
        if not self.tensors:
            return
        self._records += [{"id": self.id, "activity": activity, "tensor": tensor} for tensor in tensors]


def _elsewhere(ids: SpanIds | None) -> Trace | None:
    """What another process knows of a trace: nothing that is recorded there comes back."""
    if ids is None:
        return None
    return Trace(itertools.repeat(0), timestamps=False, tensors=False, ids_of_span=ids)


def _written(record: Record) -> Record:
    """As it is in the file."""
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
    """As a C++ stream writes it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return f"{value:g}" if isinstance(value, float) else str(int(value))
