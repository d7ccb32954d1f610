"""The conversation of a chat, and its file: JSON that other programs can also read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from llmserve.errors import InvalidArgument

Message: TypeAlias = dict[str, str]  # with `role` and `content`
Value: TypeAlias = str | int | float | bool
ROLES = ("user", "assistant")


@dataclass(slots=True)
class Conversation:
    system: str = ""
    messages: list[Message] = field(default_factory=list)  # of user and assistant, alternating

    def with_question(self, question: str) -> list[Message]:
        """All messages for a new question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    @property
    def last_question(self) -> str | None:
        return self.messages[-2]["content"] if self.messages else None

    def undo(self) -> str | None:
        """Forget the last question and its answer. Returns the question, or None if there is none."""
        question = self.last_question
        del self.messages[-2:]
        return question

    def save(self, path: Path, model: str, parameters: Mapping[str, Value]) -> None:
        """Raises `InvalidArgument`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        document = {"model": model, "parameters": dict(parameters), "messages": [*system, *self.messages]}
        try:
            path.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be written: {error.strerror}") from error


def load_conversation(path: Path) -> tuple[Conversation, dict[str, Value]]:
    """A saved conversation and its parameters. Raises `InvalidArgument`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise InvalidArgument(
            f"{path} is not a saved conversation: expected messages, each with the texts role and content"
        )
    is_led = bool(messages) and messages[0]["role"] == "system"
    said = messages[1:] if is_led else messages
    if len(said) % 2 or any(message["role"] != ROLES[place % 2] for place, message in enumerate(said)):
        raise InvalidArgument(f"{path}: after a system message, user and assistant must alternate")
    return Conversation(messages[0]["content"] if is_led else "", said), _parameters(path, document)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _parameters(path: Path, document: Mapping[str, Any]) -> dict[str, Value]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict) or not all(isinstance(value, Value) for value in parameters.values()):
        raise InvalidArgument(f"{path}: parameters must be an object of texts and numbers")
    return parameters


def question_count(messages: Sequence[Message]) -> str:
    count = len(messages) // 2
    return "1 question" if count == 1 else f"{count} questions"
