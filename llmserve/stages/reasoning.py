"""Thoughts before an answer, as in DeepSeek-R1 and Qwen3: `<think>`, the thought, `</think>`, the answer. Other
families have other tags.

Some chat templates end a prompt inside a thought, which is then open when the answer begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.stages import harmony
from llmserve.stages.answer_parts import Part, PartKind
from llmserve.stages.stop_strings import num_held

TAG = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True, slots=True)
class Tags:
    begin: str
    end: str
    label: str = ""  # tags after the first
    answer: tuple[str, str] = ("", "")  # around the answer


TAGS: Mapping[str, Tags] = {  # by the name of the format
    "seed_oss": Tags("<seed:think>", "</seed:think>"),
    "mistral": Tags("[THINK]", "[/THINK]"),
    "gemma4": Tags("<|channel>", "<channel|>", "thought"),
    "granite": Tags("<think>", "</think>", answer=("<response>", "</response>")),
    "think": Tags("<think>", "</think>"),
}


def found_reasoning(template: str) -> str:
    """The format of thoughts that a chat template uses; empty: none."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return harmony.NAME
    return next((name for name, tags in TAGS.items() if tags.end in template and tags.answer[0] in template), "")


def is_open_after(prompt: str, reasoning: str) -> bool:
    """Whether a prompt ends inside a thought, of which it has only tags."""
    tags = TAGS.get(reasoning)
    if tags is None or tags.begin not in prompt:
        return False
    thought = prompt.rpartition(tags.begin)[2].removeprefix(tags.label)
    return tags.end not in thought and not TAG.sub("", thought).strip()


class ThoughtReader:
    """Reads one answer. White space around the thought belongs to neither part."""

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        self._tags = tags
        self._is_open = is_open
        self._waiting = ""
        self._begun = False
        self._has_thought = False  # a part of the thought was returned
        self._ended = False  # the answer follows
        self._has_answer = False
        self._is_wrapped = False  # the answer is between tags
        self._is_closed = False  # both tags were returned

    def read(self, text: str, *, is_last: bool = False) -> tuple[list[Part], str]:
        """Parts of the thought, and the certain text of the answer."""
        self._waiting += text
        if self._has_answer:
            return [], self._unwrapped(is_last)
        if not self._begun and not self._ended and not self._begin(is_last):
            return [], ""
        parts = [] if self._ended else self._thought(is_last)
        return parts, self._answer(is_last) if self._ended else ""

    def _begin(self, is_last: bool) -> bool:
        """Whether it is now known how the answer begins."""
        rest, begin, label = self._waiting.lstrip(), self._tags.begin, self._tags.label
        if rest != begin + label and (begin + label).startswith(rest) and not is_last:
            return False
        if rest.startswith(begin):
            self._waiting, self._begun = rest.removeprefix(begin).removeprefix(label), True
        elif self._is_open:
            self._begun = True
        else:
            self._ended = self._has_answer = True
        return True

    def _thought(self, is_last: bool) -> list[Part]:
        place, end = self._waiting.find(self._tags.end), self._tags.end
        if place >= 0:
            shown, self._waiting = self._waiting[:place].rstrip(), self._waiting[place + len(end) :]
            self._ended = True
        else:
            kept = 0 if is_last else num_held(self._waiting, (end,))
            shown = self._waiting[: len(self._waiting) - kept].rstrip()
            self._waiting = self._waiting[len(shown) :]
        if not self._has_thought:
            shown = shown.lstrip()
        self._has_thought = self._has_thought or bool(shown)
        return [Part(PartKind.THOUGHT, shown)] if shown else []

    def _answer(self, is_last: bool) -> str:
        if not self._has_answer:
            rest, begin = self._waiting.lstrip(), self._tags.answer[0]
            if rest != begin and begin.startswith(rest) and not self._is_wrapped and not is_last:
                return ""
            if begin and rest.startswith(begin):
                self._is_wrapped, rest = True, rest.removeprefix(begin).lstrip()
            self._waiting, self._has_answer = rest, bool(rest)
        return self._unwrapped(is_last)

    def _unwrapped(self, is_last: bool) -> str:
        """The certain text of the answer, without its last tag and the white space around that."""
        end, shown = self._tags.answer[1], ""
        if self._is_wrapped and not self._is_closed and end in self._waiting:
            before, _, self._waiting = self._waiting.partition(end)
            self._is_closed, shown = True, before.rstrip()
        text = self._waiting
        if self._is_closed:
            text = text.rstrip()
        elif self._is_wrapped and not is_last:
            text = text[: len(text) - num_held(text, (end,))].rstrip()
        self._waiting = self._waiting[len(text) :]
        return shown + text
