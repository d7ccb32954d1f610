"""The fields of a request to /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, JsonValue, model_validator

from llmserve.frontends.text.answers.log_probs import log_prob_values
from llmserve.frontends.text.requests.ensembles import Values
from llmserve.frontends.text.requests.fields import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TOP,
    Labels,
    Limit,
    ModelName,
    Sampled,
    TemplateValues,
)
from llmserve.frontends.text.requests.messages import Talk
from llmserve.frontends.text.requests.notes import note
from llmserve.frontends.text.requests.tools import ToolChoice, ToolName, Tools, chosen, tool_use
from llmserve.frontends.text.requests.validation import Strict, at_most, ignored, refused
from llmserve.stages.chat_template import ENDINGS, TEMPLATE

OLD_TOOLS = "functions are deprecated: use tools and tool_choice"


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content: TypeAlias = str | Annotated[list[TextPart], Field(min_length=1), at_most(MAX_MESSAGES)]


def text_of(content: Content | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class _Message(Strict):
    role: str
    content: Content
    name: Annotated[Any, ignored("names of participants are not passed to the model")] = None

    def listed(self) -> dict[str, JsonValue]:
        """The message for the chat format, which has no developer role."""
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}


class SystemMessage(_Message):
    role: Literal["system", "developer"]


class UserMessage(_Message):
    role: Literal["user"]


class CalledFunction(Strict):
    name: ToolName
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a streamed call; some clients send it back


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Content | None = None
    name: Annotated[Any, ignored("names of participants are not passed to the model")] = None
    reasoning_content: str | None = Field(None, description="Earlier reasoning, for templates that use it.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    provider_specific_fields: Any = Field(None, description="LiteLLM's notes on an answer; they have no effect.")
    refusal: Annotated[Any, ignored("refusals are not passed to the model")] = Field(None, description="No effect.")
    audio: Annotated[Any, refused("audio is not supported")] = Field(None, description="Not supported.")
    annotations: Annotated[Any, ignored("annotations are not passed to the model", [])] = None
    tool_calls: Annotated[list[ToolCall], at_most(MAX_MESSAGES)] | None = None
    function_call: Annotated[Any, refused(OLD_TOOLS)] = Field(None, description="Not supported.")

    def listed(self) -> dict[str, JsonValue]:
        message: dict[str, JsonValue] = {"role": "assistant", "content": text_of(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        return message


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None

    def listed(self) -> dict[str, JsonValue]:
        named: dict[str, JsonValue] = {} if self.name is None else {"name": self.name}
        return {"role": "tool", "content": text_of(self.content), "tool_call_id": self.tool_call_id, **named}


class Prediction(Strict):
    """The expected answer."""

    type: Literal["content"]
    content: Content


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
Messages: TypeAlias = Annotated[list[Message], Field(min_length=1), at_most(MAX_MESSAGES)]


class ChatFields(Sampled):
    """The fields of a request except its conversation."""

    model: ModelName = ""
    max_tokens: Limit = Field(None, description="Maximum length of the answer.")
    max_completion_tokens: Limit = Field(None, description="The same as max_tokens.")
    logprobs: bool | None = Field(None, description="Return the log prob of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = Field(None, description="Alternatives per token.")
    add_generation_prompt: bool | None = Field(None, description="false: do not open the answer's message.")
    continue_final_message: bool | None = Field(None, description="Default: if it is the assistant's.")
    echo: bool | None = Field(None, description="Repeat the continued message at the start of the answer.")
    chat_template: str | None = Field(None, description="Replaces the model's template, if the server allows it.")
    chat_template_kwargs: TemplateValues | None = None
    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Which tools the model may or must call.")
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may contain several calls.")
    functions: Annotated[Any, refused(OLD_TOOLS, [])] = Field(None, description="Not supported.")
    function_call: Annotated[Any, refused(OLD_TOOLS, "none", "auto")] = Field(None, description="Not supported.")
    modalities: Annotated[Any, refused("only text is supported", ["text"])] = Field(None, description="Not supported.")
    audio: Annotated[Any, refused("only text is supported")] = Field(None, description="Not supported.")
    prediction: Prediction | None = Field(None, description="A draft for speculative decoding.")
    reasoning_effort: str | None = Field(None, description="As the chat template supports it; none: off.")
    verbosity: Annotated[Any, ignored("not supported by these models", "medium")] = None
    web_search_options: Annotated[Any, refused("web search is not supported")] = None
    store: Annotated[Any, ignored("this server does not store conversations", False)] = None
    service_tier: Annotated[Any, ignored("only one service tier is supported", "auto", "default")] = None
    metadata: Labels | None = Field(None, description="Labels; they have no effect.")
    safety_identifier: str | None = Field(None, description="A label; it has no effect.")
    prompt_cache_key: str | None = Field(None, description="No effect: the prefix cache is automatic.")
    prompt_cache_retention: str | None = Field(None, description="No effect: the prefix cache is automatic.")

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same setting, but their values differ")
        if (self.top_logprobs or self.logprob_token_ids) and not self.logprobs:
            raise ValueError("top_logprobs and logprob_token_ids require logprobs")
        if self.stream_options is not None and not self.stream and not note("stream_options: no effect without stream"):
            raise ValueError("stream_options requires stream")
        says = "allowed_token_ids" if self.allowed_token_ids else "structured_outputs" if self.outputs() else ""
        if says and self.tools:
            raise ValueError(f"{says} and tools both set the format of the answer: give only one")
        return self

    def _template_values(self) -> dict[str, JsonValue]:
        own = {name: getattr(self, name) for name in (*ENDINGS, TEMPLATE)}
        return {**(self.chat_template_kwargs or {}), **{name: v for name, v in own.items() if v is not None}}

    def values(self) -> Values:
        """The inputs that request log probs."""
        of_prompt = self.prompt_logprobs is not None
        if not (self.logprobs or of_prompt):
            return {}
        num_top = 0 if self.logprob_token_ids else max(self.top_logprobs or 0, self.prompt_logprobs or 0)
        return log_prob_values(num_top, of_prompt=of_prompt)

    @property
    def wants_tokens(self) -> bool:
        return bool(self.logprobs) or self.tells_tokens

    def predicted(self) -> str:
        return text_of(self.prediction.content) if self.prediction is not None else ""


class ChatRequest(ChatFields):
    messages: Messages = Field(description="The conversation.")

    def talk(self) -> Talk:
        """Raises `Refused` for tools that cannot be used."""
        functions = [tool.function for tool in self.tools or ()]
        return Talk(
            [message.listed() for message in self.messages],
            tool_use(functions, chosen(self.tool_choice), several=self.parallel_tool_calls),
            self.answer_schema(),
            self._template_values(),
            self.reasoning_effort,
            choices=self.answer_choices(),
        )

    def echoed(self) -> str:
        last = self.messages[-1]
        return text_of(last.content) if self.echo and last.role == "assistant" else ""


class BatchChatRequest(ChatFields):
    """As in vLLM: several conversations, which share all other fields."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_PROMPTS, description="Conversations.")]

    @model_validator(mode="after")
    def _can_be_several(self) -> Self:
        if self.stream:
            raise ValueError("several conversations cannot be streamed")
        if self.kv_transfer_params is not None:
            raise ValueError("kv_transfer_params supports only one prompt")
        return self

    def requests(self) -> list[ChatRequest]:
        """One request for each conversation."""
        fields = {name: getattr(self, name) for name in self.model_fields_set if name != "messages"}
        return [ChatRequest.model_construct(**fields, messages=each) for each in self.messages]
