"""The fields of a request to /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, JsonValue

from llmserve.frontends.text.answers.failures import NO_THREADS, Refused
from llmserve.frontends.text.answers.generation import Sampling
from llmserve.frontends.text.requests.fields import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOKENS,
    ModelName,
    Speculates,
    StopText,
    speculation_values,
)
from llmserve.frontends.text.requests.messages import OFF, ON, Talk
from llmserve.frontends.text.requests.tools import MAX_TOOLS, Choice, Function, Schema, ToolName, ToolUse, tool_use
from llmserve.frontends.text.requests.validation import Strict, at_most, ignored, refused

NO_BUDGET = "thinking budgets are not supported; use max_tokens"


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: Any = Field(None, description="No effect: the prefix cache is automatic.")
    citations: Annotated[Any, ignored("citations are not passed to the model", [])] = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="No effect: the server does not sign thoughts.")


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, JsonValue]
    cache_control: Any = Field(None, description="No effect: the prefix cache is automatic.")
    caller: Annotated[Any, ignored("only the model can call tools", {"type": "direct"})] = None
    toolset_name: Annotated[Any, refused("toolsets are not supported")] = Field(None, description="Not supported.")

    def listed(self) -> JsonValue:
        arguments = json.dumps(self.input, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], at_most(MAX_MESSAGES)] | None = None
    is_error: bool | None = Field(None, description="No effect: state the error in content.")
    cache_control: Any = Field(None, description="No effect: the prefix cache is automatic.")
    toolset_name: Annotated[Any, refused("toolsets are not supported")] = Field(None, description="Not supported.")

    def listed(self) -> dict[str, JsonValue]:
        return {"role": "tool", "content": _text(self.content or ""), "tool_call_id": self.tool_use_id}


Blocks: TypeAlias = str | Annotated[list[TextBlock], Field(min_length=1), at_most(MAX_MESSAGES)]


def _text(blocks: str | Sequence[TextBlock]) -> str:
    return blocks if isinstance(blocks, str) else "".join(block.text for block in blocks)


UserBlock: TypeAlias = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock: TypeAlias = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class SystemTurn(Strict):
    role: Literal["system"]
    content: Blocks

    def listed(self) -> list[dict[str, JsonValue]]:
        return [{"role": "system", "content": _text(self.content)}]


class UserTurn(Strict):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1), at_most(MAX_MESSAGES)]

    def listed(self) -> list[dict[str, JsonValue]]:
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        messages = [block.listed() for block in self.content if isinstance(block, ToolResultBlock)]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        return [*messages, {"role": "user", "content": _text(texts)}] if texts else messages


class AssistantTurn(Strict):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(min_length=1), at_most(MAX_MESSAGES)]

    def listed(self) -> list[dict[str, JsonValue]]:
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        text = _text([block for block in self.content if isinstance(block, TextBlock)])
        message: dict[str, JsonValue] = {"role": "assistant", "content": text}
        if calls := [block.listed() for block in self.content if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = calls
        if thought := "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock)):
            message["reasoning_content"] = thought
        return [message]


Turn: TypeAlias = Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]


class Metadata(Strict):
    user_id: str | None = None


class ToolDefinition(Strict):
    name: ToolName
    input_schema: Schema
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = Field(None, description="No effect: the prefix cache is automatic.")
    eager_input_streaming: bool | None = Field(None, description="No effect: inputs are always streamed.")
    defer_loading: Annotated[Any, refused("tools cannot be loaded later", False)] = None
    allowed_callers: Annotated[Any, refused("only the model can call tools", ["direct"])] = None
    input_examples: Annotated[Any, refused("examples are not passed to the model", [])] = None

    def function(self) -> Function:
        return Function(name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict)


class AutoChoice(Strict):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Strict):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Strict):
    type: Literal["none"]


ToolChoice: TypeAlias = Annotated[AutoChoice | NamedChoice | NoChoice, Field(discriminator="type")]


class Thinking(Strict):
    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: Annotated[Any, ignored(NO_BUDGET)] = Field(None, description="No effect.")
    display: Annotated[Any, ignored("thoughts are not summarized or hidden", "summarized")] = None


class JsonOutput(Strict):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Strict):
    effort: str | None = None
    format: JsonOutput | None = None


class CountRequest(Strict):
    model: ModelName = ""
    messages: Annotated[list[Turn], Field(min_length=1), at_most(MAX_MESSAGES)] = Field(description="The conversation.")
    system: Blocks | None = Field(None, description="Instructions for the whole conversation.")
    tools: Annotated[list[ToolDefinition] | None, Field(max_length=MAX_TOOLS, description="Callable functions.")] = None
    tool_choice: ToolChoice | None = Field(None, description="Which tools the model may or must call.")
    thinking: Thinking | None = Field(None, description="Whether the model thinks before it answers.")
    output_config: OutputConfig | None = Field(None, description="Effort and format.")
    cache_control: Any = Field(None, description="No effect: the prefix cache is automatic.")
    thread: dict[str, JsonValue] | None = Field(None, description="Not supported: send the conversation.")

    def talk(self) -> Talk:
        """Raises `Refused` for tools that cannot be used, and for conversations that the server should store."""
        if self.thread is not None:
            raise Refused("thread: conversations are not stored: send the whole conversation", "thread", NO_THREADS)
        opening: list[dict[str, JsonValue]] = []
        if self.system is not None:
            opening = [{"role": "system", "content": _text(self.system)}]
        wanted = self.output_config or OutputConfig()
        return Talk(
            [*opening, *(message for turn in self.messages for message in turn.listed())],
            self._tool_use(),
            None if wanted.format is None else wanted.format.schema_,
            effort=wanted.effort if self.thinking is None else OFF if self.thinking.type == "disabled" else ON,
            effort_field="output_config" if self.thinking is None else "thinking",
        )

    def _tool_use(self) -> ToolUse:
        given, several = self.tool_choice, True
        choice = Choice()
        if isinstance(given, NoChoice):
            choice = Choice("none")
        elif given is not None:
            several = not given.disable_parallel_tool_use
            if isinstance(given, NamedChoice):
                choice = Choice("required", [given.name], is_one=True)
            elif given.type == "any":
                choice = Choice("required")
        return tool_use([tool.function() for tool in self.tools or ()], choice, several=several)


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS, description="Maximum length of the answer.")]
    stop_sequences: Annotated[list[StopText] | None, Field(max_length=MAX_STOPS, description="End the answer.")] = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="0: the likeliest tokens.")
    top_p: Annotated[float | None, Field(gt=0, le=1, description="Total probability of tokens to sample from.")] = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(None, description="0: every token.")
    stream: bool | None = Field(None, description="Send the answer in pieces, as server-sent events.")
    speculation: Speculates = None
    metadata: Metadata | None = Field(None, description="Labels; they have no effect.")
    service_tier: Annotated[Any, ignored("only one service tier is supported", "auto", "standard_only")] = None
    context_management: Annotated[Any, ignored("context editing is not supported")] = None
    mcp_servers: Annotated[Any, refused("MCP servers are not supported", [])] = None
    container: Annotated[Any, refused("containers are not supported")] = Field(None, description="Not supported.")
    speed: Annotated[Any, ignored("only one speed is supported", "standard")] = Field(None, description="No effect.")

    def sampling(self, more: Mapping[str, Sequence[Any]]) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences or (),
            more={**speculation_values(self.speculation), **more},
        )
