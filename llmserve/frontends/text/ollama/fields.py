"""The fields of requests to Ollama's routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, JsonValue

from llmserve.frontends.text.answers.generation import Sampling
from llmserve.frontends.text.answers.log_probs import log_prob_values
from llmserve.frontends.text.requests.fields import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOP,
    ModelName,
    Seed,
    Speculates,
    StopText,
    speculation_values,
    stop_list,
)
from llmserve.frontends.text.requests.formats import ANY_OBJECT
from llmserve.frontends.text.requests.messages import OFF, ON, Talk
from llmserve.frontends.text.requests.tools import Choice, Function, Schema, ToolName, Tools, tool_use
from llmserve.frontends.text.requests.validation import Strict, at_most, ignored, refused

NO_IMAGES = "images are not supported"
LOADING = "No effect: the server decides how models are loaded."
Length: TypeAlias = Literal[-1, -2] | Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Effort: TypeAlias = bool | Literal["low", "medium", "high", "max"]


class OllamaOptions(Strict):
    """The defaults are Ollama's, except for the repeat penalty."""

    num_predict: Length | None = Field(None, description="-1 or -2: no limit except the context length.")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    speculation: Speculates = None
    repeat_last_n: Annotated[Any, ignored("penalties apply to the whole text", -1)] = None
    typical_p: Annotated[Any, refused("typical sampling is not supported", 1, 1.0)] = None
    tfs_z: Annotated[Any, refused("tail-free sampling is not supported", 1, 1.0)] = None
    mirostat: Annotated[Any, refused("mirostat is not supported", 0)] = Field(None, description="Not supported.")
    mirostat_tau: Any = Field(None, description="No effect: mirostat is not supported.")
    mirostat_eta: Any = Field(None, description="No effect: mirostat is not supported.")
    penalize_newline: Annotated[Any, refused("penalties apply to all tokens equally", True)] = None
    num_ctx: int | None = Field(None, description=LOADING)
    num_keep: int | None = Field(None, description=LOADING)
    num_batch: int | None = Field(None, description=LOADING)
    num_gpu: int | None = Field(None, description=LOADING)
    main_gpu: int | None = Field(None, description=LOADING)
    num_thread: int | None = Field(None, description=LOADING)
    numa: bool | None = Field(None, description=LOADING)
    use_mmap: bool | None = Field(None, description=LOADING)
    use_mlock: bool | None = Field(None, description=LOADING)
    low_vram: bool | None = Field(None, description=LOADING)

    def sampling(self, more: Mapping[str, Sequence[Any]]) -> Sampling:
        values: dict[str, Sequence[Any]] = {**speculation_values(self.speculation)}
        for name in ("presence_penalty", "frequency_penalty"):
            if value := getattr(self, name):
                values[name] = [value]
        limit = self.num_predict
        return Sampling(
            max_tokens=limit if limit is not None and limit > 0 else None,
            temperature=0.8 if self.temperature is None else self.temperature,
            top_p=0.9 if self.top_p is None else self.top_p,
            top_k=40 if self.top_k is None else self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repeat_penalty or 1.0,
            seed=self.seed,
            stop=stop_list(self.stop),
            more={**values, **more},
            wants_times=True,
        )


class _Asked(Strict):
    model: ModelName = ""
    format: Literal["", "json"] | Schema | None = Field(None, description="json, or a JSON schema.")
    options: OllamaOptions | None = Field(None, description="Sampling settings.")
    stream: bool | None = Field(None, description="false: one document instead of a stream.")
    think: Effort | None = Field(None, description="Whether the model thinks, or how much.")
    keep_alive: Any = Field(None, description=LOADING)
    logprobs: bool | None = Field(None, description="Return the log prob of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = Field(None, description="Alternatives per token.")

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def sampling(self, guide: Mapping[str, Sequence[Any]]) -> Sampling:
        more = {**guide, **(log_prob_values(self.top_logprobs or 0) if self.logprobs else {})}
        return (self.options or OllamaOptions.model_validate({})).sampling(more)

    def schema_(self) -> Mapping[str, JsonValue] | None:
        if isinstance(self.format, dict):
            return self.format
        return ANY_OBJECT if self.format == "json" else None

    def effort(self) -> str | None:
        if isinstance(self.think, bool):
            return ON if self.think else OFF
        return self.think


class OllamaFunction(Strict):
    name: ToolName
    arguments: dict[str, JsonValue]
    description: str | None = None
    index: int | None = None


class OllamaCall(Strict):
    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], at_most(MAX_MESSAGES)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None
    images: Annotated[Any, refused(NO_IMAGES, [])] = Field(None, description="Not supported.")


class OllamaChatRequest(_Asked):
    messages: Annotated[list[OllamaMessage], at_most(MAX_MESSAGES)] = Field(default_factory=list)
    tools: Tools | None = Field(None, description="Functions that the model may call.")

    def talk(self) -> Talk:
        """Raises `Refused` for tools that cannot be used."""
        functions: list[Function] = [tool.function for tool in self.tools or ()]
        tools = tool_use(functions, Choice(), several=True)
        return Talk(_listed(self.messages), tools, self.schema_(), effort=self.effort(), effort_field="think")


class OllamaGenerateRequest(_Asked):
    prompt: str = Field("", description="The text to answer.")
    system: str | None = Field(None, description="Instructions before the prompt.")
    raw: bool | None = Field(None, description="Use the prompt as it is, without the chat template.")
    template: Annotated[Any, refused("templates in requests are not supported: the checkpoint's is used", "")] = None
    context: Annotated[Any, refused("the server stores no context: send the conversation to /api/chat", [])] = None
    suffix: Annotated[Any, refused("fill-in-the-middle models are not supported", "")] = None
    images: Annotated[Any, refused(NO_IMAGES, [])] = Field(None, description="Not supported.")

    def talk(self) -> Talk:
        opening: list[dict[str, JsonValue]] = [{"role": "system", "content": self.system}] if self.system else []
        return Talk(
            [*opening, {"role": "user", "content": self.prompt}],
            schema=self.schema_(),
            effort=self.effort(),
            effort_field="think",
        )


class OllamaShowRequest(Strict):
    model: ModelName = ""
    name: ModelName = Field("", description="The old name of model.")
    verbose: bool | None = Field(None, description="It has no effect.")


def _listed(messages: Sequence[OllamaMessage]) -> list[dict[str, JsonValue]]:
    """Messages for a chat template, which requires ids: calls get ids, and results get those of the calls, in order."""
    listed: list[dict[str, JsonValue]] = []
    open_ids: list[str] = []
    num_calls = 0
    for message in messages:
        entry: dict[str, JsonValue] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            entry["reasoning_content"] = message.thinking
        if message.tool_calls:
            first, num_calls = num_calls, num_calls + len(message.tool_calls)
            open_ids = [call.id or f"call{number:05}" for number, call in enumerate(message.tool_calls, first)]
            calls = zip(open_ids, message.tool_calls, strict=True)
            entry["tool_calls"] = [
                {"id": call_id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
                for call_id, call in calls
            ]
        if message.role == "tool":
            entry["tool_call_id"] = message.tool_call_id or (open_ids.pop(0) if open_ids else "call")
            if name := message.tool_name or message.name:
                entry["name"] = name
        listed.append(entry)
    return listed
