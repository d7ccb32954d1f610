"""What goes in at one end comes out at the other, to the bit."""

from __future__ import annotations

import hashlib
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from llmserve import errors
from llmserve.core import (
    Allowance,
    BeamSearch,
    FinishReason,
    GenerateRequest,
    PromptScores,
    SamplingParams,
    Tenant,
    TokenEvent,
    TopTokens,
    Usage,
)
from llmserve.engine.base import EngineInfo, EngineStats
from llmserve.engine.remote.child import ChildSpec
from llmserve.engine.remote.frames import MAGIC, PREAMBLE, VERSION, Frame, FrameReader, Kind, ProtocolError, preamble
from llmserve.engine.remote.messages import (
    EngineState,
    EventWriter,
    Flag,
    error_document,
    read_error,
    read_events,
    read_submit,
    submit_frame,
)
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import LlmserveError, PromptTooLong, RateLimited, Unsupported
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tests.contracts.guides import Evens

REQUEST = GenerateRequest(
    "all/1", (5, 6, 7), SamplingParams(9, 1, 0.7, 5, 0.9, 0.01, 1.1, 0.2, 0.3, 2**64 - 1), 4, ((1, 2), (3,)), ((9,),),
    ((8, float("inf")), (7, -0.1)), 3, None, BeamSearch(2, 0.5), True, True, 4, True, True, -2, None,
    Tenant("somebody", 2.0, 3, 400), False, (8, 9), True, 2, "a" * 64,
)  # fmt: skip
ROWS = tuple(np.arange(6, dtype=np.float32).reshape(2, 3) * scale for scale in (1.0, 0.1))
TOP = (TopTokens((3, 1), (-0.1, -2.5)), TopTokens((), ()))
EVENTS = (
    TokenEvent((7,)),
    TokenEvent((7, 2**31), (-0.1, -0.2), -0.3, 5),
    TokenEvent((), finish_reason=FinishReason.CANCELLED, usage=Usage(1, 2, 3, time.time_ns(), 5, 6, 7, 8, 9, 4)),
    TokenEvent((1,), top=TOP, logits=(ROWS[0][0],), prompt=PromptScores((-1.0,), TOP, ROWS)),
)


# What travels by its fields' names and numbers. When this changes, `VERSION` has to, and then this.
TRAVELS = (GenerateRequest, SamplingParams, BeamSearch, TokenEvent, Usage, EngineInfo, EngineStats, Allowance)
FIELDS_OF_VERSION = (8, "d15e1ee67ef10e57")


def test_other_fields_are_another_version() -> None:
    names = [[field.name for field in fields(one)] for one in TRAVELS]
    text = repr([names, [reason.name for reason in FinishReason], list(Flag.__members__), list(Kind.__members__)])
    assert (VERSION, hashlib.sha256(text.encode()).hexdigest()[:16]) == FIELDS_OF_VERSION


def over_the_wire(frame: Frame) -> Frame:
    """A byte at a time."""
    reader = FrameReader(1 << 20)
    (read,) = [one for byte in preamble() + frame.encoded() for one in reader.feed(bytes([byte]))]
    return read


def test_a_request_travels_whole() -> None:
    assert {field.name for field in fields(GenerateRequest) if getattr(REQUEST, field.name) == field.default} == {
        "guide", "deadline",
    }  # fmt: skip
    assert read_submit(over_the_wire(submit_frame(REQUEST, 17))) == (17, REQUEST, None)
    plain = GenerateRequest("plain", (1,))
    assert read_submit(over_the_wire(submit_frame(plain, 0))) == (0, plain, None)


def test_a_guide_travels_as_its_text_and_a_deadline_as_what_is_left() -> None:
    deadline = time.monotonic() + 100
    frame = submit_frame(replace(REQUEST, guide=Evens(64), deadline=deadline), 1)
    assert frame.document["timeout_s"] == pytest.approx(100, abs=5)
    _, request, guide = read_submit(frame)
    assert guide == ("evens", "64")
    assert request.deadline is not None
    assert 0 <= request.deadline - deadline < 5  # later by the journey


def test_a_guide_without_a_text_is_refused_by_name() -> None:
    class Unwritten:
        def start(self) -> Evens:
            return Evens(64)

    with pytest.raises(Unsupported, match="guide: Unwritten has no text"):
        submit_frame(replace(REQUEST, guide=Unwritten()), 1)


def test_the_events_of_a_step_travel_whole() -> None:
    writer = EventWriter()
    for number, event in enumerate(EVENTS):
        writer.add(number, event)
        writer.fail(100 + number, RateLimited("slowly", limit="tokens_per_minute", retry_after_s=0.1))
    read = read_events(over_the_wire(writer.frame()))
    assert [stream for stream, _ in read] == [0, 100, 1, 101, 2, 102, 3, 103]
    events = [item for _, item in read if isinstance(item, TokenEvent)]
    assert events[:3] == list(EVENTS[:3])
    assert (events[3].prompt is not None, events[3].top) == (True, TOP)
    for mine, theirs in zip(events[3].logits, EVENTS[3].logits, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert events[3].prompt is not None
    for piece, row in zip(events[3].prompt.logits, ROWS, strict=True):
        np.testing.assert_array_equal(piece, row)
    assert vars(read[1][1]) == {"limit": "tokens_per_minute", "retry_after_s": 0.1}


def every_error() -> list[type[LlmserveError]]:
    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, LlmserveError)]
    assert len(found) > 15
    return found


@pytest.mark.parametrize("error", every_error())
def test_an_error_stays_what_it_is(error: type[LlmserveError]) -> None:
    frame = over_the_wire(Frame(Kind.GOODBYE, error_document(error("what is wrong"))))
    read = read_error(frame.document)
    assert (type(read), read.code, str(read)) == (error, error.code, "what is wrong")


def test_an_error_of_another_release_keeps_its_code() -> None:
    document = error_document(PromptTooLong("long", num_tokens=3, limit=2))
    assert vars(read_error(document)) == {"num_tokens": 3, "limit": 2}
    assert type(read_error(document | {"class": "Unheard"})) is errors.InvalidArgument


def test_statistics_and_settings_travel_whole() -> None:
    state = EngineState(EngineStats(3, total_ctx_tokens=None, num_restarts=2), True, {})
    assert EngineState.read(over_the_wire(Frame(Kind.STATE, state.document())).document) == state
    scheduler = SchedulerSettings(Policy.MAX_UTILIZATION, False, 7, 8)
    settings = EngineSettings(2, 0.5, 640, scheduler, GpuSettings(max_beam_width=2, instance_gpus=(0, 1)), 99)
    spec = ChildSpec(Path("/engine"), Path("/tokenizer"), settings, Path("/socket"), 10)
    assert ChildSpec.read(spec.line()) == spec


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not llmserve's engine protocol"),
        (PREAMBLE.pack(MAGIC, 99), "uses version 99"),
        (preamble() + b"\xff" * 64, "a frame has .* bytes; the limit is 1024"),
        (preamble() + Frame(Kind.STATE, "x" * 1100).encoded(), "a frame has 1102 bytes"),
        (preamble() + b"\x63" + Frame(Kind.STATE).encoded()[1:], "99 is not a valid Kind"),
        (preamble() + Frame(Kind.STATE, [1]).encoded().replace(b"[1]", b"[1["), "invalid frame"),
    ],
)
def test_what_is_not_the_protocol_is_said(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        list(FrameReader(1024).feed(data))


CUT_SHORT = ([1], [1, 0, 0, 9, 5], [1, 0, 0x20, 0], [1, 0, 0x200, 0], [1, 0, 0x80, 0, 1, 1, 4])


@pytest.mark.parametrize("integers", CUT_SHORT)
def test_events_that_are_cut_short_are_said(integers: list[int]) -> None:
    with pytest.raises(ProtocolError):
        read_events(Frame(Kind.EVENTS, None, integers, [0.0]))


@pytest.mark.parametrize("document", [None, 5, {}, {"stream": "x"}])
def test_requests_that_cannot_be_read_are_said(document: object) -> None:
    with pytest.raises(ProtocolError, match="invalid request"):
        read_submit(Frame(Kind.SUBMIT, document))
