"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: load and unload adapters while a server runs."""

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
    lora_name: str = Field(description="The name of the new model. An adapter of this name is replaced.")
    lora_path: str = Field(description="Path on the server of an adapter directory from llmserve adapter build.")
    model: ModelName = Field("", description="The model that the adapter is for, if the server has several.")


class UnloadAdapterRequest(Strict):
    lora_name: str = Field(description="The adapter's name.")
    model: ModelName = ""


@dataclass(frozen=True, slots=True)
class LoraAdapters:
    state: ApiState

    async def load(self, body: LoadAdapterRequest, request: Request) -> Response:
        """Load an adapter and serve it as a model. Running requests keep the adapter they started with."""
        ensembles = self.state.ensembles
        await ensembles.core.load_adapter(ensembles.find(body.model).name, body.lora_name, body.lora_path)
        return await Models(self.state).retrieve(body.lora_name)

    async def unload(self, body: UnloadAdapterRequest, request: Request) -> Response:
        """Unload an adapter. Running requests keep it until they end."""
        ensembles = self.state.ensembles
        await ensembles.core.unload_adapter(ensembles.find(body.model).name, body.lora_name)
        return json_answer({"id": body.lora_name, "object": "model", "deleted": True})
