"""Notes on fields that do not change the answer: they are accepted, and named in the answer's member `warning`.

A field that would change the answer is refused (`validation.refused`). `--unknown-fields refuse` refuses both.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field

LOG = logging.getLogger("llmserve")
MOST_NOTES = 10  # of one request
MOST_LOGGED = 100  # of a server, because clients choose the names of unknown fields
_logged: set[str] = set()


@dataclass(slots=True)
class Notes:
    """The notes of one request."""

    refuses: bool = False
    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> bool:
        """Returns False if the field must be refused."""
        if self.refuses:
            return False
        if text not in self.texts and len(self.texts) < MOST_NOTES:
            self.texts.append(text)
        if text not in _logged and len(_logged) < MOST_LOGGED:
            _logged.add(text)
            LOG.warning("a request to the text APIs: %s", text)
        return True


_notes: ContextVar[Notes] = ContextVar("notes")
STRICT = Notes(refuses=True)


def begin_notes(refuses: bool) -> Notes:
    """Start the notes of another request in this task."""
    notes = Notes(refuses)
    _notes.set(notes)
    return notes


def note(text: str) -> bool:
    """Add a note to the current request. Returns False if the field must be refused."""
    return _notes.get(STRICT).add(text)


def current_notes() -> Notes:
    return _notes.get(STRICT)
