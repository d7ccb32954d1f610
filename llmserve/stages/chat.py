"""Converts chat messages to prompt ids, in the format that the checkpoint was trained with.

Two forms: role tokens inserted as ids (Baichuan), or the jinja template that comes with the tokenizer.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from itertools import count
from typing import Any, Protocol, TypeAlias

from llmserve.errors import InvalidArgument, PromptTooLong, Unsupported, raise_problems
from llmserve.stages.chat_style import AUTO, NO_THINK, NONE, SWITCHES, ChatStyle, check_formats, thought_markers
from llmserve.stages.chat_template import ENDINGS, NO_VALUES, ChatTemplate, Ending
from llmserve.stages.files import TextFiles
from llmserve.stages.message_calls import tool_call, with_text
from llmserve.stages.reasoning import found_reasoning, is_open_after
from llmserve.stages.token_lengths import check_length
from llmserve.stages.tokenizer import Tokenizer
from llmserve.stages.tool_formats import generic
from llmserve.stages.tool_formats.registry import DESCRIBED, TOOL_FORMATS, found_tool_format

BAICHUAN_USER_ID, BAICHUAN_ASSISTANT_ID = 195, 196
Tools: TypeAlias = Sequence[Mapping[str, Any]]  # in the format of OpenAI's API


DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}
MORE_OF_A_MESSAGE: Mapping[str, type] = {  # fields that templates also read
    "tool_calls": list, "tool_call_id": str, "name": str, "reasoning_content": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)  # fields of MORE_OF_A_MESSAGE that it has


QUESTION, RESULT = Message("user", "x"), Message("tool", "x", {"tool_call_id": "x"})
CALL = Message("assistant", "", {"tool_calls": [tool_call({"id": "x", "function": {"name": "x"}})]})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Prompt ids that end where the assistant's answer begins, and what was dropped to make them fit."""

    ids: list[int]
    num_messages_left_out: int = 0  # dropped messages, the oldest ones
    num_ids_cut: int = 0  # dropped from the beginning of the rest

    def what_is_missing(self) -> str:
        """As text; empty if nothing is missing."""
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
        self,
        messages: Sequence[Message],
        max_ids: int | None = None,
        values: Mapping[str, Any] = NO_VALUES,
        tools: Tools = (),
    ) -> ChatPrompt:
        """`max_ids`: the most ids for the prompt, None: no limit. `values`: additional variables for a template."""
        ...

    def style(self, values: Mapping[str, Any] = NO_VALUES) -> ChatStyle:
        """How to read answers to conversations with these `values`."""
        ...


def chat_format(
    tokenizer: Tokenizer, files: TextFiles, *, tool_format: str = AUTO, reasoning_format: str = AUTO
) -> ChatFormat | None:
    """The checkpoint's chat format, or None if it is not a chat model. Raises `InvalidArgument` for unknown formats of
    tools or thoughts, or if they require a chat template and there is none."""
    check_formats(tool_format, reasoning_format)
    user, assistant = files.token_ids("user_token_id"), files.token_ids("assistant_token_id")
    is_baichuan = files.hf_config.get("model_type") == "baichuan" or files.tokenizer_class.startswith("Baichuan")
    if is_baichuan or (user and assistant):
        user_id = user[0] if user else BAICHUAN_USER_ID
        found: ChatFormat | None = RoleIdFormat(
            tokenizer, user_id, assistant[0] if assistant else BAICHUAN_ASSISTANT_ID, files.max_seq_len,
            "" if tool_format == NONE else generic.NAME,
        )  # fmt: skip
    elif files.chat_template:
        return template_format(tokenizer, files, tool_format, reasoning_format)
    else:
        found = None
    if {tool_format, reasoning_format} - {AUTO, NONE, generic.NAME}:
        raise InvalidArgument(f"tool_format and reasoning_format require a chat template, but {files.path} has none")
    return found


def template_format(
    tokenizer: Tokenizer, files: TextFiles, tool_format: str = AUTO, reasoning_format: str = AUTO
) -> TemplateFormat:
    template = ChatTemplate(files.chat_template, files.special_tokens, files.template_place)
    has_other = files.tool_template != files.chat_template
    for_tools = ChatTemplate(files.tool_template, files.special_tokens, files.template_place) if has_other else template
    calls = tool_format
    if tool_format == AUTO:
        found = found_tool_format(files.tool_template)
        calls = (found if "tools" in for_tools.names or found in DESCRIBED else "") or generic.NAME
    thoughts = found_reasoning(files.chat_template) if reasoning_format == AUTO else reasoning_format
    return TemplateFormat(
        tokenizer,
        template,
        for_tools,
        calls if calls != NONE else "",
        thoughts if thoughts != NONE else "",
        files.max_seq_len,
    )


def require_chat_format(tokenizer: Tokenizer, files: TextFiles) -> ChatFormat:
    if found := chat_format(tokenizer, files):
        return found
    raise Unsupported(
        f"{files.path.name} has no chat format: no chat_template.jinja, no chat_template in tokenizer_config.json "
        "(tokenizer.chat_template in a GGUF file), no role token ids in generation_config.json; add "
        "chat_template.jinja, serve with --chat-template FILE, or send plain text instead of messages"
    )


def parse_messages(text: str) -> list[Message]:
    """`[{"role": ..., "content": ...}, ...]` as JSON."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"messages is not valid JSON: {error}") from error
    if not isinstance(listed, list) or not listed:
        raise InvalidArgument('messages must be a non-empty list such as [{"role": "user", "content": "Hello"}]')
    return messages_of(listed)


def messages_of(listed: Sequence[Any]) -> list[Message]:
    """From objects in the format of OpenAI's API."""
    problems = [f"message {i} {problem}" for i, entry in enumerate(listed) if (problem := _problem(entry))]
    raise_problems(InvalidArgument, "messages cannot be used", problems)
    return [_message(entry) for entry in listed]


def _message(entry: Mapping[str, Any]) -> Message:
    more = {key: entry[key] for key in MORE_OF_A_MESSAGE if entry.get(key) is not None}
    if "tool_calls" in more:
        more["tool_calls"] = [tool_call(call) for call in more["tool_calls"]]
    return Message(entry["role"], entry.get("content") or "", more)


def _problem(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "must be an object with role and content"
    needed = ("role",) if entry.get("tool_calls") and entry.get("content") is None else ("role", "content")
    missing = [key for key in needed if not isinstance(entry.get(key), str)]
    if missing:
        return f"must have a string in: {', '.join(missing)}"
    wrong = [key for key, kind in MORE_OF_A_MESSAGE.items() if not isinstance(entry.get(key, kind()), kind | None)]
    return f"has invalid values in: {', '.join(wrong)}" if wrong else ""


@dataclass(frozen=True, slots=True)
class RoleIdFormat:
    """Baichuan's rule: the system text, then per message a role id and the content; no bos.

    The oldest rounds (a user message and what follows it) are dropped until the prompt fits. The last round always
    stays, but loses its beginning if it is too long.
    """

    tokenizer: Tokenizer
    user_id: int
    assistant_id: int
    max_seq_len: int | None = None
    tool_format: str = ""  # empty: no tools

    def encode(
        self,
        messages: Sequence[Message],
        max_ids: int | None = None,
        values: Mapping[str, Any] = NO_VALUES,
        tools: Tools = (),
    ) -> ChatPrompt:
        ending = Ending.of([message.role for message in messages], values)
        values = {name: value for name, value in values.items() if name not in ENDINGS}
        unread = [f"chat_template_kwargs ({', '.join(values)})"] if values else []
        unread += ["tools"] if tools and not self.tool_format else []
        if unread:
            raise InvalidArgument(
                f"{' and '.join(unread)}: this checkpoint marks roles with token ids and has no chat template "
                "that could read them"
            )
        if self.tool_format and generic.has_calls(messages):
            messages = generic.spoken(messages)
        if tools:
            messages = generic.with_system(messages, generic.described(tools))
        system, dialogue = self._split(messages)
        ids = self._content(system)
        rounds = _rounds(dialogue)
        opening = [self.assistant_id] if ending.opens else []
        room = max_ids - len(ids) - len(opening) if max_ids is not None else None
        encoded = self._that_fit(rounds, room)
        prompt = [*ids, *(one for round_ids in encoded for one in round_ids), *opening]
        num_cut = 0 if max_ids is None else max(0, len(prompt) - max(1, max_ids))
        return ChatPrompt(prompt[num_cut:], sum(map(len, rounds[: len(rounds) - len(encoded)])), num_cut)

    def _that_fit(self, rounds: Sequence[Sequence[Message]], room: int | None) -> list[list[int]]:
        """The ids of the newest rounds that fit; at least those of the last one. Older ones are not read."""
        kept: deque[list[int]] = deque()
        num_ids = 0
        for one in reversed(rounds):
            try:
                ids = self._round_ids(one)
            except PromptTooLong:
                if room is None or not kept:
                    raise
                break
            num_ids += len(ids)
            if room is not None and num_ids > room and kept:
                break
            kept.appendleft(ids)
        return list(kept)

    def _split(self, messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
        system = messages[0].content if messages[0].role == "system" else ""
        dialogue = messages[1:] if messages[0].role == "system" else messages
        problems = [
            f"message {number} has role {message.role!r}; this checkpoint supports user and assistant"
            " (and system, in the first message only)"
            for number, message in enumerate(dialogue, len(messages) - len(dialogue))
            if message.role not in ("user", "assistant")
        ]
        if any("tool_calls" in message.more for message in dialogue):
            problems.append("this checkpoint's chat format has no tool_calls")
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
        check_length(text, self.tokenizer, self.max_seq_len)
        return self.tokenizer.encode(text, banned=(self.user_id, self.assistant_id))

    def style(self, values: Mapping[str, Any] = NO_VALUES) -> ChatStyle:
        return ChatStyle(takes_tools=bool(self.tool_format), tool_format=self.tool_format)


def _rounds(dialogue: Sequence[Message]) -> list[list[Message]]:
    rounds: list[list[Message]] = []
    for message in dialogue:
        if message.role == "user" or not rounds:
            rounds.append([])
        rounds[-1].append(message)
    return rounds


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """Renders a template and converts special tokens in it to ids. A conversation that is too long is not truncated.

    As in transformers, a special token spelled in a message becomes its id, too.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    tool_template: ChatTemplate  # for conversations with tools
    tool_format: str = ""  # format of calls; empty: unknown
    reasoning: str = ""  # format of thoughts; empty: unknown
    max_seq_len: int | None = None
    writes_begin: bool = True  # the template itself; else the tokenizer's special tokens come before its text
    tells_date: bool = False  # for templates that read one of DATES, as in llama.cpp

    def encode(
        self,
        messages: Sequence[Message],
        max_ids: int | None = None,
        values: Mapping[str, Any] = NO_VALUES,
        tools: Tools = (),
    ) -> ChatPrompt:
        text = self.text(messages, values, tools)
        check_length(text, self.tokenizer, self.max_seq_len)
        begin = [] if self.writes_begin else self.tokenizer.encode("", add_special_tokens=True)
        return ChatPrompt([*begin, *self.tokenizer.encode_marked(text)])

    def text(self, messages: Sequence[Message], values: Mapping[str, Any] = NO_VALUES, tools: Tools = ()) -> str:
        """The prompt, with its special tokens spelled out."""
        values = {**self._own_values(), **values}
        if self.tool_format == generic.NAME and (tools or generic.has_calls(messages)):
            return self._told_in_text(messages, values, tools)
        listed = self._listed(messages)
        if not tools:
            return self.template.render(listed, values)
        if "tools" not in self.tool_template.names:
            if how := DESCRIBED.get(self.tool_format):
                told = generic.with_system(messages, generic.described(tools, how))
                return self.tool_template.render(self._listed(told), values)
            raise InvalidArgument("tools: this checkpoint's chat template does not pass them to the model")
        return self.tool_template.render(listed, values, tools)

    def _own_values(self) -> Mapping[str, str]:
        """Variables that few templates read, but that those require."""
        names = self.template.names
        today = {name: date.today().strftime(pattern) for name, pattern in DATES.items()} if self.tells_date else {}
        return {name: value for name, value in {"functions": "", **today}.items() if name in names}

    def _told_in_text(self, messages: Sequence[Message], values: Mapping[str, Any], tools: Tools) -> str:
        """Tools in the system message. Without tools, calls stay as they are if the template supports them."""
        if not tools:
            with suppress(InvalidArgument):
                text = self.template.render(self._listed(messages), values)
                if all(message.content in text for message in messages if message.role == "tool"):
                    return text
            return self.template.render(self._listed(generic.spoken(messages)), values)
        told, text = generic.spoken(messages), generic.described(tools)
        with suppress(InvalidArgument):
            return self.template.render(self._listed(generic.with_system(told, text)), values)
        # a template without a system message, unless it refuses something else
        return self.template.render(self._listed(generic.with_system(told, text, in_question=True)), values)

    def _listed(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        ids, numbers = dict[str, str](), count()
        return [
            {"role": message.role, "content": message.content, **self._more(message, ids, numbers)}
            for message in messages
        ]

    def style(self, values: Mapping[str, Any] = NO_VALUES) -> ChatStyle:
        names = self.template.names | self.tool_template.names
        markers = [*TOOL_FORMATS[self.tool_format].markers] if self.tool_format else []
        markers += [each for each in thought_markers(self.reasoning) if each not in markers]
        is_open = bool(self.reasoning) and self._opens_thought([QUESTION], values)
        answered = [QUESTION, CALL, RESULT]
        if self.tool_format == generic.NAME:
            answered = generic.spoken(answered)
        return ChatStyle(
            takes_tools="tools" in self.tool_template.names or self.tool_format in (generic.NAME, *DESCRIBED),
            tool_format=self.tool_format,
            reasoning=self.reasoning,
            is_open=is_open,
            is_open_after_result=is_open and self._opens_thought(answered, values),
            obeys_words=is_open and not self._opens_thought([Message("user", NO_THINK)], values),
            switches=[name for name in SWITCHES if name in names],
            special=[marker for marker in markers if self._is_special(marker)],
        )

    def _opens_thought(self, messages: Sequence[Message], values: Mapping[str, Any]) -> bool:
        """Whether a prompt ends inside a thought, as far as these messages show."""
        try:
            return is_open_after(self.text(messages, values), self.reasoning)
        except InvalidArgument:  # a template that requires more than these
            return False

    def _more(self, message: Message, ids: dict[str, str], numbers: Iterator[int]) -> Mapping[str, Any]:
        """Calls, and `ids` of them, in the form that the template expects. `numbers`: of the next calls."""
        more = dict(message.more)
        if "tool_calls" in more and self.tool_template.joins_arguments:
            more["tool_calls"] = [with_text(call) for call in more["tool_calls"]]
        if not self.tool_format:
            return more
        call_id = TOOL_FORMATS[self.tool_format].call_id
        if "tool_call_id" in more:
            more["tool_call_id"] = ids.get(more["tool_call_id"]) or call_id(more["tool_call_id"])
        if "tool_calls" in more:
            calls = [(str(call.get("id", "")), call) for call in more["tool_calls"]]
            told = [(old, call, call_id(old, call["function"]["name"], next(numbers))) for old, call in calls]
            ids |= {old: new for old, _, new in told}
            more["tool_calls"] = [{**call, "id": new} for _, call, new in told]
            if "reasoning_content" in more and not message.content:
                more["thinking"] = more["reasoning_content"]  # gpt-oss's name for it, only with calls
        return more

    def _is_special(self, marker: str) -> bool:
        """Whether it is a token that is left out when text is displayed."""
        ids = self.tokenizer.encode_marked(marker)
        return len(ids) == 1 and not self.tokenizer.decode(ids)
