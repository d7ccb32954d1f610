"""Chat messages to prompt ids, in the form that the checkpoint was trained with.

Two forms: role tokens inserted as ids (Baichuan), or the jinja template that comes with the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmserve.errors import InvalidArgument, Unsupported, raise_problems
from llmserve.stages.chat_template import NO_VALUES, ChatTemplate
from llmserve.stages.files import TextFiles
from llmserve.stages.tokenizer import Tokenizer

BAICHUAN_USER_ID, BAICHUAN_ASSISTANT_ID = 195, 196


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Prompt ids that end where the assistant's answer begins, and what had to go for them to fit."""

    ids: list[int]
    num_messages_left_out: int = 0  # the oldest
    num_ids_cut: int = 0  # from the beginning of what was left

    def what_is_missing(self) -> str:
        """In words; empty when nothing is."""
        messages, ids = _counted(self.num_messages_left_out, "message"), _counted(self.num_ids_cut, "token")
        parts = [
            f"without the first {messages}" if self.num_messages_left_out else "",
            f"without the first {ids} of what is left" if self.num_ids_cut else "",
        ]
        return " and ".join(filter(None, parts))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


class ChatFormat(Protocol):
    def encode(
        self, messages: Sequence[Message], max_ids: int | None = None, values: Mapping[str, Any] = NO_VALUES
    ) -> ChatPrompt:
        """`max_ids`: room for the prompt, None: no limit. `values`: further names that a template may read."""
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

    def encode(
        self, messages: Sequence[Message], max_ids: int | None = None, values: Mapping[str, Any] = NO_VALUES
    ) -> ChatPrompt:
        if values:
            raise InvalidArgument(
                f"chat_template_kwargs ({', '.join(values)}): this checkpoint marks who speaks with token ids, and has "
                "no chat template that could read them"
            )
        system, dialogue = self._split(messages)
        ids = self._content(system)
        rounds = _rounds(dialogue)
        encoded = [self._round_ids(one) for one in rounds]
        opening = [self.assistant_id] if messages[-1].role != "assistant" else []
        room = max_ids - len(ids) - len(opening) if max_ids is not None else None
        first = _first_that_fits(encoded, room)
        prompt = [*ids, *(one for round_ids in encoded[first:] for one in round_ids), *opening]
        num_cut = 0 if max_ids is None else max(0, len(prompt) - max(1, max_ids))
        return ChatPrompt(prompt[num_cut:], sum(map(len, rounds[:first])), num_cut)

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

    def _round_ids(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids.append(self.user_id if message.role == "user" else self.assistant_id)
            ids += self._content(message.content)
        return ids

    def _content(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, banned=(self.user_id, self.assistant_id))


def _rounds(dialogue: Sequence[Message]) -> list[list[Message]]:
    rounds: list[list[Message]] = []
    for message in dialogue:
        if message.role == "user" or not rounds:
            rounds.append([])
        rounds[-1].append(message)
    return rounds


def _first_that_fits(rounds: Sequence[list[int]], room: int | None) -> int:
    """The oldest round to keep: from it on all fit, or it is the last."""
    num_ids = 0
    for place in range(len(rounds) - 1, -1, -1):
        num_ids += len(rounds[place])
        if room is not None and num_ids > room and place < len(rounds) - 1:
            return place + 1
    return 0


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """A rendered template; the special tokens in it become ids. Too long a dialogue is not cut.

    As in transformers, a special token spelled in a message becomes its id too.
    """

    tokenizer: Tokenizer
    template: ChatTemplate

    def encode(
        self, messages: Sequence[Message], max_ids: int | None = None, values: Mapping[str, Any] = NO_VALUES
    ) -> ChatPrompt:
        return ChatPrompt(self.tokenizer.encode_marked(self.text(messages, values)))

    def text(self, messages: Sequence[Message], values: Mapping[str, Any] = NO_VALUES) -> str:
        """The prompt with its special tokens spelled out."""
        listed = [{"role": message.role, "content": message.content} for message in messages]
        return self.template.render(listed, values)
