"""The fields of a request to /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.generation import Sampling
from llmserve.frontends.text.answers.log_probs import log_prob_values
from llmserve.frontends.text.requests.fields import (
    MAX_MESSAGES,
    MAX_TOP,
    Labels,
    Limit,
    ModelName,
    Speculates,
    TemplateValues,
    speculation_values,
)
from llmserve.frontends.text.requests.formats import JsonFormat, TextFormat, closed
from llmserve.frontends.text.requests.messages import Messages, Talk
from llmserve.frontends.text.requests.notes import note
from llmserve.frontends.text.requests.tools import (
    MAX_TOOLS,
    Choice,
    Function,
    Mode,
    Schema,
    ToolName,
    ToolUse,
    tool_use,
)
from llmserve.frontends.text.requests.validation import Strict, at_most, ignored, refused

LOG_PROBS = "message.output_text.logprobs"  # a value of `include`
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Any, ignored("annotations are not passed to the model", [])] = None
    logprobs: Annotated[Any, ignored("log probs are not passed to the model", [])] = None


Texts: TypeAlias = Annotated[list[InputText], Field(min_length=1), at_most(MAX_MESSAGES)]


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Texts
    id: str | None = None
    status: str | None = None
    phase: Annotated[Any, ignored("phases are not passed to the model")] = Field(None, description="No effect.")

    def listed(self) -> dict[str, JsonValue]:
        return {"role": "system" if self.role == "developer" else self.role, "content": _text(self.content)}


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: Annotated[Any, refused("only the model can call tools", {"type": "direct"})] = None
    namespace: Annotated[Any, refused("namespaces are not supported")] = Field(None, description="Not supported.")
    async_: Annotated[Any, refused("asynchronous calls are not supported", False)] = Field(None, alias="async")
    parsed_arguments: Any = Field(None, description="No effect: the official client sends back what it has parsed.")

    def listed(self) -> dict[str, JsonValue]:
        function: JsonValue = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class CallOutput(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Texts
    id: str | None = None
    status: Status | None = None
    caller: Annotated[Any, refused("only the model can call tools", {"type": "direct"})] = None

    def listed(self) -> dict[str, JsonValue]:
        return {"role": "tool", "content": _text(self.output), "tool_call_id": self.call_id}


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    id: str | None = None
    content: Annotated[list[ReasoningText], at_most(MAX_MESSAGES)] | None = None
    summary: Annotated[Any, ignored("summaries are not passed to the model", [])] = None
    encrypted_content: Annotated[Any, ignored("encrypted content is not supported")] = None
    status: Status | None = None


def _item_type(item: Any) -> Any:
    """The type of an item, which is optional for messages."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="must be an object whose 'type' is 'message', 'function_call', 'function_call_output' or "
        "'reasoning'",
    ),
]


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None

    def document(self) -> dict[str, JsonValue]:
        return closed(self.schema_) if self.strict else self.schema_


class TextOptions(Strict):
    format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, ignored("not supported by these models", "medium")] = None


Input: TypeAlias = str | Annotated[list[Item], Field(min_length=1), at_most(MAX_MESSAGES)]


class ResponseTool(Strict):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    output_schema: Annotated[Any, refused("the server does not check outputs of tools")] = None
    defer_loading: Annotated[Any, refused("tools cannot be loaded later", False)] = None
    allowed_callers: Annotated[Any, refused("only the model can call tools", ["direct"])] = None
    async_: Annotated[Any, refused("asynchronous calls are not supported", False)] = Field(None, alias="async")

    def function(self) -> Function:
        return Function(name=self.name, description=self.description, parameters=self.parameters, strict=self.strict)

    def document(self) -> dict[str, Json]:
        return {**self.function().model_dump(), "type": "function", "strict": bool(self.strict)}


class ResponseNamedTool(Strict):
    type: Literal["function"]
    name: str


class ResponseAllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseNamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class Reasoning(Strict):
    effort: str | None = None
    summary: Annotated[Any, ignored("thoughts are not summarized", "auto")] = Field(None, description="No effect.")
    generate_summary: Annotated[Any, ignored("thoughts are not summarized")] = Field(None, description="No effect.")
    context: Annotated[Any, ignored("this server does not store conversations", "auto")] = None


def _included(names: list[str]) -> list[str]:
    others = ", ".join(name[:50] for name in names if name != LOG_PROBS)
    if others and not note(f"include: {others} cannot be included"):
        raise ValueError(f"{others} cannot be included")
    return names


class ResponseRequest(Strict):
    model: ModelName = ""
    input: Input = Field(description="A text, or a list of messages and other items.")
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Limit = Field(None, description="Maximum length of the answer.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="0: the likeliest tokens.")
    top_p: Annotated[float | None, Field(gt=0, le=1, description="Total probability of tokens to sample from.")] = None
    stream: bool | None = Field(None, description="Send the answer in pieces, as server-sent events.")
    speculation: Speculates = None
    text: TextOptions | None = Field(None, description="The format of the answer.")
    metadata: Labels | None = Field(None, description="Labels that the response returns.")
    user: str | None = Field(None, description="A label; it has no effect.")
    safety_identifier: str | None = Field(None, description="A label; it has no effect.")
    prompt_cache_key: str | None = Field(None, description="No effect: the prefix cache is automatic.")
    prompt_cache_retention: str | None = Field(None, description="No effect: the prefix cache is automatic.")
    store: bool | None = Field(None, description="false: the response cannot be fetched or continued later.")
    background: bool | None = Field(None, description="Fetch or cancel the response by its id.")
    previous_response_id: str | None = Field(None, description="The id of the stored response that this one continues.")
    conversation: Annotated[Any, refused("conversations are not stored: give previous_response_id")] = None
    include: Annotated[list[str], AfterValidator(_included)] | None = Field(None, description="More to return.")
    tools: Annotated[list[ResponseTool] | None, Field(max_length=MAX_TOOLS, description="Callable functions.")] = None
    tool_choice: Mode | Annotated[ResponseNamedTool | ResponseAllowedTools, Field(discriminator="type")] | None = None
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may contain several calls.")
    max_tool_calls: Annotated[Any, ignored("server-side tools are not supported")] = None
    reasoning: Reasoning | None = Field(None, description="How much the model thinks.")
    truncation: Annotated[Any, ignored("prompts are not truncated", "disabled")] = Field(None, description="No effect.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = Field(None, description="Alternatives per token.")
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(None, description="As in vLLM.")
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1, description="Makes the answer repeatable.")] = None
    chat_template_kwargs: TemplateValues | None = None
    prompt: Annotated[Any, refused("stored prompts are not supported")] = Field(None, description="Not supported.")
    service_tier: Annotated[Any, ignored("only one service tier is supported", "auto", "default")] = None
    stream_options: Annotated[Any, ignored("usage is always included", {}, {"include_obfuscation": False})] = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.background and self.stream:
            raise ValueError("a background response cannot be streamed: fetch it by its id")
        return self

    @field_validator("input")
    @classmethod
    def _says_something(cls, value: Input) -> Input:
        if not isinstance(value, str) and not _joined(value):
            raise ValueError("must contain more than reasoning")
        return value

    def conversation_after(self, before: Messages) -> list[dict[str, JsonValue]]:
        """The conversation with this input, but without instructions, which only apply to this response."""
        if isinstance(self.input, str):
            return [*map(dict, before), {"role": "user", "content": self.input}]
        return _joined(self.input, before)

    def talk(self, before: Messages = ()) -> Talk:
        """`before`: messages up to the previous response. Raises `Refused` for tools that cannot be used."""
        opening: list[dict[str, JsonValue]] = []
        if self.instructions:
            opening = [{"role": "system", "content": self.instructions}]
        messages = [*opening, *self.conversation_after(before)]
        effort = None if self.reasoning is None else self.reasoning.effort
        values = self.chat_template_kwargs or {}
        return Talk(messages, self._tool_use(), self._schema(), values, effort, effort_field="reasoning")

    @property
    def wants_log_probs(self) -> bool:
        return LOG_PROBS in (self.include or ()) or self.top_logprobs is not None

    def sampling(self, more: Mapping[str, Sequence[Any]]) -> Sampling:
        return Sampling(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            seed=self.seed,
            more={
                **speculation_values(self.speculation),
                **more,
                **(log_prob_values(self.top_logprobs or 0) if self.wants_log_probs else {}),
            },
        )

    def _tool_use(self) -> ToolUse:
        choice = Choice(self.tool_choice or "auto") if not isinstance(self.tool_choice, Strict) else Choice()
        if isinstance(self.tool_choice, ResponseNamedTool):
            choice = Choice("required", [self.tool_choice.name], is_one=True)
        elif isinstance(self.tool_choice, ResponseAllowedTools):
            choice = Choice(self.tool_choice.mode, [each.name for each in self.tool_choice.tools])
        functions = [tool.function() for tool in self.tools or ()]
        return tool_use(functions, choice, several=self.parallel_tool_calls)

    def _schema(self) -> Mapping[str, Json] | None:
        wanted = None if self.text is None else self.text.format
        return wanted.document() if isinstance(wanted, SchemaFormat | JsonFormat) else None


def _joined(items: Sequence[Item], before: Messages = ()) -> list[dict[str, JsonValue]]:
    """Joins items to messages. Calls, and a thought before them, become part of the adjacent assistant's message."""
    messages: list[dict[str, JsonValue]] = [*map(dict, before)]
    thought = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or ())
        elif isinstance(item, CallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append(_thoughtful({"role": "assistant", "content": ""}, thought))
                thought = ""
            calls = messages[-1].setdefault("tool_calls", [])
            assert isinstance(calls, list)
            calls.append(item.listed())
        else:
            message = item.listed()
            if message["role"] == "assistant":
                message, thought = _thoughtful(message, thought), ""
            messages.append(message)
    return messages


def _thoughtful(message: dict[str, JsonValue], thought: str) -> dict[str, JsonValue]:
    return {**message, "reasoning_content": thought} if thought else message
