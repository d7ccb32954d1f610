"""Converts a conversation to inputs of an ensemble: messages, or text in the chat format of its tokenizer. Also reads
the chat style, which parses answers, from the ensemble's first step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import LlmserveError, Unsupported
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.shared.formatted_chat import FormattedChat, formatted_chat, tokenizer_dirs
from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.answers.spoken import Prepared
from llmserve.frontends.text.requests.ensembles import Ensemble, Ensembles, Values
from llmserve.frontends.text.requests.formats import guide_values
from llmserve.frontends.text.requests.notes import note
from llmserve.frontends.text.requests.tools import ToolUse
from llmserve.stages.chat_style import ON_OFF, ChatStyle, Wanted, answer_guide
from llmserve.stages.chat_template import ENDINGS, Ending

Messages = Sequence[Mapping[str, Any]]
OFF, ON = "none", "on"  # reasoning efforts; templates define the others
MAX_STYLES = 64  # of one ensemble, one for each set of template values
GUIDE = "guided_decoding_guide"


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation, and the requirements for its next message, for all APIs."""

    messages: Messages
    tools: ToolUse = field(default_factory=ToolUse)
    schema: Mapping[str, Json] | None = None  # of the answer; None: any text
    template_values: Mapping[str, Json] = field(default_factory=dict)
    effort: str | None = None  # reasoning effort; None: the template's default
    effort_field: str = "reasoning_effort"  # its name in the API
    choices: Sequence[str] = ()  # possible answers; empty: any text

    @property
    def continues(self) -> bool:
        """Whether the last message begins the answer."""
        return Ending.of([message["role"] for message in self.messages], self.template_values).continues


class Conversations:
    def __init__(self, ensembles: Ensembles) -> None:
        self._ensembles = ensembles
        self._formats: dict[str, tuple[object, FormattedChat]] = {}  # by ensemble: its config and format
        self._styles: dict[str, tuple[object, dict[str, ChatStyle]]] = {}  # its config, and styles by template values

    async def prepared(self, ensemble: Ensemble, talk: Talk) -> Prepared:
        """Raises `Refused` if the ensemble does not support such a conversation."""
        given = self.with_defaults(talk.template_values)
        style = await self.style(ensemble, _but_endings(given))
        if talk.effort is not None and (more := _switched(style, talk.effort, talk.effort_field)):
            given = self.with_defaults(more | dict(talk.template_values))
            style = await self.style(ensemble, _but_endings(given))
        style = style.told_by(talk.messages)
        if talk.tools.functions:
            _check_tools(ensemble, style)
        prompt = dict(await self.values(ensemble, talk.messages, given, talk.tools))
        tools = talk.tools.tools()
        if _shows_special(ensemble, style, bool(tools)):
            prompt["skip_special_tokens"] = [False]
        return Prepared(
            prompt,
            _guide(ensemble, style, talk),
            lambda: style.reader(tools, continues=talk.continues),
            thinks=bool(style.reasoning),
        )

    def with_defaults(self, template_values: Mapping[str, Json] | None) -> dict[str, Json]:
        """The request's values for the chat template, with the operator's as defaults."""
        return {**self._ensembles.template_values, **(template_values or {})}

    async def values(
        self,
        ensemble: Ensemble,
        messages: Messages,
        template_values: Mapping[str, Json] | None = None,
        tools: ToolUse | None = None,
    ) -> Values:
        """Inputs of the ensemble. Raises `Refused` if it does not support conversations."""
        listed = tools.documents() if tools is not None and tools.functions else []
        if not ensemble.takes_messages:
            chat = await self._format(ensemble)
            return {"text_input": [await chat.text_in_thread(messages, template_values or {}, listed)]}
        values: dict[str, Sequence[str]] = {"messages": [json.dumps(messages, ensure_ascii=False)]}
        if template_values:
            values["chat_template_kwargs"] = [json.dumps(template_values, ensure_ascii=False)]
        if listed:
            values["tools"] = [json.dumps(listed, ensure_ascii=False)]
        return values

    async def style(self, ensemble: Ensemble, template_values: Mapping[str, Json] | None = None) -> ChatStyle:
        """The style that parses answers: requested from the ensemble once per set of template values, and cached."""
        config = self._ensembles.core.model_config(ensemble.encoder)
        made_for, known = self._styles.get(ensemble.name, (None, {}))
        if made_for is not config or len(known) >= MAX_STYLES:
            known = {}
            self._styles[ensemble.name] = config, known
        key = json.dumps(template_values, sort_keys=True) if template_values else ""
        if key not in known:
            known[key] = await self._new_style(ensemble, config, template_values or {})
        return known[key]

    async def _new_style(
        self, ensemble: Ensemble, config: ModelConfig, template_values: Mapping[str, Json]
    ) -> ChatStyle:
        if not ensemble.takes_messages:
            return await (await self._format(ensemble)).style_in_thread(template_values)
        if any(entry.name == "RETURN_CHAT_STYLE" for entry in config.input):
            return ChatStyle.from_json(await self._ensembles.chat_style(ensemble, template_values))
        return ChatStyle()

    async def _format(self, ensemble: Ensemble) -> FormattedChat:
        made_for, known = self._formats.get(ensemble.name, (None, None))
        if known is None or made_for is not ensemble.config:
            core = self._ensembles.core
            steps = [core.model_config(step.model_name) for step in ensemble.config.ensemble_scheduling.step]
            known = await asyncio.to_thread(_first_format, ensemble, steps)
            self._formats[ensemble.name] = ensemble.config, known
        return known


def _but_endings(values: Mapping[str, Json]) -> Mapping[str, Json]:
    return {name: value for name, value in values.items() if name not in ENDINGS}


def _switched(style: ChatStyle, effort: str, field: str) -> dict[str, Json]:
    """The template values that select an effort. Raises `Refused` if the template does not support it."""
    switch = next((name for name in ON_OFF if name in style.switches), "")
    if effort in (OFF, ON) and switch:
        return {switch: effort == ON}
    if effort != ON and "reasoning_effort" in style.switches:
        return {"reasoning_effort": effort}
    if effort == (ON if style.reasoning else OFF):
        return {}
    if effort != OFF and (switch or style.reasoning) and note(f"{field} '{effort}': reasoning is only on or off"):
        return {switch: True} if switch else {}
    if not style.reasoning and note(f"{field}: this model does not reason"):
        return {}
    problem = "does not support this effort" if style.reasoning else "does not reason"
    if effort == OFF:
        problem = "always reasons"
    raise Refused(f"{field} '{effort}': this model's chat template {problem}", field)


def _check_tools(ensemble: Ensemble, style: ChatStyle) -> None:
    if not style.takes_tools:
        raise Refused(f"tools are not supported by model '{ensemble.name}': its chat template has none", "tools")
    if style.tools is None:
        raise Refused(
            f"tools are not supported by model '{ensemble.name}': its chat template writes calls in no known form; "
            f"known here; name one in the parameter tool_format of '{ensemble.encoder}'",
            "tools",
        )


def _shows_special(ensemble: Ensemble, style: ChatStyle, has_tools: bool) -> bool:
    """Whether the text must include special tokens, because some of them mark calls or thoughts."""
    marks_calls = style.tools is not None and any(marker in style.special for marker in style.tools.markers)
    wanted = (has_tools and marks_calls) or any(marker in style.special for marker in style.thought_markers)
    if has_tools and marks_calls and "skip_special_tokens" not in ensemble.inputs:
        raise Refused(
            f"tools are not supported by model '{ensemble.name}': its calls are marked by special tokens, and its "
            "ensemble has no input skip_special_tokens",
            "tools",
        )
    return wanted and "skip_special_tokens" in ensemble.inputs


def _guide(ensemble: Ensemble, style: ChatStyle, talk: Talk) -> Values:
    """The inputs that constrain the form of the answer."""
    tools = talk.tools
    is_plain = not tools.functions and (not style.reasoning or talk.continues)
    if is_plain or (talk.schema is None and not talk.choices and not tools.is_enforced):
        return {} if talk.schema is None else guide_values("json_schema", json.dumps(talk.schema))
    if GUIDE not in ensemble.inputs:
        raise Refused(
            f"model '{ensemble.name}' cannot be restricted to tools or to a format: its ensemble has no input {GUIDE}",
            "tools" if tools.is_enforced else "response_format",
        )
    wanted = Wanted(tools.tools(), tools.must_call, tools.several, talk.schema, talk.choices)
    return guide_values("ebnf_grammar", answer_guide(style, wanted, continues=talk.continues))


def _first_format(ensemble: Ensemble, steps: Sequence[ModelConfig]) -> FormattedChat:
    problem = "none of its steps names a tokenizer_dir on this machine"
    for directory in tokenizer_dirs(steps):
        try:
            return formatted_chat(directory, steps)
        except Unsupported as reason:
            problem = str(reason)
        except LlmserveError:
            continue
    raise Refused(f"model '{ensemble.name}' takes text, not messages, and {problem}: use /v1/completions", "messages")
