"""A format for models whose chat template has none: the system message describes the tools and how to call them.

{"name": "weather", "arguments": {"city": "Rome"}}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmserve.stages.answer_parts import PartReader
from llmserve.stages.tool_formats.grammars import FREE_TEXT, tool_rules
from llmserve.stages.tool_formats.hermes import BEGIN, END
from llmserve.stages.tool_formats.llama3 import NOT_AN_OBJECT, Llama3Reader
from llmserve.stages.tool_formats.tool_format import Tool

if TYPE_CHECKING:
    from llmserve.stages.chat import Message

NAME = "generic"
OPENING = "You can call these functions, each described by a JSON object:"
HOW = (
    'To call one, answer with nothing but a JSON object: {"name": its name, "arguments": an object that follows its '
    "parameters}. To answer without a call, write text."
)


@dataclass(frozen=True, slots=True)
class Generic:
    name: str = NAME
    markers: Sequence[str] = ()

    def reader(self, tools: Sequence[Tool]) -> PartReader:
        """Some models put other formats' tags around a call."""
        return Llama3Reader([tool.name for tool in tools], BEGIN, END)

    def rules(self, tools: Sequence[Tool], text: str | None, *, several: bool, special: Collection[str]) -> str:
        """Only one call, whatever `several` says, because the system message requests that."""
        rules = f"calls: tool\n{tool_rules(tools, 'arguments')}"
        if text == FREE_TEXT:
            return f"answer: TEXT | calls\nTEXT: {NOT_AN_OBJECT}\n{rules}"
        return f"answer: calls{'' if text is None else f' | {text}'}\n{rules}"

    def call_id(self, call_id: str, name: str = "", index: int = 0) -> str:
        return call_id


def described(tools: Sequence[Mapping[str, Any]], how: str = HOW) -> str:
    """For a system message. `tools`: in the format of OpenAI's API."""
    functions = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return "\n".join([OPENING, *functions, how])


def has_calls(messages: Sequence[Message]) -> bool:
    return any(message.role == "tool" or "tool_calls" in message.more for message in messages)


def spoken(messages: Sequence[Message]) -> list[Message]:
    """Calls and their results as text, because the template may support neither."""
    names: dict[str, str] = {}  # names of called functions, by ids of calls
    found: list[Message] = []
    for message in messages:
        calls = message.more.get("tool_calls", ())
        names |= {str(call.get("id")): call["function"]["name"] for call in calls}
        texts = [message.content] if message.content else []
        texts += [json.dumps({key: call["function"][key] for key in ("name", "arguments")}, ensure_ascii=False)
                  for call in calls]  # fmt: skip
        role, content = message.role, "\n".join(texts)
        if role == "tool":
            name = message.more.get("name") or names.get(str(message.more.get("tool_call_id")), "the function")
            role, content = "user", f"Result of {name}: {message.content}"
        if message.role == "tool" and found and found[-1].role == "user":  # templates require alternating roles
            found[-1] = replace(found[-1], content=f"{found[-1].content}\n{content}")
        else:
            more = {key: value for key, value in message.more.items() if key == "reasoning_content"}
            found.append(replace(message, role=role, content=content, more=more))
    return found


def with_system(messages: Sequence[Message], text: str, *, in_question: bool = False) -> list[Message]:
    """`in_question`: put it in the first user message, for templates without a system message."""
    role = "user" if in_question else "system"
    place = next((i for i, message in enumerate(messages) if message.role == role), None)
    if place is None:
        return [replace(messages[0], role=role, content=text, more={}), *messages]
    told = replace(messages[place], content="\n\n".join(filter(None, [messages[place].content, text])))
    if in_question:
        told = replace(told, content=f"{text}\n\n{messages[place].content}")
    return [*messages[:place], told, *messages[place + 1 :]]
