"""Calls that are JSON objects with a name and arguments, read as they arrive: the name first, then arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from llmserve.stages.answer_parts import Part, PartKind
from llmserve.stages.stop_strings import num_held

STRUCTURE = re.compile(r'["{}\[\]]')
IN_STRING = re.compile(r'["\\]')
HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
FIRST_KEY = re.compile(r'\s*\{\s*"((?:[^"\\]|\\.)*)"')
KEYS = ("name", "arguments", "parameters", "type", "id")  # possible beginnings of a call
ARGUMENTS = ("arguments", "parameters")


class ValueEnd:
    """Finds the end of a JSON object, array or string that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """The position after the value in its next piece; None: it continues."""
        place = 0
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (IN_STRING if self._is_string else STRUCTURE).search(text, place)
            if found is None:
                return None
            place = found.end()
            self._take(found[0])
            if self._depth <= 0 and not self._is_string and not self._is_escaped:
                return place
        return None

    def _take(self, character: str) -> None:
        if character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = not self._is_string
        else:
            self._depth += 1 if character in "{[" else -1


class CallObject:
    """One call. Until it is known to be one (`is_call`), its text waits in `waiting`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._object = ValueEnd()
        self._arguments: ValueEnd | None = None  # while they come
        self.is_call: bool | None = None
        self.waiting = ""

    def read(self, text: str) -> tuple[list[Part], str | None]:
        """Parts, and the text after the object, or None while it continues. If it is no call, all is in `waiting`."""
        end = self._object.find(text)
        behind = None if end is None else text[end:]
        inside = text if end is None else text[:end]
        if self.is_call:
            return self._more_arguments(inside), behind
        self.waiting += inside
        if found := HEADER.match(self.waiting):
            return self._begun(json.loads(found[1], strict=False), self.waiting[found.end() :]), behind
        if end is not None:
            return self._whole(), behind
        first = FIRST_KEY.match(self.waiting)
        if first is not None and first[1] not in KEYS:
            self.is_call = False
        return [], behind

    def _begun(self, name: str, arguments: str) -> list[Part]:
        self.is_call = name in self._names
        if not self.is_call:
            return []
        self._arguments = ValueEnd()
        return [Part(PartKind.CALL, name), *self._more_arguments(arguments)]

    def _more_arguments(self, text: str) -> list[Part]:
        if self._arguments is None:  # they have ended, the object has not
            return []
        end = self._arguments.find(text)
        if end is not None:
            self._arguments = None
        piece = text[:end]
        return [Part(PartKind.ARGUMENTS, piece)] if piece else []

    def _whole(self) -> list[Part]:
        """For an object with other members, or in another order: known only at its end."""
        try:
            found = json.loads(self.waiting, strict=False)
        except (ValueError, RecursionError):
            found = None
        name = found.get("name") if isinstance(found, dict) else None
        self.is_call = isinstance(name, str) and name in self._names
        if not self.is_call:
            return []
        given: Any = next((found[key] for key in ARGUMENTS if key in found), None)
        if isinstance(given, str):
            arguments = given if given.strip() else "{}"
        else:
            arguments = json.dumps(given or {}, ensure_ascii=False)
        return [Part(PartKind.CALL, str(name)), Part(PartKind.ARGUMENTS, arguments)]


class CallReader:
    """Reads an answer of text and calls. `_state` reads the waiting text, and returns whether it made progress.

    White space before a call, or alone after one, is not text.
    """

    def __init__(self, names: Collection[str], *markers: str) -> None:
        self._names = names
        self._markers = markers
        self._state: Callable[[], bool] = self._in_text
        self._waiting = ""
        self._opening = ""  # text before the object that may be a call
        self._call = CallObject(names)
        self._parts: list[Part] = []
        self._is_last = False
        self._has_called = False

    def read(self, text: str, *, is_last: bool = False) -> list[Part]:
        self._waiting += text
        self._is_last = is_last
        self._parts = []
        while self._state():
            pass
        return self._parts

    def _in_text(self) -> bool:
        found = [(place, each) for each in self._markers if (place := self._waiting.find(each)) >= 0]
        if found:
            begin, marker = min(found)
            shown, end = self._waiting[:begin].rstrip(), begin + len(marker)
            self._tell(shown)
            self._opening, self._waiting = self._waiting[len(shown) : end], self._waiting[end:]
            self._state = self._behind_marker
            return True
        kept = 0 if self._is_last else num_held(self._waiting, self._markers)
        shown = self._waiting[: len(self._waiting) - kept]
        if self._has_called or not self._is_last:
            shown = shown.rstrip()
        self._waiting = "" if self._is_last else self._waiting[len(shown) :]
        self._tell(shown)
        return False

    def _behind_marker(self) -> bool:
        """An object is expected."""
        rest = self._waiting.lstrip()
        if not rest and not self._is_last:
            return False
        if rest[:1] != "{":
            self._was_text()
            return True
        self._call, self._state = CallObject(self._names), self._in_call
        return True

    def _in_call(self) -> bool:
        text, self._waiting = self._waiting, ""
        parts, behind = self._call.read(text)
        self._parts += parts
        if self._call.is_call is False or (self._is_last and self._call.is_call is None):
            self._waiting = self._call.waiting + (behind or "")
            self._was_text()
            return True
        self._has_called = self._has_called or bool(self._call.is_call)
        if behind is None:
            return False
        self._waiting, self._state = behind, self._behind_call
        return True

    def _behind_call(self) -> bool:
        self._state = self._in_text
        return True

    def _was_text(self) -> None:
        """The text since the marker is not a call."""
        opening, self._opening = self._opening, ""
        self._tell(opening)
        self._state = self._in_text

    def _tell(self, text: str) -> None:
        if self._has_called and not text.strip():
            return
        if text:
            self._parts.append(Part(PartKind.TEXT, text))
