"""Flags of the commands that open an engine."""

from __future__ import annotations

from llmserve.errors import InvalidArgument
from llmserve.scheduler.drafts.drafter import Speculation

SPECULATION_HELP = "Drafters, with commas between them: lookup, grammar; or off. Answers stay the same."


def speculation_flag(text: str) -> Speculation:
    try:
        return Speculation.read(text)
    except ValueError as error:
        raise InvalidArgument(f"--speculation {text!r}: {error}") from error
