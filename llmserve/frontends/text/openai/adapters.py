"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters that come and go as a server runs."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request, Response
from pydantic import Field

from llmserve.frontends.text.answers.event_stream import json_answer
from llmserve.frontends.text.openai.models import Models
from llmserve.frontends.text.requests.fields import ModelName
from llmserve.frontends.text.requests.validation import Strict
from llmserve.frontends.text.state import ApiState


class LoadAdapterRequest(Strict):
    lora_name: str = Field(description="The model's name from here on. What has it now is replaced.")
    lora_path: str = Field(description="An adapter directory of llmserve adapter build, as the server sees it.")
    model: ModelName = Field("", description="The model that it is for, where there are several.")


class UnloadAdapterRequest(Strict):
    lora_name: str
    model: ModelName = ""


@dataclass(frozen=True, slots=True)
class LoraAdapters:
    state: ApiState

    async def load(self, body: LoadAdapterRequest, request: Request) -> Response:
        """Serve an adapter as a model of its own. Requests under way keep the adapter that they have."""
        ensembles = self.state.ensembles
        await ensembles.core.load_adapter(ensembles.find(body.model).name, body.lora_name, body.lora_path)
        return await Models(self.state).retrieve(body.lora_name)

    async def unload(self, body: UnloadAdapterRequest, request: Request) -> Response:
        """Take an adapter out. Requests under way keep it."""
        ensembles = self.state.ensembles
        await ensembles.core.unload_adapter(ensembles.find(body.model).name, body.lora_name)
        return json_answer({"id": body.lora_name, "object": "model", "deleted": True})
