"""Backend `identity`: the n-th input becomes the n-th output. For tests and for measuring the server itself.

`parameters { execute_delay_ms }` makes every execution take that long.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import ModelConfigError, raise_problems
from llmserve.serving.backend import LoadContext, LoadedModel
from llmserve.serving.config.model_config import instance_names
from llmserve.serving.types import InferRequest, InferResponse, Tensor


class IdentityInstance:
    def __init__(self, name: str, context: LoadContext, delay_s: float) -> None:
        self.name = name
        self._model_name: str = context.config.name
        self._version = context.version
        self._delay_s = delay_s
        inputs = [tensor.name for tensor in context.config.input]
        outputs = [tensor.name for tensor in context.config.output]
        self._pairs = tuple(zip(inputs, outputs, strict=True))
        self.max_inline_bytes = 0 if delay_s else sys.maxsize  # nothing is copied

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        return [self._respond(request) for request in requests]

    def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        pass

    async def _respond(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        yield self.execute_inline(request)

    def execute_inline(self, request: InferRequest) -> InferResponse:
        outputs = tuple(
            Tensor(output, tensor.datatype, tensor.data)
            for name, output in self._pairs
            if (tensor := request.inputs.get(name)) is not None
        )
        return InferResponse(self._model_name, self._version, request.request_id, outputs, final=True)


class IdentityBackend:
    name = "identity"

    def complete_config(self, config: ModelConfig, model_dir: Path) -> ModelConfig:
        return config

    def load(self, context: LoadContext) -> LoadedModel:
        config, problems = context.config, []
        if len(config.input) != len(config.output):
            problems.append(f"it has {len(config.input)} inputs and {len(config.output)} outputs; they must be as many")
        problems += [
            f"input '{given.name}' and output '{taken.name}' differ in data_type"
            for given, taken in zip(config.input, config.output, strict=False)
            if given.data_type != taken.data_type
        ]
        delay_ms = context.parameter("execute_delay_ms", "0")
        if not delay_ms.isdecimal():
            problems.append(f"parameter execute_delay_ms must be an integer number of milliseconds, got '{delay_ms}'")
        raise_problems(ModelConfigError, f"identity model '{config.name}' cannot be loaded", problems)
        return LoadedModel([IdentityInstance(name, context, int(delay_ms) / 1000) for name in instance_names(config)])
