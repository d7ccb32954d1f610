"""The content of an answer: text, thoughts and tool calls, whole or in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.replies import new_id
from llmserve.frontends.text.requests.ensembles import Values
from llmserve.stages.answer_parts import Part, PartKind, PartReader


@dataclass(slots=True)
class Call:
    name: str
    id: str = field(default_factory=lambda: new_id("call", "_"))
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    @property
    def value(self) -> dict[str, Json] | None:
        """The arguments as an object; None if they are not an object, or were cut off."""
        try:
            found = json.loads(self.arguments, strict=False)  # accepts line breaks in strings, which models write
            json.dumps(found, allow_nan=False)  # refuses NaN and Infinity, which are not JSON
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def has_called(calls: Sequence[Call]) -> bool:
    """Whether there are calls, and the last one is complete."""
    return bool(calls) and calls[-1].value is not None


@dataclass(slots=True)
class Said:
    """A whole answer."""

    text: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, part: Part) -> None:
        match part.kind:
            case PartKind.TEXT:
                self.text += part.text
            case PartKind.THOUGHT:
                self.thought += part.text
            case PartKind.CALL:
                self.calls.append(Call(part.text))
            case PartKind.ARGUMENTS:
                self.calls[-1].pieces.append(part.text)


def read_parts(reader: PartReader | None, text: str, *, is_last: bool) -> list[Part]:
    """The parts of the next piece of an answer, for all APIs. Without a reader, all of it is text."""
    if reader is not None:
        return reader.read(text, is_last=is_last)
    return [Part(PartKind.TEXT, text)] if text else []


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation, ready to be sent to the ensemble."""

    prompt: Values  # inputs of the ensemble
    guide: Values  # inputs that constrain the form of the answer
    new_reader: Callable[[], PartReader | None]  # for one answer; returns None if all of it is text
    thinks: bool = False  # answers may begin with thoughts

    def parts(self, text: str) -> list[Part]:
        """The parts of a whole answer."""
        return read_parts(self.new_reader(), text, is_last=True)

    def said(self, text: str) -> Said:
        found = Said()
        for part in self.parts(text):
            found.add(part)
        return found
