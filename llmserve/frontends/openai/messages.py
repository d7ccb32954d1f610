"""A conversation as an ensemble takes it: as messages, or as text in the chat format of its tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import LlmserveError, Unsupported
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.openai.ensembles import Ensemble, Values
from llmserve.frontends.openai.failures import Refused
from llmserve.frontends.shared.formatted_chat import FormattedChat, formatted_chat, tokenizer_dirs
from llmserve.frontends.shared.server_core import Core

Messages = Sequence[Mapping[str, str]]


class Conversations:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._formats: dict[str, tuple[object, FormattedChat]] = {}  # by ensemble: the config it was made for, and it

    async def values(
        self, ensemble: Ensemble, messages: Messages, template_values: Mapping[str, Json] | None = None
    ) -> Values:
        """Inputs of the ensemble. Raises `Refused` when it can take no conversation."""
        if not ensemble.takes_messages:
            chat = await self._format(ensemble)
            return {"text_input": [chat.text(messages, template_values or {})]}
        values: dict[str, Sequence[str]] = {"messages": [json.dumps(messages, ensure_ascii=False)]}
        if template_values:
            values["chat_template_kwargs"] = [json.dumps(template_values, ensure_ascii=False)]
        return values

    async def _format(self, ensemble: Ensemble) -> FormattedChat:
        made_for, known = self._formats.get(ensemble.name, (None, None))
        if known is None or made_for is not ensemble.config:
            steps = [self._core.model_config(step.model_name) for step in ensemble.config.ensemble_scheduling.step]
            known = await asyncio.to_thread(_first_format, ensemble, steps)
            self._formats[ensemble.name] = ensemble.config, known
        return known


def _first_format(ensemble: Ensemble, steps: Sequence[ModelConfig]) -> FormattedChat:
    problem = "no step of it names a tokenizer_dir on this machine"
    for directory in tokenizer_dirs(steps):
        try:
            return formatted_chat(directory, steps)
        except Unsupported as reason:
            problem = str(reason)
        except LlmserveError:
            continue
    raise Refused(
        f"model '{ensemble.name}' takes text, not messages, and {problem}: ask for /v1/completions", "messages"
    )
