"""Chat messages to prompt ids, in the form that the checkpoint was trained with.

Two forms: role tokens inserted as ids (Baichuan), or the jinja template that comes with the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmserve.errors import InvalidArgument, Unsupported, raise_problems
from llmserve.stages.chat_template import ChatTemplate
from llmserve.stages.files import TextFiles
from llmserve.stages.tokenizer import Tokenizer

BAICHUAN_USER_ID, BAICHUAN_ASSISTANT_ID = 195, 196


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


class ChatFormat(Protocol):
    def encode(self, messages: Sequence[Message], max_ids: int | None = None) -> list[int]:
        """Prompt ids that end where the assistant's answer begins. `max_ids`: room for the prompt, None: no limit."""
        ...


def chat_format(tokenizer: Tokenizer, files: TextFiles) -> ChatFormat | None:
    """The checkpoint's chat format, or None for one that was not made to chat."""
    user, assistant = files.token_ids("user_token_id"), files.token_ids("assistant_token_id")
    is_baichuan = files.hf_config.get("model_type") == "baichuan" or files.tokenizer_class.startswith("Baichuan")
    if is_baichuan or (user and assistant):
        user_id = user[0] if user else BAICHUAN_USER_ID
        return RoleIdFormat(tokenizer, user_id, assistant[0] if assistant else BAICHUAN_ASSISTANT_ID)
    if files.chat_template:
        return TemplateFormat(tokenizer, ChatTemplate(files.chat_template, files.special_tokens))
    return None


def require_chat_format(tokenizer: Tokenizer, files: TextFiles) -> ChatFormat:
    if found := chat_format(tokenizer, files):
        return found
    raise Unsupported(
        f"{files.path.name} has no chat format (no role token ids in generation_config.json, no chat_template in "
        "tokenizer_config.json); send plain text instead of messages"
    )


def parse_messages(text: str) -> list[Message]:
    """`[{"role": ..., "content": ...}, ...]` as JSON."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"messages is not valid JSON: {error}") from error
    if not isinstance(listed, list) or not listed:
        raise InvalidArgument('messages must be a non-empty list such as [{"role": "user", "content": "Hello"}]')
    problems = [f"message {i} {problem}" for i, entry in enumerate(listed) if (problem := _problem(entry))]
    raise_problems(InvalidArgument, "messages cannot be used", problems)
    return [Message(entry["role"], entry["content"]) for entry in listed]


def _problem(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "must be an object with role and content"
    missing = [key for key in ("role", "content") if not isinstance(entry.get(key), str)]
    return f"needs a string in: {', '.join(missing)}" if missing else ""


@dataclass(frozen=True, slots=True)
class RoleIdFormat:
    """Baichuan's rule: the system text, then per message a role id and the content; no bos.

    Whole rounds (a user message and what follows it) are dropped from the front until the prompt fits; the last round
    always stays, and loses its beginning if it is too long by itself.
    """

    tokenizer: Tokenizer
    user_id: int
    assistant_id: int

    def encode(self, messages: Sequence[Message], max_ids: int | None = None) -> list[int]:
        system, dialogue = self._split(messages)
        ids = self._content(system)
        rounds = self._rounds(dialogue)
        opening = [self.assistant_id] if messages[-1].role != "assistant" else []
        room = max_ids - len(ids) - len(opening) if max_ids is not None else None
        prompt = ids + _newest_that_fit(rounds, room) + opening
        return prompt if max_ids is None else prompt[-max(1, max_ids) :]

    def _split(self, messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
        system = messages[0].content if messages[0].role == "system" else ""
        dialogue = messages[1:] if messages[0].role == "system" else messages
        problems = [
            f"message {messages.index(message)} has role {message.role!r}; this checkpoint knows user and assistant"
            " (and system, in the first message only)"
            for message in dialogue
            if message.role not in ("user", "assistant")
        ]
        if not dialogue:
            problems = ["there is no user message"]
        raise_problems(InvalidArgument, "messages cannot be used", problems)
        return system, dialogue

    def _rounds(self, dialogue: Sequence[Message]) -> list[list[int]]:
        rounds: list[list[int]] = []
        for message in dialogue:
            if message.role == "user" or not rounds:
                rounds.append([])
            rounds[-1].append(self.user_id if message.role == "user" else self.assistant_id)
            rounds[-1] += self._content(message.content)
        return rounds

    def _content(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, banned=(self.user_id, self.assistant_id))


def _newest_that_fit(rounds: Sequence[list[int]], room: int | None) -> list[int]:
    kept: list[int] = []
    for ids in reversed(rounds):
        if kept and room is not None and len(kept) + len(ids) > room:
            break
        kept = ids + kept
    return kept


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """A rendered template; the special tokens in it become ids. Too long a dialogue is not cut.

    As in transformers, a special token spelled in a message becomes its id too.
    """

    tokenizer: Tokenizer
    template: ChatTemplate

    def encode(self, messages: Sequence[Message], max_ids: int | None = None) -> list[int]:
        listed = [{"role": message.role, "content": message.content} for message in messages]
        return self.tokenizer.encode_marked(self.template.render(listed))
