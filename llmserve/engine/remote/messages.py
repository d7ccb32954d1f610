"""The contents of frames: requests, the events of a step, errors, statistics.

A step's events are rows of integers and floats without JSON, since nothing else is sent while answers are generated. A
row has its stream, sequence, flags, tokens and, depending on the flags, other parts of the event, in the order of
`Flag`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import IntFlag
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from llmserve import errors
from llmserve.core import (
    EVERYBODY,
    Allowance,
    BeamSearch,
    FinishReason,
    GenerateRequest,
    Guide,
    Logits,
    PromptScores,
    SamplingParams,
    SourcedGuide,
    Tenant,
    TokenEvent,
    TopTokens,
    Usage,
)
from llmserve.engine.base import EngineInfo, EngineStats
from llmserve.engine.remote.frames import Frame, Kind, ProtocolError
from llmserve.errors import InternalError, LlmserveError, Unsupported

FINISH_REASONS = tuple(FinishReason)
LIMITS = ("name", "weight", "max_answers", "tokens_per_minute")  # fields of a tenant that are sent
PLAIN = ("request_id", "end_id", "num_sequences", "return_log_probs", "return_prompt_log_probs", "num_top_log_probs",
         "return_context_logits", "return_generation_logits", "priority", "speculation", "pooled",
         "second_segment")  # fmt: skip
WORDS = ("stop_ids", "bad_ids", "embedding_bias")
Item: TypeAlias = TokenEvent | LlmserveError
GuideSource: TypeAlias = tuple[str, str]  # its kind and its text
Number = TypeVar("Number", int, float)


class Flag(IntFlag):
    """The parts of an event's row after its tokens. The lowest bits are the finish reason's number, from 1 on."""

    FINISH = 0x0F
    LOG_PROBS = 0x10
    USAGE = 0x20
    TOP = 0x40
    LOGITS = 0x80
    PROMPT = 0x100
    ERROR = 0x200  # not an event: the stream ends with the error that has this number in the document


# Plain numbers, because they are checked for each event.
FINISH, LOG_PROBS, USAGE, TOP, LOGITS, PROMPT, ERROR = map(int, Flag.__members__.values())


def submit_frame(request: GenerateRequest, stream_id: int) -> Frame:
    """`timeout_s` is the time from now to the deadline."""
    document: dict[str, Any] = {name: getattr(request, name) for name in (*PLAIN, *WORDS)}
    document |= {"stream": stream_id, "sampling": asdict(request.sampling)}
    if request.draft_ids:
        document["draft_ids"] = request.draft_ids
    if request.adapter:
        document["adapter"] = request.adapter
    if request.guide is not None:
        document["guide"] = guide_source(request.guide)
    if request.beam is not None:
        document["beam"] = asdict(request.beam)
    if request.deadline is not None:
        document["timeout_s"] = request.deadline - time.monotonic()
    if request.tenant != EVERYBODY:
        document["tenant"] = tenant_document(request.tenant)
    return Frame(Kind.SUBMIT, document, request.prompt_ids)


def read_submit(frame: Frame) -> tuple[int, GenerateRequest, GuideSource | None]:
    """The stream, the request, and the source of its guide. Raises `ProtocolError`."""
    try:
        document = dict(frame.document)
        beam, timeout_s, tenant = document.get("beam"), document.get("timeout_s"), document.get("tenant")
        given: dict[str, Any] = {name: document[name] for name in PLAIN}
        given |= {name: tuple(map(tuple, document[name])) for name in WORDS}
        request = GenerateRequest(
            **given,
            prompt_ids=tuple(frame.integers),
            draft_ids=tuple(document.get("draft_ids", ())),
            adapter=str(document.get("adapter", "")),
            sampling=SamplingParams(**document["sampling"]),
            beam=None if beam is None else BeamSearch(**beam),
            deadline=None if timeout_s is None else time.monotonic() + timeout_s,
            tenant=EVERYBODY if tenant is None else read_tenant(tenant),
        )
        guide = document.get("guide")
        return int(document["stream"]), request, None if guide is None else (str(guide[0]), str(guide[1]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"invalid request: {error!r}") from error


def read_adapter(frame: Frame) -> tuple[int, Path, str]:
    """The number of the call, the directory and its digest. Raises `ProtocolError`."""
    try:
        return int(frame.document["call"]), Path(frame.document["path"]), read_digest(frame)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"invalid adapter: {error!r}") from error


def read_digest(frame: Frame) -> str:
    try:
        return str(frame.document["digest"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"invalid digest: {error!r}") from error


def read_added(frame: Frame) -> tuple[int, LlmserveError | None]:
    """The number of the call, and its error."""
    try:
        error = frame.document.get("error")
        return int(frame.document["call"]), None if error is None else read_error(error)
    except (KeyError, TypeError, ValueError, AttributeError) as failure:
        raise ProtocolError(f"invalid answer: {failure!r}") from failure


def guide_source(guide: Guide) -> GuideSource:
    """Raises `Unsupported` if it has none."""
    if not isinstance(guide, SourcedGuide):
        raise Unsupported(
            f"guide: {type(guide).__name__} has no text to compile in the engine's process; use a "
            "schema, a regular expression or a grammar, or an engine in this process"
        )
    return guide.source


def tenant_document(tenant: Tenant) -> dict[str, Any]:
    return {name: getattr(tenant, name) for name in LIMITS}


def read_tenant(document: Any) -> Tenant:
    try:
        return Tenant(**{name: document[name] for name in LIMITS})
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"invalid tenant: {error!r}") from error


class EventWriter:
    """The events of one step, for one client."""

    def __init__(self) -> None:
        self._integers: list[int] = []
        self._floats: list[float] = []
        self._blobs: list[bytes] = []
        self._errors: list[dict[str, Any]] = []

    def add(self, stream_id: int, event: TokenEvent) -> None:
        flags = 0 if event.finish_reason is None else 1 + FINISH_REASONS.index(event.finish_reason)
        integers, floats, token_ids = self._integers, self._floats, event.token_ids
        place = len(integers) + 2
        integers += (stream_id, event.sequence_index, flags, len(token_ids), *token_ids)
        floats.append(event.cum_log_prob)
        if event.log_probs:
            flags |= LOG_PROBS
            integers.append(len(event.log_probs))
            floats += event.log_probs
        if event.usage is not None:
            flags |= USAGE
            integers += _usage_row(event.usage)
        if event.top:
            flags |= TOP
            self._add_top(event.top)
        if event.logits:
            flags |= LOGITS
            self._add_logits(event.logits)
        if event.prompt is not None:
            flags |= PROMPT
            integers.append(len(event.prompt.log_probs))
            floats += event.prompt.log_probs
            self._add_top(event.prompt.top)
            self._add_logits(event.prompt.logits)
        integers[place] = flags

    def fail(self, stream_id: int, error: LlmserveError) -> None:
        """Ends the stream with an error."""
        self._integers += (stream_id, len(self._errors), ERROR, 0)
        self._errors.append(error_document(error))

    def frame(self) -> Frame:
        return Frame(Kind.EVENTS, self._errors or None, self._integers, self._floats, b"".join(self._blobs))

    def _add_top(self, top: Sequence[TopTokens]) -> None:
        self._integers.append(len(top))
        for one in top:
            self._integers += (len(one.ids), *one.ids)
            self._floats += one.log_probs

    def _add_logits(self, pieces: Sequence[Logits]) -> None:
        self._integers.append(len(pieces))
        for piece in pieces:
            self._integers += (piece.ndim, *piece.shape)
            self._blobs.append(np.ascontiguousarray(piece, np.float32).tobytes())


def read_events(frame: Frame) -> list[tuple[int, Item]]:
    """Events with their streams. Raises `ProtocolError`."""
    try:
        return list(_EventReader(frame).items())
    except (StopIteration, IndexError, ValueError, TypeError, RuntimeError) as error:
        raise ProtocolError(f"invalid events: {error!r}") from error


class _EventReader:
    def __init__(self, frame: Frame) -> None:
        self._errors = frame.document or []
        self._integers = iter(frame.integers)
        self._floats = iter(frame.floats)
        self._blob, self._blob_at = frame.blob, 0

    def items(self) -> Iterator[tuple[int, Item]]:
        integers, floats = self._integers, self._floats
        for stream_id in integers:
            index, flags, num_tokens = next(integers), next(integers), next(integers)
            if flags & ERROR:
                yield stream_id, read_error(self._errors[index])
                continue
            event = TokenEvent(
                _taken(integers, num_tokens),
                cum_log_prob=next(floats),
                sequence_index=index,
                finish_reason=FINISH_REASONS[(flags & FINISH) - 1] if flags & FINISH else None,
            )
            yield stream_id, self._with_rest(event, flags) if flags & ~FINISH else event

    def _with_rest(self, event: TokenEvent, flags: int) -> TokenEvent:
        log_probs = _taken(self._floats, next(self._integers)) if flags & LOG_PROBS else ()
        usage = Usage(*islice(self._integers, NUM_USAGE)) if flags & USAGE else None
        top = self._top() if flags & TOP else ()
        logits = self._logits() if flags & LOGITS else ()
        prompt = None
        if flags & PROMPT:
            prompt_log_probs = _taken(self._floats, next(self._integers))
            prompt = PromptScores(prompt_log_probs, self._top(), self._logits())
        return replace(event, log_probs=log_probs, usage=usage, top=top, logits=logits, prompt=prompt)

    def _top(self) -> tuple[TopTokens, ...]:
        counts = range(next(self._integers))
        ids = [_taken(self._integers, next(self._integers)) for _ in counts]
        return tuple([TopTokens(one, _taken(self._floats, len(one))) for one in ids])

    def _logits(self) -> tuple[Logits, ...]:
        return tuple([self._piece() for _ in range(next(self._integers))])

    def _piece(self) -> Logits:
        shape = tuple(islice(self._integers, next(self._integers)))
        begin, self._blob_at = self._blob_at, self._blob_at + 4 * int(np.prod(shape))
        return np.frombuffer(self._blob[begin : self._blob_at], np.float32).reshape(shape)


def _taken(numbers: Iterator[Number], count: int) -> tuple[Number, ...]:
    taken = tuple(islice(numbers, count))
    if len(taken) != count:
        raise IndexError(f"{count} numbers expected, got {len(taken)}")
    return taken


USAGE_FIELDS = tuple(field.name for field in fields(Usage))
NUM_USAGE = len(USAGE_FIELDS)


def _usage_row(usage: Usage) -> tuple[int, ...]:
    return tuple([getattr(usage, name) for name in USAGE_FIELDS])


def error_document(error: LlmserveError) -> dict[str, Any]:
    facts = {name: value for name, value in vars(error).items() if not name.startswith("_")}  # notes are not sent
    return {"class": type(error).__name__, "code": error.code.name, "message": str(error), "facts": facts}


def read_error(document: Mapping[str, Any]) -> LlmserveError:
    """Returns an error of the same class with the same message; for an unknown class, the nearest one with its code."""
    message = str(document.get("message"))
    found = getattr(errors, str(document.get("class")), None)
    if isinstance(found, type) and issubclass(found, LlmserveError):
        return found(message, **document.get("facts", {}))
    code = str(document.get("code"))
    nearest = next((one for one in LlmserveError.__subclasses__() if one.code.name == code), InternalError)
    return nearest(message)


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine's report about itself, sent when it changes."""

    stats: EngineStats
    is_healthy: bool
    allowances: Mapping[Tenant, Allowance]

    def document(self) -> dict[str, Any]:
        allowances = [[tenant_document(tenant), asdict(left)] for tenant, left in self.allowances.items()]
        return {"stats": asdict(self.stats), "healthy": self.is_healthy, "allowances": allowances}

    @classmethod
    def read(cls, document: Any) -> EngineState:
        try:
            allowances = {read_tenant(tenant): Allowance(**left) for tenant, left in document["allowances"]}
            return cls(EngineStats(**document["stats"]), bool(document["healthy"]), allowances)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"invalid engine state: {error!r}") from error


def hello_frame(info: EngineInfo, state: EngineState) -> Frame:
    return Frame(Kind.HELLO, {"info": asdict(info), "state": state.document()})


def read_hello(frame: Frame) -> tuple[EngineInfo, EngineState]:
    if frame.kind is not Kind.HELLO:
        raise ProtocolError(f"the engine's first frame is of kind {frame.kind.name}")
    try:
        return EngineInfo(**frame.document["info"]), EngineState.read(frame.document["state"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"invalid first frame from an engine: {error!r}") from error
